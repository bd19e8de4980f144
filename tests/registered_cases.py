"""Cases shared by tests over the registry: every variant, every mixer x position pair, every option of a field.

The fast tier takes every variant once (each mixer with its richest position scheme, each scheme with softmax), and one
option of every field. The slow tier adds the other options and a fixed third of the other pairs.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from blocks import registry
from blocks.families import (
    BOTH_DIRECTIONS,
    AbstractInit,
    AbstractMixer,
    AbstractPlacement,
    AbstractPosition,
    AbstractStack,
    Direction,
    Hook,
)
from blocks.model import ModelConfig
from search_space import domains
from search_space.space import OneOf, Space, derive

Changes = dict[str, domains.Scalar]
"""Paths of a small model that are not at their default."""

FAMILIES = {
    field.name: field.metadata["family"] for field in dataclasses.fields(ModelConfig) if "family" in field.metadata
}


def causal(family: type) -> dict[str, type]:
    """The variants of a family that a decoder can hold; tests/blocks/test_stacks.py has those of other stacks."""
    return {
        kind: config
        for kind, config in registry.variants(family).items()
        if Direction.CAUSAL in getattr(config, "directions", BOTH_DIRECTIONS)
        and (family is not AbstractStack or kind == "decoder")
    }


MIXERS = causal(AbstractMixer)
POSITIONS = causal(AbstractPosition)
INITS = causal(AbstractInit)
PLACEMENTS = causal(AbstractPlacement)


def fits(mixer: type, position: type) -> bool:
    return position.needs <= mixer.offers | {Hook.EMBEDDING}


def pairs(legal: bool) -> list[Changes]:
    return [
        {"mixer.kind": mixer, "position.kind": position}
        for (mixer, m), (position, p) in itertools.product(MIXERS.items(), POSITIONS.items())
        if fits(m, p) == legal
    ]


def with_position(changes: Changes) -> Changes:
    """The changes, with the richest position scheme that every mixer they name can be built with."""
    if "position.kind" in changes:
        return changes
    mixers = {str(value) for path, value in changes.items() if f".{path}".endswith(".mixer.kind")} or {"softmax"}
    capable = [kind for kind, config in POSITIONS.items() if all(fits(MIXERS[mixer], config) for mixer in mixers)]
    return {**changes, "position.kind": max(capable, key=lambda kind: (len(POSITIONS[kind].needs), kind))}


def variants() -> Iterator[Changes]:
    for name, family in FAMILIES.items():
        if name not in ("mixer", "position"):
            for kind in causal(family):
                yield with_placement({f"{name}.kind": kind})


def with_placement(changes: Changes) -> Changes:
    """The changes, with a placement that provides what the init rule they name needs."""
    needs = INITS[str(changes.get("init.kind", "xavier"))].needs
    if not needs:
        return changes
    return {**changes, "placement.kind": next(k for k, other in PLACEMENTS.items() if needs <= other.provides)}


def some_values(domain: domains.Domain) -> tuple[domains.Scalar, ...]:
    if isinstance(domain, domains.Choice):
        return domain.options
    if isinstance(domain, domains.IntRange):
        return (domain.low, domain.high)
    return (domain.low, (domain.low + domain.high) / 2 or domain.high / 2, domain.high)


def options() -> Iterator[Changes]:
    """Every field of every variant at every option (or both ends of a range) but its default."""
    sizing = {"expansion"}
    for name, family in FAMILIES.items():
        for kind, config in causal(family).items():
            for field, node in derive(config, registry.variants).fields.items():
                if field in sizing or isinstance(node, Space):
                    continue
                path = f"{name}.{kind}.{field}"
                if isinstance(node, OneOf):
                    yield from (
                        {f"{name}.kind": kind, f"{path}.kind": other} for other in node.variants if other in MIXERS
                    )
                    continue
                for value in some_values(node):
                    if not domains.same(value, node.default):
                        yield {f"{name}.kind": kind, path: value}


def label(changes: Changes) -> str:
    return ",".join(f"{path.removesuffix('.kind')}={value}" for path, value in changes.items())


def is_first(changes: Changes) -> bool:
    """False for a pair that only the slow tier tries: neither with softmax nor with the mixer's richest scheme."""
    if changes.keys() != {"mixer.kind", "position.kind"}:
        return True
    mixer = changes["mixer.kind"]
    return mixer == "softmax" or changes == with_position({"mixer.kind": mixer})


def in_the_third(changes: Changes) -> bool:
    """True for about every third case, the same ones in every run."""
    return zlib.crc32(label(changes).encode()) % 3 == 0


def slow(cases: Iterable[Changes]) -> list[Any]:
    return [pytest.param(changes, marks=pytest.mark.slow) for changes in cases]


def tiered(cases: list[Changes]) -> list[Any]:
    """The first cases, and a third of the others for the slow tier: pairs grow with the product of both families."""
    first = [changes for changes in cases if is_first(changes)]
    return [*first, *slow(changes for changes in cases if not is_first(changes) and in_the_third(changes))]


def changed_path(changes: Changes) -> str:
    """The path of the option that a case of OPTIONS sets."""
    return next(path for path in reversed(changes) if path not in ("position.kind", "placement.kind"))


def first_options() -> list[Changes]:
    """One option of every field of every variant."""
    return list({changed_path(changes): changes for changes in reversed(OPTIONS)}.values())


PAIRS = pairs(legal=True)
BUILT = [*PAIRS, *variants()]
OPTIONS = [with_placement(with_position(changes)) for changes in options()]
FIRST_OPTIONS = first_options()
OPTION_CASES = [*FIRST_OPTIONS, *slow(changes for changes in OPTIONS if changes not in FIRST_OPTIONS)]
