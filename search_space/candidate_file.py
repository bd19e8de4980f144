"""Writes one candidate as an experiment file."""

from collections.abc import Mapping
from typing import Any

import yaml

from search_space.canon import unflatten
from search_space.domains import Scalar
from search_space.yamlfile import Dumper

HEADER = "# One candidate, every field fixed. Train it with `assay search FILE`.\n"


def write_candidate(point: Mapping[str, Scalar], plain: Mapping[str, Any], *, name: str = "") -> str:
    """The text of a file whose space holds the point alone; task, budget, size and engine are the experiment's."""
    space = _narrowing(unflatten(point))
    if plain["size"]:
        space["model"] = {"size": {measure: int(value) for measure, value in plain["size"].items()}, **space["model"]}
    kind = plain["task"]["kind"]
    written: dict[str, Any] = {
        "name": name or f"{plain['name'][:54]}-candidate",
        "description": f"One candidate of {plain['name']}.",
        "task": {kind: plain["task"][kind]},
        "budget": plain["budget"],
        **space,
        "search": {"sampler": "random", "trials": 1, "seed": plain["search"]["seed"]},
        "engine": _engine(plain["engine"]),
    }
    if plain["limits"]:
        written["limits"] = {
            name: int(limit) if limit == int(limit) else limit for name, limit in plain["limits"].items()
        }
    if plain["blocks"]:
        written["blocks"] = plain["blocks"]
    return HEADER + yaml.dump(written, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def _engine(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The engine in the language of files."""
    written = {key: value for key, value in plain.items() if key not in ("cpus", "gpus")}
    return {**written, "resources": {"cpu": plain["cpus"], "gpu": plain["gpus"]}}


def _narrowing(nested: Any) -> Any:
    """A nested point in the language of files: {'kind': k, k: {...}} becomes {k: {...}}."""
    if not isinstance(nested, Mapping):
        return nested
    if "kind" in nested and set(nested) <= {"kind", nested["kind"]}:
        kind = nested["kind"]
        return {kind: _narrowing(nested.get(kind, {}))}
    return {key: _narrowing(value) for key, value in nested.items()}
