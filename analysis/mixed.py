"""Mixed models: effects that are asked for are free, all others are drawn towards zero as far as the data wants it.

Each group of columns that may matter or not is a random effect whose variance is found by restricted maximum likelihood
(Patterson & Thompson 1971, "Recovery of inter-block information when block sizes are unequal"), group by group as in
Tipping & Faul (2003, "Fast marginal likelihood maximisation for sparse Bayesian models"). A group without support in
the data gets variance zero and costs nothing; one that is kept widens the intervals by what is not known of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from scipy import special

_FULL = 1 - 1e-9
_TINY = 1e-9
_NOTHING_NEW = 1e-7
_RATIOS = np.logspace(-3, 5, 49)
"""Variances tried for a group, relative to what one residual variance would explain of it."""
_SWEEPS = 4
_MOST_KEPT = 0.5
"""Columns of kept groups, at most, as a share of the rows that the free columns leave."""


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A linear combination of coefficients: its estimate, its variance, and the degrees of freedom behind that."""

    estimate: float
    variance: float
    degrees: float

    def interval(self, alpha: float) -> tuple[float, float]:
        """The interval at level 1 - alpha."""
        width = float(special.stdtrit(max(self.degrees, 1.0), 1 - alpha / 2)) * self.variance**0.5
        return self.estimate - width, self.estimate + width


def pooled(parts: Sequence[Contrast]) -> Contrast:
    """One contrast from those of several imputations (Rubin 1987; degrees by Barnard & Rubin 1999, equation 3)."""
    if len(parts) == 1:
        return parts[0]
    m = len(parts)
    within = float(np.mean([part.variance for part in parts]))
    between = (1 + 1 / m) * float(np.var([part.estimate for part in parts], ddof=1))
    total = within + between
    complete = float(np.mean([part.degrees for part in parts]))
    share = between / total if total > 0 else 0.0
    observed = (complete + 1) / (complete + 3) * complete * (1 - share)
    degrees = observed if share < _TINY else 1 / (share**2 / (m - 1) + 1 / max(observed, _TINY))
    return Contrast(estimate=float(np.mean([part.estimate for part in parts])), variance=total, degrees=degrees)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Coefficients of [free, drawn] columns; variances are the larger of the model's and HC3, contrast by contrast."""

    free: np.ndarray
    drawn: np.ndarray
    ratios: np.ndarray
    """Variance of each drawn column's coefficient, as a multiple of the residual variance."""
    outcome: np.ndarray
    design: np.ndarray = field(init=False)
    inverse: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        design = np.hstack([self.free, self.drawn])
        penalty = np.concatenate([np.zeros(self.free.shape[1]), 1 / self.ratios])
        object.__setattr__(self, "design", design)
        object.__setattr__(self, "inverse", np.linalg.inv(design.T @ design + np.diag(penalty)))

    @cached_property
    def coefficients(self) -> np.ndarray:
        """Best linear unbiased estimates of the free columns, predictions of the drawn ones."""
        found: np.ndarray = self.inverse @ (self.design.T @ self.outcome)
        return found

    @cached_property
    def residuals(self) -> np.ndarray:
        """Outcome less what all columns explain."""
        found: np.ndarray = self.outcome - self.design @ self.coefficients
        return found

    @cached_property
    def leverage(self) -> np.ndarray:
        """How much each row decides its own fitted value."""
        found: np.ndarray = np.einsum("ij,ij->i", self.design @ self.inverse, self.design)
        return found

    @cached_property
    def variance(self) -> float:
        """The residual variance, by restricted maximum likelihood."""
        return float(self.outcome @ self.residuals) / (len(self.outcome) - self.free.shape[1])

    @property
    def degrees(self) -> float:
        """Rows less the effective number of columns."""
        return len(self.outcome) - float(self.leverage.sum())

    @cached_property
    def _scaled(self) -> np.ndarray:
        found: np.ndarray = self.residuals / np.maximum(1 - self.leverage, 1 - _FULL) * (self.leverage < _FULL)
        return found

    def contrast(self, weights: np.ndarray) -> Contrast:
        """A combination of the coefficients; HC3 after MacKinnon & White (1985)."""
        towards = self.inverse @ weights
        model = self.variance * float(weights @ towards)
        robust = float((((self.design @ towards) * self._scaled) ** 2).sum())
        return Contrast(estimate=float(weights @ self.coefficients), variance=max(model, robust), degrees=self.degrees)

    def with_more(self, columns: np.ndarray, weights: np.ndarray) -> list[Contrast] | None:
        """Contrasts (rows of `weights`) of further free columns, beside all of this fit; None where they add nothing.

        By partial regression (Frisch & Waugh 1933), so that many sets of columns can be asked about one fit.
        """
        rest = columns - self.design @ (self.inverse @ (self.design.T @ columns))
        gram = columns.T @ rest
        size = np.linalg.norm(columns, axis=0)
        degrees = self.degrees - columns.shape[1]
        if degrees < 1 or not size.all() or np.linalg.eigvalsh(gram / np.outer(size, size))[0] < _TINY:
            return None
        inverse = np.linalg.inv(gram)
        found = inverse @ (rest.T @ self.outcome)
        residuals = self.residuals - rest @ found
        leverage = self.leverage + np.einsum("ij,ij->i", rest @ inverse, rest)
        scaled = residuals / np.maximum(1 - leverage, 1 - _FULL) * (leverage < _FULL)
        left = len(self.outcome) - self.free.shape[1] - columns.shape[1]
        variance = float(self.outcome @ residuals) / left
        return [
            Contrast(
                estimate=float(one @ found),
                variance=max(
                    variance * float(one @ inverse @ one), float((((rest @ (inverse @ one)) * scaled) ** 2).sum())
                ),
                degrees=degrees,
            )
            for one in weights
        ]


def supported(
    free: np.ndarray, groups: Sequence[np.ndarray], outcome: np.ndarray, prices: Sequence[float]
) -> dict[int, float]:
    """The groups of columns that the data supports beside the free ones, with the variance ratio of each.

    A group is kept while it raises the restricted log-likelihood by more than its price.
    """
    if not groups:
        return {}
    basis = np.linalg.qr(free)[0]
    stacked = np.hstack([*groups, outcome[:, None]])
    size = np.linalg.norm(stacked, axis=0)
    stacked = stacked - basis @ (basis.T @ stacked)
    gram = stacked.T @ stacked
    ends = np.cumsum([0, *(group.shape[1] for group in groups)])
    places = [np.arange(low, high) for low, high in pairwise(ends)]
    fresh = [bool((gram.diagonal()[place] > _TINY * size[place] ** 2).all()) for place in places]
    rows = len(outcome) - free.shape[1]
    kept: dict[int, float] = {}
    while True:
        candidates = [
            place
            for place in range(len(groups))
            if place not in kept
            and fresh[place]
            and sum(len(places[held]) for held in (*kept, place)) <= _MOST_KEPT * rows
        ]
        found = {place: _gain(gram, places, kept, place, rows) for place in candidates}
        best = max(found, key=lambda place: found[place][0] - prices[place], default=None)
        if best is None or found[best][0] <= prices[best]:
            return kept
        kept[best] = found[best][1]
        _settle(gram, places, kept, rows, prices)


def _settle(
    gram: np.ndarray, places: Sequence[np.ndarray], kept: dict[int, float], rows: int, prices: Sequence[float]
) -> None:
    """Find each kept group's variance anew, the others given; a group that has become dear is left out."""
    for _ in range(_SWEEPS):
        moved = False
        for place in list(kept):
            before = kept.pop(place)
            gain, ratio = _gain(gram, places, kept, place, rows)
            held = gain > prices[place]
            if held:
                kept[place] = ratio
            moved = moved or not held or abs(np.log(ratio / before)) > np.log(_RATIOS[1] / _RATIOS[0]) / 2
        if not moved:
            return


def _gain(
    gram: np.ndarray, places: Sequence[np.ndarray], kept: dict[int, float], place: int, rows: int
) -> tuple[float, float]:
    """Rise of the restricted log-likelihood at the group's best variance ratio, and that ratio."""
    own = np.append(places[place], gram.shape[0] - 1)
    part = gram[np.ix_(own, own)]
    if kept:
        held = np.concatenate([places[other] for other in kept])
        penalty = np.concatenate([np.full(len(places[other]), 1 / ratio) for other, ratio in kept.items()])
        cross = gram[np.ix_(held, own)]
        part = part - cross.T @ np.linalg.solve(gram[np.ix_(held, held)] + np.diag(penalty), cross)
    strengths, directions = np.linalg.eigh(part[:-1, :-1])
    strengths = np.maximum(strengths, 0.0)
    pulls = (directions.T @ part[:-1, -1]) ** 2
    total = max(float(part[-1, -1]), _TINY * float(gram[-1, -1]))
    middle = float(strengths.mean())
    if middle <= 0 or total <= 0:
        return 0.0, 1.0
    ratios = _RATIOS / middle
    shrunk = 1 + ratios[:, None] * strengths
    explained = (ratios[:, None] * pulls / shrunk).sum(axis=1)
    left = np.maximum(total - explained, _TINY * total)
    likelihood = -0.5 * np.log(shrunk).sum(axis=1) - 0.5 * rows * np.log(left / total)
    best = int(likelihood.argmax())
    return float(likelihood[best]), float(ratios[best])


def extended(basis: np.ndarray, columns: np.ndarray) -> np.ndarray | None:
    """The orthonormal basis widened by the columns, or None when they do not all add to its span."""
    rest = columns - basis @ (basis.T @ columns)
    rest -= basis @ (basis.T @ rest)
    directions, triangle = np.linalg.qr(rest)
    smallest = np.abs(np.diag(triangle)).min()
    if rest.shape[0] < rest.shape[1] or smallest <= _NOTHING_NEW * np.linalg.norm(columns, axis=0).max():
        return None
    return np.hstack([basis, directions])
