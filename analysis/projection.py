"""Two candidates that were trained at several sizes, judged at a size that nobody trained.

Differences are paired: at each size both sides saw the same data in the same order under the same seeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.compare import interval_text, number_text
from analysis.extrapolation import Measured, Mixture, difference_at, pooled

SURE = 0.9
"""The probability from which a side is said to win, unless another is asked for."""
LEAST_SIZES = 3
"""Sizes with pairs from which a target is judged."""
LEAST_DEGREES = 2
"""Degrees of freedom of the seeds' deviation from which a target is judged."""
CHECKED = 0.95
"""Level of the interval in which the largest size is looked for from the smaller ones."""

Losses = Mapping[float, Mapping[int, float]]
"""By size in parameters, then by replica."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """The largest size foretold from the smaller ones."""

    size: float
    measured: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        """True when what was measured lies in the interval."""
        return self.low <= self.measured <= self.high


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Two candidates at the target."""

    first: str
    second: str
    """The winner comes first; where there is none, the order in which they were given."""
    target: float
    probability: float
    """That the first has the lower loss at the target; NaN where nothing can be said."""
    estimate: float
    """First minus second at the target, nats."""
    low: float
    high: float
    level: float
    """Of the interval."""
    decided: bool
    sizes: tuple[float, ...]
    """Sizes with pairs."""
    pairs: int
    forms: Mapping[str, float]
    """How probable each form of the difference is."""
    check: Check | None
    why_not: str
    """Why nothing is claimed; empty for a verdict."""

    @property
    def text(self) -> str:
        """The verdict in words."""
        at = f"at {size_text(self.target)}"
        if not math.isfinite(self.probability):
            return f"{at}: no verdict on {self.first} and {self.second}: {self.why_not}"
        reach = (
            f"{len(self.sizes)} sizes {size_text(self.sizes[0])} to {size_text(self.sizes[-1])}, {self.pairs} pairs, "
            f"×{self.target / self.sizes[-1]:.3g} beyond the largest"
        )
        span = f"{self.level:.0%} interval {interval_text(self.low, self.high)}".replace("%", " %")
        gap = f"{number_text(self.estimate)} nats, {span}; {reach}"
        if self.decided:
            return f"{at}: {self.first} beats {self.second} with probability {chance_text(self.probability)} ({gap})"
        leans = f"{self.first} lower with probability {chance_text(self.probability)}"
        return f"{at}: no verdict on {self.first} and {self.second}: {self.why_not} ({leans}, {gap})"


def project(
    one: tuple[str, Losses, int], other: tuple[str, Losses, int], *, target: float, sure: float = SURE
) -> Projection:
    """Two candidates at the target: label, losses, and how many of its trainings ended badly, of each.

    The one whose loss is lower there with a probability of at least `sure` is said to win. No side that ended badly
    more often than the other does.
    """
    measured = paired(one[1], other[1])
    lacks = _lacking(measured, one[1], other[1])
    if measured is None or lacks:
        return _silent(one[0], other[0], target, sure, lacks)
    difference, level_curve = measured
    found = difference_at(difference, level_curve, [target])
    chance = found.below(0.0)
    swapped = chance < 0.5
    first, second = (other, one) if swapped else (one, other)
    level = 2 * sure - 1
    low, high = found.interval(level)
    estimate = found.mean()
    decided = max(chance, 1 - chance) >= sure
    why_not = "" if decided else f"the {level:.0%} extrapolation interval spans zero".replace("%", " %")
    if decided and first[2] > second[2]:
        decided, why_not = False, f"{first[2]} of its trainings ended badly, and {second[2]} of the other's"
    if swapped and not decided:
        # Without a winner the order stays, and so does the sign; the probability is of the first named.
        first, second, swapped, chance = one, other, False, chance
    sign = -1.0 if swapped else 1.0
    return Projection(
        first=first[0],
        second=second[0],
        target=target,
        probability=1 - chance if swapped else chance,
        estimate=sign * estimate,
        low=-high if swapped else low,
        high=-low if swapped else high,
        level=level,
        decided=decided,
        sizes=tuple(map(float, difference.sizes)),
        pairs=int(difference.counts.sum()),
        forms=found.shares(),
        check=_checked(difference, level_curve, sign),
        why_not=why_not,
    )


def _silent(one: str, other: str, target: float, sure: float, why_not: str) -> Projection:
    nothing = math.nan
    return Projection(
        first=one,
        second=other,
        target=target,
        probability=nothing,
        estimate=nothing,
        low=nothing,
        high=nothing,
        level=2 * sure - 1,
        decided=False,
        sizes=(),
        pairs=0,
        forms={},
        check=None,
        why_not=why_not,
    )


def _pairs(one: Losses, other: Losses) -> dict[float, list[tuple[float, float]]]:
    """Losses of both sides under the same size and replica."""
    both = {size: sorted(one[size].keys() & other[size].keys()) for size in sorted(one.keys() & other.keys())}
    return {
        size: [(one[size][replica], other[size][replica]) for replica in replicas]
        for size, replicas in both.items()
        if replicas
    }


def paired(one: Losses, other: Losses) -> tuple[Measured, Measured] | None:
    """Their difference and their mean at each size; None where no deviation between seeds is known."""
    pairs = _pairs(one, other)
    differences = [[a - b for a, b in both] for both in pairs.values()]
    middles = [[(a + b) / 2 for a, b in both] for both in pairs.values()]
    if pooled(differences)[1] < 1:
        return None
    return measured_at(list(pairs), differences), measured_at(list(pairs), middles)


def measured_at(sizes: Sequence[float], groups: Sequence[Sequence[float]]) -> Measured:
    deviation, degrees = pooled(groups)
    return Measured(
        sizes=np.array(sizes, dtype=float),
        means=np.array([float(np.mean(group)) for group in groups]),
        counts=np.array([float(len(group)) for group in groups]),
        deviation=deviation,
        degrees=degrees,
    )


def _lacking(measured: tuple[Measured, Measured] | None, one: Losses, other: Losses) -> str:
    """What is missing for any judgement, and what would mend it."""
    sizes = len(_pairs(one, other))
    if sizes < LEAST_SIZES:
        return f"pairs at {sizes} sizes, and {LEAST_SIZES} are needed; give more --sizes"
    degrees = measured[0].degrees if measured else 0
    if degrees < LEAST_DEGREES:
        return f"too few pairs to tell how far seeds vary ({degrees} degrees of freedom); give more --seeds"
    return ""


def _checked(difference: Measured, level_curve: Measured, sign: float) -> Check | None:
    """The difference at the largest size, foretold from the smaller ones, seeds' noise included."""
    kept = len(difference.sizes) - 1
    if kept < LEAST_SIZES:
        return None
    size = float(difference.sizes[-1])
    foretold = difference_at(difference.only(kept), level_curve.only(kept), [size])
    noise = difference.deviation / math.sqrt(difference.counts[-1])
    wider = Mixture(
        weights=foretold.weights,
        means=foretold.means,
        deviations=np.hypot(foretold.deviations, noise),
        labels=foretold.labels,
    )
    low, high = wider.interval(CHECKED)
    ends = (low, high) if sign > 0 else (-high, -low)
    return Check(size=size, measured=sign * float(difference.means[-1]), low=ends[0], high=ends[1])


def size_text(size: float) -> str:
    """Parameters as they are typed: 1M, 30M, 1B."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= unit * 0.9995:
            return f"{size / unit:.3g}{letter}"
    return f"{size:.3g}"


def chance_text(chance: float) -> str:
    """A probability that never claims to be certain."""
    if chance > 0.995:
        return "over 0.99"
    return f"{chance:.2f}" if chance >= 0.005 else "under 0.01"
