"""The lowest final loss so far, as a curve over the finished trials on the search's own run."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Ended(NamedTuple):
    """A trial that finished, in the order in which trials do."""

    seconds: float
    """Since the epoch."""
    number: int
    loss: float


class Point(NamedTuple):
    """A point of the curve."""

    step: int
    """How many trials have finished."""
    loss: float
    milliseconds: int
    """Since the epoch."""


def missing_points(ended: Iterable[Ended], held: Mapping[int, float]) -> list[Point]:
    """The points that the curve lacks, by step; `held` are the losses that it has, by step.

    The curve falls or stays whatever it has already: drivers that worked side by side saw their trials end in orders of
    their own.
    """
    order = sorted(ended)
    floors = _floors(len(order), held)
    points, best, before = [], float("inf"), float("inf")
    for step, (one, floor) in enumerate(zip(order, floors, strict=True), 1):
        best = min(best, one.loss)
        before = held[step] if step in held else min(before, max(best, floor))
        if step not in held:
            points.append(Point(step, before, round(one.seconds * 1000)))
    return points


def _floors(count: int, held: Mapping[int, float]) -> list[float]:
    """For each step the next loss that is held."""
    floors, floor = [], float("-inf")
    for step in range(max([count, *held]), 0, -1):
        floor = held.get(step, floor)
        floors.append(floor)
    return floors[::-1][:count]
