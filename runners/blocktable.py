"""What the registry holds, as rows of plain data, as text, as Markdown and as one HTML page."""

import functools
import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

from blocks import families, registry
from blocks.families import AbstractPlacement, AbstractStack, InfeasibleArchitecture
from blocks.model import ModelConfig
from search_space import domains
from search_space.canon import unflatten
from search_space.space import OneOf, Space, derive, walk

Table = Mapping[str, Sequence[Mapping[str, Any]]]
"""Rows by family."""

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
COLUMNS = ("kind", "what it is", "fields", "hooks", "stacks", "paper", "proof")
INTRODUCTION = (
    "Written by `make docs` from the registry; `assay blocks --html FILE` writes the same as a page for a browser. "
    "*Fields* are shown with their domain, the default after the colon; a field in brackets keeps its default unless "
    "an experiment file opens it. *Hooks* are what a position scheme needs and a mixer offers. *Stacks* are those that "
    "a model with this block, and otherwise defaults, can be built as. *Proof* is a test in `tests/` and what it "
    "compares the block with; [references.md](references.md) has the errors that were measured."
)


def table(names: Sequence[str] = tuple(FAMILIES)) -> Table:
    """Every variant of these families."""
    return {name: [_row(name, config) for config in registry.variants(FAMILIES[name]).values()] for name in names}


def _row(family: str, config: type[Any]) -> dict[str, Any]:
    space = derive(config, registry.variants)
    return {
        "kind": config.kind,
        "meaning": space.help,
        "paper": config.paper,
        "proof": getattr(config, "proof", ""),
        "reference": getattr(config, "reference", ""),
        "fields": {name: _field(node) for name, node in space.fields.items()},
        "offers": sorted(getattr(config, "offers", ())),
        "needs": sorted(getattr(config, "needs", ())),
        "stacks": [stack for stack in registry.variants(AbstractStack) if builds_as(family, config, stack)],
    }


def _field(node: domains.Domain | OneOf | Space) -> dict[str, Any]:
    assert not isinstance(node, Space), "no block config nests another config"
    domain = f"one of {', '.join(node.variants)}" if isinstance(node, OneOf) else domains.describe(node)
    return {"domain": domain, "default": node.default, "opt_in": node.opt_in, "help": node.help}


@functools.cache
def _model_space() -> Space:
    return derive(ModelConfig, registry.variants)


def builds_as(family: str, config: type[Any], stack: str) -> bool:
    """Whether a small model with this variant, and otherwise defaults, can be built as a stack.

    Positions are sinusoids, which every mixer takes in every direction; an init rule gets a placement that it needs.
    """
    changes: dict[str, domains.Scalar] = {"position.kind": "sinusoidal", "layers": 4, "stack.kind": stack}
    if family == "init":
        placements = registry.variants(AbstractPlacement)
        changes["placement.kind"] = next(kind for kind, other in placements.items() if config.needs <= other.provides)
    if family == "stack" and config.kind != stack:
        return False
    changes[f"{family}.kind"] = config.kind

    try:
        small_model(changes, 64)
    except InfeasibleArchitecture:
        return False
    return True


def small_model(changes: Mapping[str, domains.Scalar], length: int) -> ModelConfig:
    """A model of these settings and otherwise defaults, for sequences of a length; may raise InfeasibleArchitecture."""

    def ask(path: str, domain: domains.Domain) -> domains.Scalar:
        return changes.get(path, domain.default)

    point = unflatten(walk(_model_space(), ask))
    config: ModelConfig = registry.decode(ModelConfig, point, vocab_size=64, train_len=length, max_len=length, d_ff=64)
    return config


def text(rows_by_family: Table) -> str:
    """For a terminal."""
    return "\n\n".join(_text(name, rows) for name, rows in rows_by_family.items())


def _text(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
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
        lines.append(f"      stacks: {', '.join(row['stacks'])}")
        if row["proof"]:
            lines.append(f"      proof: {row['proof']}, against {row['reference']}")
    return "\n".join(lines)


ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
ELSEWHERE = {
    "Language Models are Unsupervised Multitask Learners": "https://cdn.openai.com/better-language-models/"
    "language_models_are_unsupervised_multitask_learners.pdf",
    "Understanding the Difficulty of Training Deep Feedforward Neural Networks": "https://proceedings.mlr.press/v9/"
    "glorot10a.html",
    "Improving Transformer Optimization Through Better Initialization": "https://proceedings.mlr.press/v119/"
    "huang20f.html",
    "Efficient BackProp": "http://yann.lecun.com/exdb/publis/pdf/lecun-98b.pdf",
    "modded-nanogpt": "https://github.com/KellerJordan/modded-nanogpt",
    "Mesh Transformer JAX": "https://github.com/kingoflolz/mesh-transformer-jax",
}
"""Where works lie that have no arXiv number, by title."""


def linked(paper: str, link: str) -> str:
    """The paper with every arXiv number and every title of ELSEWHERE as a link; `link` has {place} and {words}."""
    found = ARXIV.sub(lambda m: link.format(place=f"https://arxiv.org/abs/{m[1]}", words=m[0]), paper)
    for title, place in ELSEWHERE.items():
        found = found.replace(title, link.format(place=place, words=title))
    return found


def markdown(rows_by_family: Table) -> str:
    """docs/blocks.md."""
    parts = ["# Blocks", "", INTRODUCTION]
    for name, rows in rows_by_family.items():
        parts += ["", f"## {name} ({len(rows)})", ""]
        parts += [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
        parts += [f"| {' | '.join(_markdown_cells(row))} |" for row in rows]
    return "\n".join(parts) + "\n"


def _markdown_cells(row: Mapping[str, Any]) -> list[str]:
    fields = [f"`{_field_words(name, entry)}` {entry['help']}" for name, entry in row["fields"].items()]
    cells = [
        f"`{row['kind']}`",
        row["meaning"],
        "<br>".join(fields),
        "<br>".join(_hooks(row)),
        ", ".join(row["stacks"]),
        linked(row["paper"], "[{words}]({place})"),
        f"`{row['proof']}`, against {row['reference']}",
    ]
    return [cell.replace("|", "\\|") for cell in cells]


def _field_words(name: str, entry: Mapping[str, Any]) -> str:
    default = str(entry["default"]).lower() if isinstance(entry["default"], bool) else entry["default"]
    words = f"{name}: {default} ({entry['domain'].removeprefix('one of ')})"
    return f"[{words}]" if entry["opt_in"] else words


def _hooks(row: Mapping[str, Any]) -> list[str]:
    return [f"{verb} {', '.join(row[verb])}" for verb in ("offers", "needs") if row[verb]]


STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem; color: #1d1d1f; background: #fff; }
table { border-collapse: collapse; width: 100%; margin-bottom: 2.5rem; }
th, td { border: 1px solid #d6d6da; padding: .35rem .55rem; text-align: left; vertical-align: top; }
th { background: #f2f2f5; position: sticky; top: 0; }
code { font-size: 12px; overflow-wrap: anywhere; }
td:first-child code { white-space: nowrap; }
nav a { margin-right: 1rem; }
"""


def page(rows_by_family: Table) -> str:
    """One HTML page that needs nothing else."""
    links = " ".join(f'<a href="#{name}">{name} ({len(rows)})</a>' for name, rows in rows_by_family.items())
    sections = "\n".join(_section(name, rows) for name, rows in rows_by_family.items())
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>Assay: blocks</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>Blocks</h1>\n<nav>{links}</nav>\n{sections}\n</body>\n</html>\n"
    )


def _section(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    body = "\n".join(
        f'<tr id="{name}.{html.escape(row["kind"])}">{"".join(f"<td>{cell}</td>" for cell in _html_cells(row))}</tr>'
        for row in rows
    )
    return f'<h2 id="{name}">{name} ({len(rows)})</h2>\n<table>\n<tr>{head}</tr>\n{body}\n</table>'


def _html_cells(row: Mapping[str, Any]) -> list[str]:
    def code(words: str) -> str:
        return f"<code>{html.escape(words)}</code>"

    fields = [
        f"{code(_field_words(name, entry))} {html.escape(entry['help'])}" for name, entry in row["fields"].items()
    ]
    return [
        code(row["kind"]),
        html.escape(row["meaning"]),
        "<br>".join(fields),
        "<br>".join(map(html.escape, _hooks(row))),
        ", ".join(row["stacks"]),
        linked(html.escape(row["paper"]), '<a href="{place}">{words}</a>'),
        f"{code(row['proof'])}, against {html.escape(row['reference'])}" if row["proof"] else "",
    ]
