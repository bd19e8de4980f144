"""Pruners: who may train on. Decisions follow from stored losses at equal numbers of tokens, never from a clock."""

import math
from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from runners.history import crowding, layers
from search_space.records import Reading, Status, TrialResult

MOST_COMPARED = 500
"""Trials at a rung, the latest ones, among which fronts are looked for, so that a decision's cost stays flat."""
_MEDIAN_OF_AT_LEAST = 4
_WORST = (math.inf,)
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
_BROKEN = (Status.DIVERGED, Status.OUT_OF_MEMORY, Status.TIMED_OUT, Status.FAILED)


class AbstractPruner:
    """Sees every reading of every trial and says which trials train on."""

    @abstractmethod
    def wants(self, number: int, tokens: int) -> bool:
        """True when the reading decides something and is to be stored."""

    @abstractmethod
    def observe(self, number: int, tokens: int, loss: float, *others: float) -> None:
        """Take note of a stored reading; `others` are the further objectives as known by then, lower is better."""

    @abstractmethod
    def goes_on(self, number: int, tokens: int) -> bool:
        """True when the trial, just observed at `tokens`, may train on."""

    @abstractmethod
    def end(self, number: int, tokens: int) -> None:
        """The trial broke after `tokens`: from there on it counts as worst."""

    def marks(self, number: int) -> dict[str, int]:
        """What is recorded of a trial when it is stored."""
        return {}

    def donor(self, number: int, tokens: int, loss: float) -> int | None:
        """The trial from whose state after so many tokens this one is to go on; None: from its own. Asked before the
        reading is observed."""
        return None


class NoPruner(AbstractPruner):
    """Every trial trains to its end."""

    def wants(self, number: int, tokens: int) -> bool:
        return False

    def observe(self, number: int, tokens: int, loss: float, *others: float) -> None:
        """Nothing is compared."""

    def goes_on(self, number: int, tokens: int) -> bool:
        return True

    def end(self, number: int, tokens: int) -> None:
        """Nothing is compared."""


class Asha(AbstractPruner):
    """Asynchronous successive halving: at each rung the best 1 / factor of those who came so far train on.

    Li et al. 2020, A System for Massively Parallel Hyperparameter Tuning, algorithm 2, in the variant that stops
    trials instead of pausing them. Rungs lie at grace_tokens * factor^k below the budget. Several objectives are ranked
    by fronts, then by crowding distance, after MO-ASHA (Schmucker et al. 2021, arXiv:2106.12639, section 3.2), and
    besides, a trial that none beats trains on.
    """

    def __init__(self, *, grace_tokens: int, factor: int, budget_tokens: int) -> None:
        self._factor = factor
        self._rungs = rungs(grace_tokens, factor, budget_tokens)
        self._values: dict[int, dict[int, tuple[float, ...]]] = {rung: {} for rung in self._rungs}
        self._order: dict[int, list[float]] = {rung: [] for rung in self._rungs}
        """Losses at each rung from the best on, so that a decision costs no look at them all."""
        self._reached: dict[int, dict[int, int]] = {}

    def wants(self, number: int, tokens: int) -> bool:
        return self._rung(number, tokens) > 0

    def observe(self, number: int, tokens: int, loss: float, *others: float) -> None:
        rung = self._rung(number, tokens)
        if rung:
            self._put(rung, number, (loss, *others) if math.isfinite(loss) else _WORST)
            self._reached.setdefault(number, {})[rung] = tokens

    def goes_on(self, number: int, tokens: int) -> bool:
        rung = self._rung(number, tokens)
        if not rung:
            return True
        values = self._values[rung]
        kept = max(1, len(values) // self._factor)
        if not math.isfinite(values[number][0]):
            return False
        if len(values[number]) > 1:
            return _among_best(number, values, self._factor)
        return values[number][0] <= self._order[rung][kept - 1]

    def end(self, number: int, tokens: int) -> None:
        for rung in self._rungs:
            if rung > tokens and number not in self._values[rung]:
                self._put(rung, number, _WORST)

    def _put(self, rung: int, number: int, values: tuple[float, ...]) -> None:
        before = self._values[rung].get(number)
        _move(self._order[rung], None if before is None else before[0], values[0])
        self._values[rung][number] = values

    def _rung(self, number: int, tokens: int) -> int:
        """The highest rung that this reading is the first to reach; 0 when there is none."""
        passed = [rung for rung in self._rungs if rung <= tokens]
        if not passed:
            return 0
        first = self._reached.get(number, {}).get(passed[-1], tokens)
        return passed[-1] if tokens <= first else 0


def rungs(grace_tokens: int, factor: int, budget_tokens: int) -> list[int]:
    """The tokens at which trials are compared: grace_tokens * factor^k below the budget."""
    found = [grace_tokens]
    while found[-1] * factor < budget_tokens:
        found.append(found[-1] * factor)
    return [rung for rung in found if rung < budget_tokens]


def _move(order: list[float], before: float | None, now: float) -> None:
    """Put a loss into its place in the order, instead of the one before where there was one."""
    if before is not None:
        del order[bisect_left(order, before)]
    insort(order, now)


def _among_best(number: int, values: Mapping[int, tuple[float, ...]], factor: int) -> bool:
    """True when no trial at the rung beats this one, or when it is among the best 1 / factor by front and crowding."""
    finite = [other for other in sorted(values) if math.isfinite(values[other][0])]
    broken = len(values) - len(finite)
    seen = [*[other for other in finite if other != number][-MOST_COMPARED:], number]
    kept = max(1, (len(seen) + broken) // factor)
    table = np.array([values[other] for other in seen])
    better = 0
    for front in layers(table):
        if len(seen) - 1 in front:
            if not better:
                return True
            distance = crowding(table[front])
            mine = distance[front.index(len(seen) - 1)]
            return better + int((distance > mine).sum()) < kept
        better += len(front)
    raise AssertionError("every trial lies in a front")


class Hyperband(AbstractPruner):
    """Successive halving in brackets: the later the first rung of a trial's bracket, the longer it is left alone.

    Li et al. 2018, Hyperband (arXiv:1603.06560), algorithm 1, asynchronous: the share of trials in each bracket is that
    of the algorithm, a trial's bracket follows from its number alone, and each bracket halves on its own.
    """

    def __init__(self, *, grace_tokens: int, factor: int, budget_tokens: int) -> None:
        first = rungs(grace_tokens, factor, budget_tokens)
        self._brackets: list[AbstractPruner] = [
            *(Asha(grace_tokens=rung, factor=factor, budget_tokens=budget_tokens) for rung in first),
            NoPruner(),
        ]
        last = len(self._brackets) - 1
        sizes = [math.ceil((last + 1) / (last - at + 1) * factor ** (last - at)) for at in range(last + 1)]
        self._ends = [sum(sizes[: at + 1]) / sum(sizes) for at in range(last + 1)]

    def bracket(self, number: int) -> int:
        """The bracket of a trial; 0 is the one that halves first."""
        # Multiples of the golden ratio fill each bracket evenly from the first trials on.
        share = number * _GOLDEN % 1.0
        return next(at for at, end in enumerate(self._ends) if share < end or at == len(self._ends) - 1)

    def wants(self, number: int, tokens: int) -> bool:
        return self._of(number).wants(number, tokens)

    def observe(self, number: int, tokens: int, loss: float, *others: float) -> None:
        self._of(number).observe(number, tokens, loss, *others)

    def goes_on(self, number: int, tokens: int) -> bool:
        return self._of(number).goes_on(number, tokens)

    def end(self, number: int, tokens: int) -> None:
        self._of(number).end(number, tokens)

    def marks(self, number: int) -> dict[str, int]:
        return {"bracket": self.bracket(number)}

    def _of(self, number: int) -> AbstractPruner:
        return self._brackets[self.bracket(number)]


class Median(AbstractPruner):
    """Stops a trial whose best loss so far is above the median of the others' losses at the same tokens.

    Golovin et al. 2017, Google Vizier, section 3.2.2, with the plain instead of the running average.
    """

    def __init__(self, *, grace_tokens: int, budget_tokens: int) -> None:
        self._grace = grace_tokens
        self._budget = budget_tokens
        self._losses: dict[int, dict[int, float]] = {}
        self._order: dict[int, list[float]] = {}
        """Losses by tokens from the best on, so that a decision costs no look at them all."""
        self._broken: dict[int, int] = {}

    def wants(self, number: int, tokens: int) -> bool:
        return tokens < self._budget

    def observe(self, number: int, tokens: int, loss: float, *others: float) -> None:
        held, known = loss if math.isfinite(loss) else math.inf, self._losses.setdefault(tokens, {})
        _move(self._order.setdefault(tokens, []), known.get(number), held)
        known[number] = held

    def goes_on(self, number: int, tokens: int) -> bool:
        if tokens < self._grace or tokens >= self._budget:
            return True
        known, order = self._losses.get(tokens, {}), self._order.get(tokens, [])
        broken = sum(other != number and end < tokens and other not in known for other, end in self._broken.items())
        if len(order) - (number in known) + broken < _MEDIAN_OF_AT_LEAST:
            return True
        best = min(losses[number] for at, losses in self._losses.items() if at <= tokens and number in losses)
        return best <= _median_of_others(order, known.get(number), broken)

    def end(self, number: int, tokens: int) -> None:
        self._broken[number] = tokens


def _median_of_others(order: Sequence[float], own: float | None, broken: int) -> float:
    """The median of the losses but for the own one, with so many more beyond all of them."""
    left_out = len(order) if own is None else bisect_left(order, own)
    count = len(order) - (own is not None) + broken

    def at(place: int) -> float:
        held = place if place < left_out else place + 1
        return order[held] if held < len(order) else math.inf

    return at(count // 2) if count % 2 else (at(count // 2 - 1) + at(count // 2)) / 2


def observe_all(
    pruner: AbstractPruner,
    number: int,
    readings: Mapping[int, float],
    result: TrialResult | None,
    others: Callable[[int], tuple[float, ...]] = lambda tokens: (),
) -> None:
    """Show the pruner what is stored of a trial; `others` are its further objectives as known at so many tokens."""
    for tokens, loss in sorted(readings.items()):
        if pruner.wants(number, tokens):
            pruner.observe(number, tokens, loss, *others(tokens))
    if result is not None and result.status in _BROKEN:
        pruner.end(number, max((reading.tokens for reading in result.curve), default=0))


def last_reading(result: TrialResult) -> Reading | None:
    """The last finite reading of a trial."""
    finite = [reading for reading in result.curve if math.isfinite(reading.loss)]
    return finite[-1] if finite else None
