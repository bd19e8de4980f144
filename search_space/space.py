"""The search space: a tree of domains derived from config dataclasses, and the one walk over it."""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from search_space import domains
from search_space.domains import Domain, Scalar
from search_space.narrowing import NarrowingError, narrow
from search_space.tree import OneOf, Space, join, plain, unknown

__all__ = [
    "Ask",
    "NarrowingError",
    "OneOf",
    "Space",
    "conditional",
    "default_point",
    "derive",
    "enumerate_all",
    "holds",
    "join",
    "narrow",
    "plain",
    "random_point",
    "searched",
    "size",
    "unknown",
    "walk",
]


class Ask(Protocol):
    """Picks a value for one searched path."""

    def __call__(self, path: str, domain: Domain) -> Scalar: ...


def derive(config: type, variants: Callable[[type], Mapping[str, type]]) -> Space:
    """The full space of a config dataclass; `variants` gives the registered kinds of a family.

    Fields without a declared domain (such as the vocabulary size) come from elsewhere and are left out.
    """
    fields: dict[str, Domain | OneOf | Space] = {}
    for declared in dataclasses.fields(config):
        marks = declared.metadata
        if "domain" in marks:
            fields[declared.name] = marks["domain"]
        elif "family" in marks:
            kinds = variants(marks["family"])
            fields[declared.name] = OneOf(
                variants={kind: derive(variant, variants) for kind, variant in kinds.items()},
                default=marks["default"],
                opt_in=marks["opt_in"],
                help=marks["help"],
            )
        elif "nested" in marks:
            fields[declared.name] = derive(marks["nested"], variants)
    return Space(fields=fields, help=(config.__doc__ or "").strip().split("\n")[0])


def walk(space: Space, ask: Ask, prefix: str = "") -> dict[str, Scalar]:
    """One point of the space as {path: scalar}; `ask` is called for every live path that holds more than one value.

    Sampling, enumerating and replaying are this walk with another `ask`.
    """
    point: dict[str, Scalar] = {}
    for name, node in space.fields.items():
        path = f"{prefix}{name}"
        if isinstance(node, Space):
            point.update(walk(node, ask, f"{path}."))
        elif isinstance(node, OneOf):
            kind = _ask(f"{path}.kind", node.kinds, ask)
            assert isinstance(kind, str)
            point[f"{path}.kind"] = kind
            point.update(walk(node.variants[kind], ask, f"{path}.{kind}."))
        else:
            point[path] = _ask(path, node, ask)
    return point


def _ask(path: str, domain: Domain, ask: Ask) -> Scalar:
    return domains.only_value(domain) if domains.is_fixed(domain) else ask(path, domain)


def random_point(space: Space, rng: random.Random) -> dict[str, Scalar]:
    """One point drawn uniformly, variant by variant."""
    return walk(space, lambda path, domain: domains.draw(domain, rng))


def default_point(space: Space) -> dict[str, Scalar]:
    """The point that takes every declared default (or the first option where the file excludes it)."""
    return walk(space, lambda path, domain: domain.default)


def searched(space: Space, prefix: str = "") -> dict[str, Domain]:
    """Every path that can hold more than one value, live or conditional, with its domain."""
    found: dict[str, Domain] = {}
    for name, node in space.fields.items():
        path = f"{prefix}{name}"
        if isinstance(node, Space):
            found.update(searched(node, f"{path}."))
        elif isinstance(node, OneOf):
            if len(node.variants) > 1:
                found[f"{path}.kind"] = node.kinds
            for kind, variant in node.variants.items():
                found.update(searched(variant, f"{path}.{kind}."))
        elif not domains.is_fixed(node):
            found[path] = node
    return found


def conditional(space: Space, prefix: str = "", under_choice: bool = False) -> set[str]:
    """The searched paths that are live in some points only."""
    found: set[str] = set()
    for name, node in space.fields.items():
        path = f"{prefix}{name}"
        if isinstance(node, Space):
            found |= conditional(node, f"{path}.", under_choice)
        elif isinstance(node, OneOf):
            several = len(node.variants) > 1
            if several and under_choice:
                found.add(f"{path}.kind")
            for kind, variant in node.variants.items():
                found |= conditional(variant, f"{path}.{kind}.", under_choice or several)
        elif under_choice and not domains.is_fixed(node):
            found.add(path)
    return found


def size(space: Space) -> float:
    """How many points the space holds; math.inf when a real interval is searched."""
    total: float = 1
    for node in space.fields.values():
        if isinstance(node, Space):
            total *= size(node)
        elif isinstance(node, OneOf):
            total *= sum(size(variant) for variant in node.variants.values())
        else:
            total *= domains.size(node)
    return total


def enumerate_all(space: Space, prefix: str = "") -> Iterator[dict[str, Scalar]]:
    """Every point of a finite space once, in declared order; the last field moves fastest."""
    assert math.isfinite(size(space)), "a space with a real interval cannot be enumerated"
    parts = [list(_enumerate_node(f"{prefix}{name}", node)) for name, node in space.fields.items()]
    for combination in itertools.product(*parts):
        yield {path: value for part in combination for path, value in part.items()}


def _enumerate_node(path: str, node: Domain | OneOf | Space) -> Iterator[dict[str, Scalar]]:
    if isinstance(node, Space):
        yield from enumerate_all(node, f"{path}.")
    elif isinstance(node, OneOf):
        for kind, variant in node.variants.items():
            for rest in enumerate_all(variant, f"{path}.{kind}."):
                yield {f"{path}.kind": kind, **rest}
    else:
        for value in domains.values(node):
            yield {path: value}


def holds(space: Space, point: Mapping[str, Scalar]) -> bool:
    """True when the space can produce this point."""

    def ask(path: str, domain: Domain) -> Scalar:
        if path not in point or not domains.contains(domain, point[path]):
            raise KeyError(path)
        return point[path]

    try:
        walked = walk(space, ask)
    except KeyError:
        return False
    return walked.keys() == point.keys() and all(domains.same(walked[path], point[path]) for path in walked)
