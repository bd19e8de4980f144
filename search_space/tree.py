"""The tree that a search space is: domains under names, families of variants, sub-spaces."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from search_space import domains
from search_space.canon import digest
from search_space.domains import Choice, Domain


@dataclass(frozen=True, kw_only=True)
class OneOf:
    """A family: exactly one variant is taken, and only its fields are live."""

    variants: Mapping[str, "Space"]
    default: str
    opt_in: bool = False
    help: str = ""

    @cached_property
    def kinds(self) -> Choice:
        """The choice of a variant."""
        names = tuple(self.variants)
        return Choice(options=names, default=self.default if self.default in names else names[0], help=self.help)


@dataclass(frozen=True, kw_only=True)
class Space:
    """A tree of named domains, families and sub-spaces."""

    fields: Mapping[str, "Domain | OneOf | Space"]
    help: str = ""

    @cached_property
    def id(self) -> str:
        """Digest of what can be drawn; defaults and help texts do not count."""
        return digest(plain(self))


def plain(node: Domain | OneOf | Space) -> dict[str, Any]:
    """The tree as plain data."""
    if isinstance(node, Space):
        return {"space": {name: plain(child) for name, child in node.fields.items()}}
    if isinstance(node, OneOf):
        return {"one_of": {kind: plain(child) for kind, child in node.variants.items()}}
    return domains.plain(node)


def join(path: str, name: str) -> str:
    """The path of a child."""
    return f"{path}.{name}" if path else name


def unknown(what: str, name: str, known: Any) -> str:
    """The message for a name nobody knows, with near matches first."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(match) for match in near)}? " if near else ""
    return f"is no known {what}; {hint}Known: {', '.join(known)}"
