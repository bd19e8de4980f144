"""What a sampler is shown: a bounded, reproducible choice of the trials so far, in plain words."""

import heapq
import itertools
from abc import abstractmethod
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from search_space.domains import Scalar

MOST_SEEN = 250
"""Trials a proposal looks at, so that its cost stays flat."""
_BEST_SHARE = 5


class Fate(Enum):
    """What became of a trial, as far as a sampler cares."""

    OK = "ok"
    PRUNED = "pruned"
    BROKEN = "broken"
    """Diverged, out of memory, timed out or failed: a violated constraint."""
    RUNNING = "running"


@dataclass(frozen=True, kw_only=True)
class Told:
    """One trial as a sampler sees it; its point lies in the space that is searched now."""

    number: int
    point: Mapping[str, Scalar]
    fate: Fate
    drawn: bool
    """False for a baseline and for trials of an earlier generation: no sampler drew them from this space."""
    values: tuple[float, ...] = ()
    """Objectives, lower is better; those of a pruned trial with its last loss; empty where one is not known."""
    last_tokens: int = 0
    last_loss: float = 0.0
    """The last finite reading of a pruned trial."""


class AbstractSampler:
    """Proposes points."""

    ends: ClassVar[bool] = False
    """True when `draws` ends after every point of the space."""
    sees_all: ClassVar[bool] = False
    """True when the sampler needs every trial, not a selection."""

    @abstractmethod
    def draws(self, number: int, history: Sequence[Told]) -> Iterator[dict[str, Scalar]]:
        """Points for trial `number`, one after another until one is taken; history is sorted by number."""


def fronts(trials: Sequence[Told]) -> list[list[Told]]:
    """Non-dominated sorting (Deb et al. 2002, NSGA-II, section III-A): the best front first, each sorted by number.

    A trial that is not ok is beaten by every trial that is.
    """
    left = sorted(trials, key=lambda told: told.number)
    if not left:
        return []
    width = max((len(told.values) for told in left), default=0)
    values = [told.values if told.fate is Fate.OK else (np.inf,) * width for told in left]
    return [[left[index] for index in front] for front in layers(np.array(values).reshape(len(left), width))]


def layers(values: NDArray[np.float64]) -> list[list[int]]:
    """The rows by non-dominated sorting, all columns minimised: the front that no row beats first."""
    at_least_as_good = (values[:, None] <= values[None]).all(axis=2)
    better = (values[:, None] < values[None]).any(axis=2)
    beats: NDArray[np.bool_] = np.logical_and(at_least_as_good, better)
    found: list[list[int]] = []
    remaining = np.ones(len(values), dtype=bool)
    while remaining.any():
        front = remaining & ~np.any(beats[remaining], axis=0)
        found.append([int(index) for index in np.flatnonzero(front)])
        remaining &= ~front
    return found


def crowding(front: NDArray[np.float64]) -> NDArray[np.float64]:
    """Deb et al. 2002, section III-B: how far apart the neighbours of each row of a front are."""
    distance = np.zeros(len(front))
    for column in front.T:
        order = np.argsort(column, kind="stable")
        ordered = column[order]
        distance[order[[0, -1]]] = np.inf
        if ordered[-1] > ordered[0]:
            distance[order[1:-1]] += (ordered[2:] - ordered[:-2]) / (ordered[-1] - ordered[0])
    return distance


def select(trials: Sequence[Told], best: Sequence[Told] | None = None, most: int = MOST_SEEN) -> list[Told]:
    """At most so many of the trials, which are sorted by number: a fifth the best finished ones, the rest the latest.

    `best` are those of one objective, where `rank` has kept them; the cost is then the same however many trials there
    are. Sorted by number.
    """
    if len(trials) <= most:
        return list(trials)
    share = most // _BEST_SHARE
    finished = (told for told in reversed(trials) if told.fate is Fate.OK)
    latest = next(finished, None)
    if latest is None:
        top: Sequence[Told] = ()
    elif len(latest.values) > 1:
        seen = [latest, *itertools.islice(finished, 4 * most - 1)]
        top = [told for front in fronts(seen) for told in front][:share]
    elif best is None:
        top = heapq.nsmallest(share, [latest, *finished], key=_rank)
    else:
        top = best[:share]
    kept = {told.number: told for told in top}
    for told in reversed(trials):
        if len(kept) >= most:
            break
        kept.setdefault(told.number, told)
    return [kept[number] for number in sorted(kept)]


def rank(best: list[Told], told: Told) -> None:
    """Take a trial among the best finished ones, as `select` wants them."""
    if told.fate is Fate.OK:
        insort(best, told, key=_rank)
        del best[MOST_SEEN // _BEST_SHARE :]


def _rank(told: Told) -> tuple[tuple[float, ...], int]:
    return told.values, told.number


def shown(trials: Sequence[Told]) -> dict[str, str]:
    """Which trials these are, in short, for the record; those of earlier searches are counted."""
    warm = sum(told.number < 0 for told in trials)
    return {
        "finished": as_ranges([told.number for told in trials if told.fate is not Fate.RUNNING and told.number >= 0]),
        "running": as_ranges([told.number for told in trials if told.fate is Fate.RUNNING]),
        **({"warm": str(warm)} if warm else {}),
    }


def as_ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers in short: '0-4,7'."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def from_ranges(text: str) -> list[int]:
    """The inverse of as_ranges."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        found.extend(range(int(low), int(high or low) + 1))
    return found
