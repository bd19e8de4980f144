"""What a model looked like inside at one point of its training."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "diagnostics/"
"""Begins the name of every metric of a checkup."""


@dataclass(frozen=True, kw_only=True)
class Checkup:
    """One look inside a model. Every number is finite; what could not be measured is absent."""

    tokens: int
    """Training tokens seen by then."""
    metrics: Mapping[str, float]
    """A few numbers for the whole model, under names that begin with PREFIX."""
    layers: tuple[Mapping[str, Any], ...]
    """`rms`, `rank`, `dead_units`; and by head `entropy`, `sink_share`, `redundancy`, empty without weights."""
    gradients: Mapping[str, Mapping[str, float]]
    """Norm of the loss gradient by layer and role."""
    updates: Mapping[str, Mapping[str, float]]
    """How far the last step moved the weights over their norm, by layer and role."""
    warnings: tuple[str, ...] = ()
    """What is unusual, in sentences."""
    notes: tuple[str, ...] = ()
    """What could not be looked at, in sentences."""


def checkup_from_plain(plain: Mapping[str, Any]) -> Checkup:
    """The inverse of records.to_plain for a checkup."""
    lists = {name: tuple(plain[name]) for name in ("layers", "warnings", "notes")}
    return Checkup(**{**plain, **lists})
