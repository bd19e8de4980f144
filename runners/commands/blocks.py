"""`assay blocks`: what the registry holds."""

import argparse
import json
from typing import Any

from blocks import families, registry
from search_space import domains
from search_space.errors import UserError
from search_space.space import OneOf, Space, derive, unknown

FAMILIES: dict[str, type] = {
    "mixer": families.AbstractMixer,
    "premixer": families.AbstractPremixer,
    "pattern": families.AbstractPattern,
    "position": families.AbstractPosition,
    "ffn": families.AbstractFFN,
    "norm": families.AbstractNorm,
    "placement": families.AbstractPlacement,
    "residual": families.AbstractResidual,
    "stack": families.AbstractStack,
    "init": families.AbstractInit,
}


def run(arguments: argparse.Namespace) -> int:
    """Print every variant, as text or JSON."""
    if arguments.family and arguments.family not in FAMILIES:
        raise UserError(f"assay blocks --family {arguments.family}: {unknown('family', arguments.family, FAMILIES)}")
    names = [arguments.family] if arguments.family else list(FAMILIES)
    table = {name: [_row(config) for config in registry.variants(FAMILIES[name]).values()] for name in names}
    if arguments.json:
        print(json.dumps(table, indent=2))
    else:
        print("\n\n".join(_text(name, rows) for name, rows in table.items()))
    return 0


def _row(config: type) -> dict[str, Any]:
    space = derive(config, registry.variants)
    return {
        "kind": config.kind,  # type: ignore[attr-defined]
        "meaning": space.help,
        "paper": config.paper,  # type: ignore[attr-defined]
        "fields": {name: _field(node) for name, node in space.fields.items()},
        "offers": sorted(getattr(config, "offers", ())),
        "needs": sorted(getattr(config, "needs", ())),
    }


def _field(node: domains.Domain | OneOf | Space) -> dict[str, Any]:
    if isinstance(node, OneOf):
        return {
            "domain": f"one of {', '.join(node.variants)}",
            "default": node.default,
            "opt_in": node.opt_in,
            "help": node.help,
        }
    assert not isinstance(node, Space), "no block config nests another config"
    return {"domain": domains.describe(node), "default": node.default, "opt_in": node.opt_in, "help": node.help}


def _text(name: str, rows: list[dict[str, Any]]) -> str:
    lines = [f"{name} ({len(rows)})"]
    for row in rows:
        lines.append(f"  {row['kind']}: {row['meaning']}")
        lines.append(f"      {row['paper']}")
        for field, entry in row["fields"].items():
            fixed = f"; fixed at {entry['default']} unless opened" if entry["opt_in"] else ""
            lines.append(f"      {field}: {entry['domain']}{fixed}. {entry['help']}")
        for hook in ("offers", "needs"):
            if row[hook]:
                lines.append(f"      {hook}: {', '.join(row[hook])}")
    return "\n".join(lines)
