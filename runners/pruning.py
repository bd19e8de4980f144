"""Pruners: who may train on. Decisions follow from stored losses at equal numbers of tokens, never from a clock."""

import math
from abc import abstractmethod
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from search_space.records import Reading, Status, TrialResult

if TYPE_CHECKING:
    from search_space.experiment import Experiment

_MEDIAN_OF_AT_LEAST = 4
_BROKEN = (Status.DIVERGED, Status.OUT_OF_MEMORY, Status.TIMED_OUT, Status.FAILED)


class AbstractPruner:
    """Sees every reading of every trial and says which trials train on."""

    @abstractmethod
    def wants(self, number: int, tokens: int) -> bool:
        """True when the reading decides something and is to be stored."""

    @abstractmethod
    def observe(self, number: int, tokens: int, loss: float) -> None:
        """Take note of a stored reading."""

    @abstractmethod
    def goes_on(self, number: int, tokens: int) -> bool:
        """True when the trial, just observed at `tokens`, may train on."""

    @abstractmethod
    def end(self, number: int, tokens: int) -> None:
        """The trial broke after `tokens`: from there on it counts as worst."""


class NoPruner(AbstractPruner):
    """Every trial trains to its end."""

    def wants(self, number: int, tokens: int) -> bool:
        return False

    def observe(self, number: int, tokens: int, loss: float) -> None:
        """Nothing is compared."""

    def goes_on(self, number: int, tokens: int) -> bool:
        return True

    def end(self, number: int, tokens: int) -> None:
        """Nothing is compared."""


class Asha(AbstractPruner):
    """Asynchronous successive halving: at each rung the best 1 / factor of those who came so far train on.

    Li et al. 2020, A System for Massively Parallel Hyperparameter Tuning, algorithm 2, in the variant that stops
    trials instead of pausing them. Rungs lie at grace_tokens * factor^k below the budget.
    """

    def __init__(self, *, grace_tokens: int, factor: int, budget_tokens: int) -> None:
        self._factor = factor
        self._rungs: list[int] = []
        rung = grace_tokens
        while rung < budget_tokens:
            self._rungs.append(rung)
            rung *= factor
        self._losses: dict[int, dict[int, float]] = {rung: {} for rung in self._rungs}
        self._reached: dict[int, dict[int, int]] = {}

    def wants(self, number: int, tokens: int) -> bool:
        return self._rung(number, tokens) > 0

    def observe(self, number: int, tokens: int, loss: float) -> None:
        rung = self._rung(number, tokens)
        if rung:
            self._losses[rung][number] = loss if math.isfinite(loss) else math.inf
            self._reached.setdefault(number, {})[rung] = tokens

    def goes_on(self, number: int, tokens: int) -> bool:
        rung = self._rung(number, tokens)
        if not rung:
            return True
        losses = self._losses[rung]
        kept = max(1, len(losses) // self._factor)
        return math.isfinite(losses[number]) and losses[number] <= sorted(losses.values())[kept - 1]

    def end(self, number: int, tokens: int) -> None:
        for rung in self._rungs:
            if rung > tokens:
                self._losses[rung].setdefault(number, math.inf)

    def _rung(self, number: int, tokens: int) -> int:
        """The highest rung that this reading is the first to reach; 0 when there is none."""
        passed = [rung for rung in self._rungs if rung <= tokens]
        if not passed:
            return 0
        first = self._reached.get(number, {}).get(passed[-1], tokens)
        return passed[-1] if tokens <= first else 0


class Median(AbstractPruner):
    """Stops a trial whose best loss so far is above the median of the others' losses at the same tokens.

    Golovin et al. 2017, Google Vizier, section 3.2.2, with the plain instead of the running average.
    """

    def __init__(self, *, grace_tokens: int, budget_tokens: int) -> None:
        self._grace = grace_tokens
        self._budget = budget_tokens
        self._losses: dict[int, dict[int, float]] = {}
        self._broken: dict[int, int] = {}

    def wants(self, number: int, tokens: int) -> bool:
        return tokens < self._budget

    def observe(self, number: int, tokens: int, loss: float) -> None:
        self._losses.setdefault(tokens, {})[number] = loss if math.isfinite(loss) else math.inf

    def goes_on(self, number: int, tokens: int) -> bool:
        if tokens < self._grace or tokens >= self._budget:
            return True
        others = [loss for other, loss in self._losses.get(tokens, {}).items() if other != number]
        others += [
            math.inf
            for other, end in self._broken.items()
            if other != number and end < tokens and other not in self._losses.get(tokens, {})
        ]
        if len(others) < _MEDIAN_OF_AT_LEAST:
            return True
        best = min(losses[number] for at, losses in self._losses.items() if at <= tokens and number in losses)
        return best <= median(others)

    def end(self, number: int, tokens: int) -> None:
        self._broken[number] = tokens


def make_pruner(experiment: "Experiment") -> AbstractPruner:
    """The pruner an experiment asks for, with nothing observed yet."""
    pruner, tokens = experiment.search.pruner, experiment.budget.tokens
    makers: dict[str, Callable[[], AbstractPruner]] = {
        "none": NoPruner,
        "asha": lambda: Asha(grace_tokens=pruner.grace_tokens, factor=pruner.factor, budget_tokens=tokens),
        "median": lambda: Median(grace_tokens=pruner.grace_tokens, budget_tokens=tokens),
    }
    return makers[pruner.kind]()


def observe_all(pruner: AbstractPruner, number: int, readings: dict[int, float], result: TrialResult | None) -> None:
    """Show the pruner what is stored of a trial."""
    for tokens, loss in sorted(readings.items()):
        if pruner.wants(number, tokens):
            pruner.observe(number, tokens, loss)
    if result is not None and result.status in _BROKEN:
        pruner.end(number, max((reading.tokens for reading in result.curve), default=0))


def last_reading(result: TrialResult) -> Reading | None:
    """The last finite reading of a trial."""
    finite = [reading for reading in result.curve if math.isfinite(reading.loss)]
    return finite[-1] if finite else None
