"""Checks the `task:` of an experiment against the task's own dataclass, by reflection."""

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

from search_space import values
from search_space.errors import Faults
from search_space.section import Section
from search_space.space import join, unknown
from search_space.values import Parser


def read_task(faults: Faults, given: Any, tasks: Mapping[str, type]) -> dict[str, Any]:
    """{'kind': name, name: {field: value}}, every field filled in; empty, with a fault recorded, when it is wrong."""
    picked = {given: None} if isinstance(given, str) else given
    if not isinstance(picked, Mapping) or len(picked) != 1:
        faults.add(
            "task", f"takes one task out of {', '.join(tasks)}, by name or as {{name: {{field: value}}}}; got {given!r}"
        )
        return {}
    ((kind, fields),) = picked.items()
    if kind not in tasks:
        faults.add(join("task", kind), unknown("task", kind, tasks))
        return {}
    filled = _fill(faults, join("task", kind), fields, tasks[kind])
    return {"kind": kind, kind: filled} if filled is not None else {}


def _fill(faults: Faults, path: str, given: Any, task: type) -> dict[str, Any] | None:
    declared = {field.name: field for field in dataclasses.fields(task) if field.init}
    hints = typing.get_type_hints(task)
    before = len(faults)
    section = Section(faults, path, given, declared)
    arguments: dict[str, Any] = {}
    for name, field in declared.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if section.has(name):
            arguments[name] = section.take(name, parser_for(hints[name]), None)
        elif required:
            faults.add(join(path, name), "is missing; this task cannot do without it")
    if len(faults) > before:
        return None
    try:
        built = task(**arguments)
    except ValueError as error:
        _blame(faults, path, str(error), [*arguments, *declared])
        return None
    return {name: _plain(getattr(built, name)) for name in declared}


def _blame(faults: Faults, path: str, message: str, names: list[str]) -> None:
    """Record the task's own complaint at the field it names first."""
    words = re.findall(r"[A-Za-z_]+", message)
    name = next((word for word in words if word in names), "")
    stripped = message.removeprefix(f"{path}.").removeprefix(f"{name}").lstrip(": ") if name else message
    faults.add(join(path, name) if name else path, stripped)


def parser_for(hint: Any) -> Parser:
    """The parser of a plainly typed field: int, float, bool, str, Literal of strings, or a tuple of one of these."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        assert inner[1:] == (Ellipsis,), f"a task field of type {hint} is not tuple[X, ...]"
        return values.many(parser_for(inner[0]))
    if origin is typing.Literal:
        return values.one_of("value", inner)
    if origin in (typing.Union, types.UnionType):
        (only,) = (option for option in inner if option is not type(None))
        return parser_for(only)
    table: dict[Any, Parser] = {
        int: values.count(low=-values.MOST),
        float: values.real(low=float("-inf")),
        bool: values.flag,
        str: values.text,
    }
    assert hint in table, f"a task field of type {hint} cannot be read from a file"
    return table[hint]


def _plain(value: Any) -> Any:
    return [_plain(entry) for entry in value] if isinstance(value, tuple | list) else value
