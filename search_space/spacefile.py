"""Reads the parts of a file that speak of points: the narrowed space, the baseline, and what contrasts change."""

import copy
from collections.abc import Mapping
from typing import Any

from search_space import domains
from search_space.domains import Domain, Scalar
from search_space.errors import Faults
from search_space.narrowing import NarrowingError, narrow
from search_space.points import changed, defaults
from search_space.space import OneOf, Space, join, unknown

Node = Domain | OneOf | Space

WIDTH = "model.d_model"
SOLVED = "is solved for by model.size and cannot be given; leave it out"
RANGE_KEYS = ("low", "high", "log", "step")


def read_space(faults: Faults, full: Space, spec: Mapping[str, Any]) -> Space:
    """The narrowed space; each fault is recorded, its part left out, and the rest read on."""
    rest: Any = copy.deepcopy({key: value for key, value in spec.items() if value is not None})
    while True:
        try:
            return narrow(full, rest)
        except NarrowingError as error:
            faults.add(error.path, error.message, item=error.item)
            parts = error.path.split(".")
            if parts[-1] in RANGE_KEYS:
                parts = parts[:-1]
            if not _remove(rest, parts, error.item):
                raise


def _remove(node: Any, parts: list[str], item: int | None) -> bool:
    """Remove what a path names; a container that is left empty goes as well."""
    if isinstance(node, dict):
        for used in range(len(parts), 0, -1):
            key = ".".join(parts[:used])
            if key in node:
                if not _remove(node[key], parts[used:], item) or not node[key]:
                    del node[key]
                return True
        return False
    if isinstance(node, list):
        if not parts and item is not None:
            del node[item]
            return True
        for entry in node:
            if parts and (entry == parts[0] or (isinstance(entry, dict) and _remove(entry, parts, item))):
                if entry == parts[0] or not entry:
                    node.remove(entry)
                return True
    return False


def read_point(faults: Faults, full: Space, space: Space, spec: Any) -> dict[str, Scalar]:
    """The baseline, a point of the full space; empty when there is a fault.

    What it does not name takes the declared default, or what the file fixes where that excludes the default.
    """
    path = "baseline"
    if not isinstance(spec, Mapping):
        faults.add(path, f"takes a mapping with keys out of: {', '.join(full.fields)}; got {spec!r}")
        return {}
    forced = read_change(faults, full, path, spec)
    if not faults.clean(path):
        return {}
    point = changed(full, space, {}, forced)
    for unused in forced.keys() - point.keys():
        faults.add(path, f"sets {unused}, but names another variant there; name the variant that has this field")
    return point


def read_change(faults: Faults, full: Space, path: str, spec: Any) -> dict[str, Scalar]:
    """{full path: scalar} of a change; faults are recorded under `path`.

    Keys may be dotted paths, values are single, a family's value is {kind: {field: value}}.
    """
    if not isinstance(spec, Mapping):
        faults.add(path, f"takes a mapping of paths to values, such as {{model.layers: 4}}; got {spec!r}")
        return {}
    forced: dict[str, Scalar] = {}
    for key, value in spec.items():
        errors: list[NarrowingError] = []
        found = _tried(full, key.split("."), value, "", errors)
        for error in errors:
            message = SOLVED if error.path == WIDTH and WIDTH not in defaults(full) else error.message
            faults.add(_under(path, key, error.path), message, item=error.item)
        for inner, scalar in found.items():
            if inner in forced:
                faults.add(join(path, key), f"sets {inner} a second time; keep one")
            forced[inner] = scalar
    return forced


def _tried(node: Node, parts: list[str], value: Any, path: str, errors: list[NarrowingError]) -> dict[str, Scalar]:
    """Like _at; an error is put down, so that its siblings are read as well."""
    try:
        return _at(node, parts, value, path, errors)
    except NarrowingError as error:
        errors.append(error)
        return {}


def _under(path: str, key: str, inner: str) -> str:
    """Where the fault at `inner` stands in the file, below the key it was written under."""
    return join(path, inner if inner.startswith(key) else key)


def _at(node: Node, parts: list[str], value: Any, path: str, errors: list[NarrowingError]) -> dict[str, Scalar]:
    """The scalars that `value` sets below the node, at the end of the dotted parts."""
    if not parts:
        return _set(node, value, path, errors)
    here = join(path, parts[0])
    if isinstance(node, Space):
        if parts[0] not in node.fields:
            raise NarrowingError(here, unknown("field", parts[0], node.fields))
        return _at(node.fields[parts[0]], parts[1:], value, here, errors)
    if isinstance(node, OneOf):
        if parts == ["kind"]:
            return _set(node, value, path, errors)
        if parts[0] not in node.variants:
            raise NarrowingError(here, unknown("variant", parts[0], node.variants))
        return _at(node.variants[parts[0]], parts[1:], value, here, errors)
    raise NarrowingError(here, f"goes below the field {path}, which has nothing below it; end the path there")


def _set(node: Node, value: Any, path: str, errors: list[NarrowingError]) -> dict[str, Scalar]:
    if isinstance(node, Space):
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise NarrowingError(path, f"takes a mapping with fields {', '.join(node.fields)}; got {value!r}")
        merged: dict[str, Scalar] = {}
        for key, inner in value.items():
            merged.update(_tried(node, [key], inner, path, errors))
        return merged
    if isinstance(node, OneOf):
        picked = {value: None} if isinstance(value, str) else value
        if not isinstance(picked, Mapping) or len(picked) != 1:
            raise NarrowingError(path, f"takes exactly one of {', '.join(node.variants)} here; got {value!r}")
        ((kind, fields),) = picked.items()
        return {f"{path}.kind": kind, **_at(node, [kind], fields, path, errors)}
    if isinstance(value, list | Mapping) or value is None:
        raise NarrowingError(path, f"takes a single value here, {domains.describe(node)}; got {value!r}")
    try:
        only = narrow(Space(fields={"value": node}), {"value": value}).fields["value"]
    except NarrowingError as error:
        raise NarrowingError(path, error.message) from error
    assert not isinstance(only, Space | OneOf)
    return {path: domains.only_value(only)}
