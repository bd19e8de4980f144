"""The finals of the best candidates, as those who run them and those who decide on them both know them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from search_space.records import Stage
from search_space.settings import ContestSpec

BASELINE = 0
"""Number of the contestant that all others meet; the others follow by their loss in the search."""
CONTEST = "top finals"
"""Stands before the contestant's number in Tag.CANDIDATE; a contrast of an experiment file cannot be called so."""


class Bout(NamedTuple):
    """One training of a contest."""

    stage: Stage
    """Stage.SWEEP or Stage.FINAL."""
    contestant: int
    place: int
    """In a sweep: how many factors of 2 the learning rate lies above the contestant's own; in a final: the replica."""


@dataclass(frozen=True, kw_only=True)
class Contest:
    """All that is fixed before the first seed of a contest."""

    spec: ContestSpec
    reach: tuple[tuple[int, int], ...]
    """For each contestant, the factors of 2 by which its learning rate may go down and up: lowest and highest place."""
    searched: tuple[float, ...] = ()
    """Losses of the candidates in the search, in their order; they may be left out where each has a place."""

    @property
    def candidates(self) -> Sequence[int]:
        """The numbers of all contestants but the baseline."""
        return range(1, len(self.reach))

    @property
    def places(self) -> int:
        """How many candidates meet the baseline."""
        return min(self.spec.top, len(self.candidates))

    @property
    def share(self) -> float:
        """Chance that one verdict is ever wrong."""
        return self.spec.alpha / max(self.places, 1)


Ended = Mapping[Bout, float]
"""Loss by training that has ended, on the validation split for sweeps, on the test split for finals; NaN for one that
ended badly."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A finished trial of the search."""

    number: int
    loss: float
    identity: str
    """Equal for candidates that differ in nothing but their learning rate."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a contestant's sweep has come to."""

    is_over: bool
    place: int
    """Of the best rate so far."""
    doubt: str
    """Why the rate is not known to be the best one; empty where it is."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Who decides in a contest, by pure functions; analysis.contest has the one that `assay finals` takes."""

    candidates: Callable[[Sequence[Ranked], int, str], list[int]]
    """The numbers of the best trials, at most so many, none of which has the identity of the baseline."""
    finalists: Callable[[Contest, Ended], tuple[int, ...]]
    """The candidates that meet the baseline; empty while that is not known."""
    next_bout: Callable[[Contest, Ended, Collection[Bout]], Bout | None]
    """What to train next beside what is running; None when there is nothing, for now or for good."""
    tuned: Callable[[Contest, Ended, int], Tuned]
