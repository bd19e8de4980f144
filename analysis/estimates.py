"""Main effects and interactions of factors on an outcome, by one mixed model: what is asked for is not shrunk."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import special

from analysis import mixed
from analysis.factors import FEWEST, Factor, Level, crossed, family_of
from analysis.mixed import Columns, Contrast, Fit
from analysis.support import Groups

_ROWS_A_COLUMN = 1.7
"""Rows a column from which all main effects are free at once."""
_SHOWN = 0.01
"""Level of the test by which a choice is taken to matter."""
_EXPECTED = math.log(3)
"""Log of the prior odds against an interaction of two choices that matter: one in four, as Chipman, Hamada & Wu (1997,
"A Bayesian variable-selection approach for analyzing designed experiments with complex aliasing") take it. It counts in
how sure a main effect is; to enter the estimates, an interaction has to stand out among all pairs."""


@dataclass(frozen=True, kw_only=True)
class MainEstimate:
    """One level of one factor; no contrast where the trials cannot tell it from others."""

    factor: Factor
    level: Level
    contrast: Contrast | None
    adjusted_for: tuple[str, ...]
    """Paths that were held equal."""


@dataclass(frozen=True, kw_only=True)
class PairEstimate:
    """How much more one level is worth beside a level of another factor than beside that one's reference."""

    factors: tuple[Factor, Factor]
    levels: tuple[Level, Level]
    n: int
    """Trials that hold both options."""
    fewest: int
    """Trials in the smallest of the four cells."""
    contrast: Contrast | None


@dataclass(frozen=True, kw_only=True)
class Block:
    """All coefficients of one factor, or of two together, with their covariance."""

    factors: tuple[Factor, ...]
    coefficients: np.ndarray
    covariance: np.ndarray


class Model:
    """Fits of some outcomes (one, or several imputations of it) on factors; fits are made once and shared."""

    def __init__(self, factors: Sequence[Factor], outcomes: Sequence[np.ndarray]) -> None:
        self.factors = list(factors)
        self.outcomes = list(outcomes)
        self.mean = np.mean(self.outcomes, axis=0)
        self.rows = len(self.mean)
        width = 1 + sum(entry.columns.shape[1] for entry in factors)
        self.roomy = self.rows >= _ROWS_A_COLUMN * width
        products = {
            (i, j): crossed(one, other)
            for i, one in enumerate(self.factors)
            for j, other in enumerate(self.factors[i + 1 :], i + 1)
        }
        self.crossed = {pair: columns for pair, columns in products.items() if columns is not None and columns.any()}
        self._fits: dict[tuple[tuple[int, ...], tuple[tuple[tuple[int, ...], float], ...]], list[Fit]] = {}

    def mains(self) -> Iterator[MainEstimate]:
        """Every level of every factor, averaged over the other choices of the space."""
        for place, entry in enumerate(self.factors):
            free = self._free(place)
            fits = [self._fit(free, kept) for _, kept in self._likely] if free else []
            start = self._start(free, place) if free else 0
            beside = [*free, *(key[0] for key in _drawn(free, self.kept) if len(key) == 1)] if free else []
            held = [self.factors[other].path for other in beside if other != place]
            for level in entry.levels:
                accounts = [mixed.pooled([_effect(fit, start, level) for fit in imputed]) for imputed in fits]
                contrast = mixed.cautious(accounts, [odds for odds, _ in self._likely]) if accounts else None
                yield MainEstimate(factor=entry, level=level, contrast=contrast, adjusted_for=tuple(held))

    def pairs(self) -> Iterator[PairEstimate]:
        """Every pair of levels of two factors that were tried together."""
        for (i, j), columns in self.crossed.items():
            one, other = self.factors[i], self.factors[j]
            both = [(a, b) for a in one.levels for b in other.levels]
            counts = [_cells(a, b) for a, b in both]
            found: list[Contrast] | None = None
            if any(min(count) >= FEWEST for count in counts):
                found = self._pair((i, j), columns, np.array([np.kron(a.weights, b.weights) for a, b in both]))
            for place, (a, b) in enumerate(both):
                yield PairEstimate(
                    factors=(one, other),
                    levels=(a, b),
                    n=counts[place][0],
                    fewest=min(counts[place]),
                    contrast=found[place] if found else None,
                )

    def blocks(self) -> list[Block]:
        """Every factor that the trials can tell from the others, and every pair that the data supports."""
        found = []
        everything: tuple[int, ...] = ()
        for place, entry in enumerate(self.factors):
            free = self._free(place)
            if not free:
                continue
            everything = max(everything, free, key=len)
            start = self._start(free, place)
            found.append(self._block((entry,), self._fit(free, self.kept), start, entry.columns.shape[1]))
        if everything:
            fits = self._fit(everything, self.kept)
            start = fits[0].columns.free.shape[1]
            for key in _drawn(everything, self.kept):
                width = self._columns(key).shape[1]
                if len(key) == 2:
                    found.append(self._block(tuple(self.factors[place] for place in key), fits, start, width))
                start += width
        return found

    def _block(self, factors: tuple[Factor, ...], fits: Sequence[Fit], start: int, width: int) -> Block:
        part = slice(start, start + width)
        values = np.array([fit.coefficients[part] for fit in fits])
        within = np.mean([fit.variance * fit.columns.inverse[part, part] for fit in fits], axis=0)
        between = np.cov(values.T).reshape(width, width) * (1 + 1 / len(fits)) if len(fits) > 1 else 0.0
        return Block(factors=factors, coefficients=values.mean(axis=0), covariance=within + between)

    def _start(self, free: tuple[int, ...], place: int) -> int:
        """The column at which a free factor begins."""
        return 1 + sum(self.factors[other].columns.shape[1] for other in free[: free.index(place)])

    def _pair(self, pair: tuple[int, int], columns: np.ndarray, weights: np.ndarray) -> list[Contrast] | None:
        free = self._free(*pair)
        if not free:
            return None
        fits = self._fit(free, self.kept, pair)
        beside = fits[0].columns.beside(columns)
        if beside is None:
            return None
        parts = [fit.with_more(beside, weights) for fit in fits]
        return [mixed.pooled([part[place] for part in parts]) for place in range(len(weights))]

    def _free(self, *targets: int) -> tuple[int, ...]:
        """The factors whose columns are not drawn to zero; empty when the trials cannot tell the targets apart."""
        if len(self._together) == len(self.factors):
            return self._together
        parents = [
            place
            for place, entry in enumerate(self.factors)
            if any(family_of(entry, self.factors[target]) for target in targets)
        ]
        held = self._apart(list(dict.fromkeys([*targets, *parents, *(range(len(self.factors)) if self.roomy else ())])))
        return held if set(targets) <= set(held) else ()

    @cached_property
    def _together(self) -> tuple[int, ...]:
        """All factors that can be free at once; none where the trials are few."""
        return self._apart(range(len(self.factors))) if self.roomy else ()

    def _apart(self, wanted: Sequence[int]) -> tuple[int, ...]:
        """Those of the factors, the first ones first, that the trials can tell from those before."""
        basis = np.full((self.rows, 1), self.rows**-0.5)
        held: list[int] = []
        for place in wanted:
            wider = mixed.extended(basis, self.factors[place].columns)
            if wider is not None and wider.shape[1] < self.rows - 1:
                basis = wider
                held.append(place)
        return tuple(sorted(held))

    @property
    def kept(self) -> dict[tuple[int, ...], float]:
        """What is drawn beside the free factors, with variance ratios: pairs, and factors where the trials are few."""
        return self._likely[0][1]

    @cached_property
    def _likely(self) -> list[tuple[float, dict[tuple[int, ...], float]]]:
        """The set of drawn groups that the data supports, then its rivals with their odds against it."""
        free = self._free()
        keys = [*((place,) for place in range(len(self.factors)) if place not in free), *self.crossed]
        price = math.log(max(len(self.crossed), 2))
        groups = Groups(
            free=self._design(free),
            columns=[self._columns(key) for key in keys],
            outcome=self.mean - self.mean.mean(),
            prices=[0.0 if len(key) == 1 else price for key in keys],
        )
        kept = groups.supported()
        matter = self._matter(free)
        odds = [
            _EXPECTED if len(key) == 2 and matter.issuperset(key) else price
            for key, price in zip(keys, groups.prices, strict=True)
        ]
        found = [(1.0, kept), *dataclasses.replace(groups, prices=odds).rivals(kept)]
        return [(odds, {keys[place]: ratio for place, ratio in held.items()}) for odds, held in found]

    def _matter(self, free: tuple[int, ...]) -> set[int]:
        """The free factors whose own effect shows beside those of all others."""
        alone = Columns(free=self._design(free), drawn=np.empty((self.rows, 0)), ratios=np.empty(0))
        fit = Fit(columns=alone, outcome=self.mean)
        found = set()
        for place in free:
            start = self._start(free, place)
            part = slice(start, start + self.factors[place].columns.shape[1])
            own = fit.coefficients[part]
            ratio = float(own @ np.linalg.solve(alone.inverse[part, part], own)) / len(own) / fit.variance
            if special.fdtrc(len(own), alone.degrees, ratio) < _SHOWN:
                found.add(place)
        return found

    def _columns(self, key: tuple[int, ...]) -> np.ndarray:
        return self.factors[key[0]].columns if len(key) == 1 else self.crossed[(key[0], key[1])]

    def _design(self, free: tuple[int, ...]) -> np.ndarray:
        return np.column_stack([np.ones(self.rows), *(self.factors[place].columns for place in free)])

    def _fit(
        self, free: tuple[int, ...], kept: Mapping[tuple[int, ...], float], without: tuple[int, int] | None = None
    ) -> list[Fit]:
        drawn = _drawn(free, kept, without)
        known = (free, tuple((key, kept[key]) for key in drawn))
        if known not in self._fits:
            columns = [self._columns(key) for key in drawn]
            ratios = [np.full(self._columns(key).shape[1], kept[key]) for key in drawn]
            held = Columns(
                free=self._design(free),
                drawn=np.hstack(columns) if columns else np.empty((self.rows, 0)),
                ratios=np.concatenate(ratios) if ratios else np.empty(0),
            )
            self._fits[known] = [Fit(columns=held, outcome=outcome) for outcome in self.outcomes]
        return self._fits[known]


def _drawn(
    free: tuple[int, ...], kept: Mapping[tuple[int, ...], float], without: tuple[int, int] | None = None
) -> list[tuple[int, ...]]:
    return [key for key in kept if key != without and not (len(key) == 1 and key[0] in free)]


def _effect(fit: Fit, start: int, level: Level) -> Contrast:
    """A level of the factor whose columns begin there."""
    weights = np.zeros(fit.columns.design.shape[1])
    weights[start : start + len(level.weights)] = level.weights
    return fit.contrast(weights)


def _cells(one: Level, other: Level) -> tuple[int, int, int, int]:
    """Trials that hold both options, one of them, the other, neither but the references."""
    return (
        int((one.inside & other.inside).sum()),
        int((one.inside & other.outside).sum()),
        int((one.outside & other.inside).sum()),
        int((one.outside & other.outside).sum()),
    )
