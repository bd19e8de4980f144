"""Applies `path=value` overrides to the data of an experiment file, before it is checked."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from search_space.errors import ExperimentError, Problem
from search_space.space import OneOf, Space
from search_space.yamlfile import Document, parse

EITHER_OR = {("model", "size"): "the size target"}
"""Mappings that hold one key out of several: setting one replaces the others."""


@dataclass(frozen=True, kw_only=True)
class Override:
    """One `--set path=value`."""

    text: str
    path: str
    value: Any

    @property
    def label(self) -> str:
        """How the override is called in a message."""
        return _label(self.text)


def _label(text: str) -> str:
    """How an override is called in a message, in characters that every terminal takes."""
    return f"--set {text}".encode("utf-8", "backslashreplace").decode()


class Source:
    """The data of a file with overrides applied, and where each path of it came from."""

    def __init__(self, document: Document, overrides: Sequence[Override]) -> None:
        self.document = document
        self.overrides = tuple(overrides)

    def where(self, path: str, item: int | None = None) -> tuple[str, int]:
        """The override that set the path or a part above it, or made it on its way; else the file and the line."""
        made = not self.document.holds(path)
        for override in reversed(self.overrides):
            if path == override.path or path.startswith(f"{override.path}."):
                return override.label, 0
            if made and override.path.startswith(f"{path}."):
                return override.label, 0
        return self.document.file, self.document.line(path, item)


def parse_override(text: str) -> Override:
    """The override of a text 'path=value', its value read as YAML; ExperimentError names the override.

    A family may be called as in a flat point: model.mixer.kind is model.mixer.
    """
    label = _label(text)
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not path or any(not part for part in path.split(".")):
        raise _refused(label, path, "is no override; write path=value, such as search.trials=40")
    if not value.strip():
        raise _refused(label, path, "has no value; write path=value, such as search.trials=40")
    if not path.startswith(("task.", "engine.")):
        path = path.removesuffix(".kind")
    try:
        document = parse(value, label)
    except ExperimentError as error:
        raise ExperimentError(dataclasses.replace(problem, line=0) for problem in error.problems) from error
    return Override(text=text, path=path, value=document.data)


def apply(data: Any, override: Override, space: Space | None) -> None:
    """Set the value in the data in place, making the mappings on the way.

    A family named on the way keeps the variants it had: to set a field of one variant does not drop the others.
    """
    node: Any = data
    place: Space | OneOf | None = space
    parts = override.path.split(".")
    for depth, part in enumerate(parts[:-1]):
        below = place.fields.get(part) if isinstance(place, Space) else None
        child = node.get(part)
        if isinstance(place, OneOf):
            below = place.variants.get(part)
        if isinstance(below, OneOf):
            child = _as_mapping(child, below)
            if parts[depth + 1] in below.variants and parts[depth + 1] not in child:
                kinds, family = ", ".join(child), ".".join(parts[: depth + 1])
                raise _refused(
                    override.label,
                    override.path,
                    f"is a field of a variant that is not picked; {family} "
                    f"picks {kinds}: add {parts[depth + 1]!r} there first",
                )
        elif isinstance(child, str):
            child = {child: {}}
        elif child is None:
            child = {}
        if not isinstance(child, dict):
            reached = ".".join(parts[: depth + 1])
            raise _refused(
                override.label,
                override.path,
                f"goes through {reached}, which holds {child!r} and not a mapping; set {reached} as a whole",
            )
        node[part] = child
        node, place = child, below if isinstance(below, Space | OneOf) else None
    if tuple(parts[:-1]) in EITHER_OR:
        node.clear()
    node[parts[-1]] = override.value


def _as_mapping(spec: Any, family: OneOf) -> Any:
    """What a file writes under a family, as {kind: narrowing}; anything malformed is returned as it is."""
    if spec is None:
        return dict.fromkeys([family.default] if family.opt_in else family.variants)
    picked: dict[str, Any] = {}
    for entry in [spec] if isinstance(spec, str) else spec:
        if isinstance(spec, Mapping):
            picked[entry] = spec[entry]
        elif isinstance(entry, str):
            picked[entry] = None
        elif isinstance(entry, Mapping):
            picked.update(entry)
    return picked


def _refused(label: str, path: str, message: str) -> ExperimentError:
    return ExperimentError([Problem(file=label, line=0, path=path, message=message)])
