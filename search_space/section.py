"""One mapping of an experiment file, taken apart key by key; every fault is recorded and reading goes on."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from search_space.errors import Faults
from search_space.space import join, unknown
from search_space.values import BadItem, Parser

Value = TypeVar("Value")


class Section:
    """The keys under one path."""

    def __init__(self, faults: Faults, path: str, data: Any, known: Iterable[str]) -> None:
        self.faults = faults
        self.path = path
        self.known = tuple(known)
        if data is not None and not isinstance(data, Mapping):
            faults.add(path, f"takes a mapping with keys out of: {', '.join(self.known)}; got {data!r}")
        self.data: Mapping[str, Any] = data if isinstance(data, Mapping) else {}
        for key in self.data:
            if key not in self.known:
                faults.add(join(path, key), unknown("key", key, self.known))

    def has(self, key: str) -> bool:
        """True when the file gives the key."""
        return key in self.data

    def take(self, key: str, parse: Parser, default: Value) -> Value:
        """The parsed value of a key; the default when it is absent or, with a fault recorded, wrong."""
        if key not in self.data:
            return default
        if self.data[key] is None:
            self.faults.add(join(self.path, key), "has no value; give one or remove the key")
            return default
        try:
            parsed: Value = parse(self.data[key])
        except BadItem as error:
            self.faults.add(join(self.path, key), str(error), item=error.item)
        except ValueError as error:
            self.faults.add(join(self.path, key), str(error))
        else:
            return parsed
        return default

    def need(self, key: str, parse: Parser, otherwise: Value, remedy: str) -> Value:
        """Like take, but an absent key is a fault; `otherwise` stands in so that reading can go on."""
        if key not in self.data:
            self.faults.add(join(self.path, key), f"is missing; {remedy}")
        return self.take(key, parse, otherwise)

    def section(self, key: str, known: Iterable[str]) -> "Section":
        """The mapping under a key; empty when it is absent."""
        return Section(self.faults, join(self.path, key), self.data.get(key), known)
