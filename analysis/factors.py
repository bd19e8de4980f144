"""What was varied, as columns of a regression: options, ranges, and fields that are live in some trials only.

Columns have mean zero over the space, each option and each part of a range counting alike, not over the trials: what is
said of one choice is then said of the average over the others, however often the sampler went to the good ones.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.frame import PARAM, short_value
from search_space.domains import Domain, FloatRange, IntRange

FEWEST = 3
"""Trials an option needs before anything is said of it."""
_MOST_OPTIONS = 4
"""Numbers with at most so many values count as options, with more as a range."""
_LOG_SPAN = 5.0
"""A positive range that spans this factor is taken in doublings."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """One thing to be said about a factor: an option against the reference, or a high value against a low one."""

    label: str
    reference: str
    n: int
    n_reference: int
    weights: np.ndarray
    """The linear combination of the factor's own columns that is the effect."""
    inside: np.ndarray
    """The trials that hold the option, or a value at least as high."""
    outside: np.ndarray
    """The trials that hold the reference, or a value at most as low."""

    @property
    def enough(self) -> bool:
        """True when both sides hold trials enough to be spoken of."""
        return min(self.n, self.n_reference) >= FEWEST


@dataclass(frozen=True, kw_only=True)
class Factor:
    """One varied path; its columns are zero where it is not live and have mean zero over its domain where it is."""

    path: str
    live: np.ndarray
    columns: np.ndarray
    levels: tuple[Level, ...]
    covariance: np.ndarray
    """Of the columns, over the domain of the path."""


def factor(path: str, trials: pd.DataFrame, preferred: Any, domain: Domain | None = None) -> Factor | None:
    """The factor of a path over these trials, or None when it took one value wherever it was live.

    `preferred` is the value to compare with, where it was tried often enough; else the most frequent one is. Without a
    domain the values seen stand for it.
    """
    values = trials[PARAM + path]
    live = values.notna().to_numpy()
    seen = values[live]
    if seen.nunique() < 2:
        return None
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in seen)
    if numeric and seen.nunique() > _MOST_OPTIONS:
        numbers = seen.astype(float).to_numpy()
        ends = numbers.min(), numbers.max()
        if isinstance(domain, FloatRange | IntRange):
            ends = min(ends[0], domain.low), max(ends[1], domain.high)
        return _range(path, numbers, live, ends)
    return _options(path, values, live, preferred)


def _options(path: str, values: pd.Series, live: np.ndarray, preferred: Any) -> Factor:
    counts = values[live].value_counts()
    reference = preferred if counts.get(preferred, 0) >= FEWEST else counts.index[0]
    others = [option for option in _in_order(counts.index) if option != reference]
    held = {option: (values == option).to_numpy(dtype=bool) for option in (*others, reference)}
    columns = np.column_stack([held[option].astype(float) for option in others])
    share = 1 / len(held)
    columns[live] -= share
    levels = tuple(
        Level(
            label=short_value(option),
            reference=short_value(reference),
            n=int(counts[option]),
            n_reference=int(counts[reference]),
            weights=np.eye(len(others))[place],
            inside=held[option],
            outside=held[reference],
        )
        for place, option in enumerate(others)
    )
    covariance = share * np.eye(len(others)) - share**2
    return Factor(path=path, live=live, columns=columns, levels=levels, covariance=covariance)


def _range(path: str, seen: np.ndarray, live: np.ndarray, ends: tuple[float, float]) -> Factor:
    """Linear, or linear and square in doublings for a wide positive range (a learning rate has an optimum inside)."""
    wide = ends[0] > 0 and ends[1] / ends[0] >= _LOG_SPAN
    scale = np.log2 if wide else np.asarray
    low, high = np.quantile(seen, [0.25, 0.75], method="nearest")
    first, last = scale(np.array(ends, dtype=float))
    half = (last - first) / 2

    def basis(at: np.ndarray) -> np.ndarray:
        steps = (scale(at) - (first + last) / 2) / half
        return np.column_stack([steps, steps**2 - 1 / 3] if wide else [steps])

    own = basis(seen)
    columns = np.zeros((len(live), own.shape[1]))
    columns[live] = own
    inside, outside = np.zeros(len(live), dtype=bool), np.zeros(len(live), dtype=bool)
    inside[live], outside[live] = seen >= high, seen <= low
    points = basis(np.array([low, high]))
    level = Level(
        label=short_value(float(high)),
        reference=short_value(float(low)),
        n=int(inside.sum()),
        n_reference=int(outside.sum()),
        weights=points[1] - points[0],
        inside=inside,
        outside=outside,
    )
    # Of uniform u on [-1, 1]: u has variance 1/3, u² has 4/45, and they are uncorrelated.
    covariance = np.diag([1 / 3, 4 / 45][: own.shape[1]])
    return Factor(path=path, live=live, columns=columns, levels=(level,) if high > low else (), covariance=covariance)


def family_of(entry: Factor, target: Factor) -> bool:
    """True when `entry` is the family whose choice makes `target` live."""
    if entry is target or not entry.path.endswith(".kind"):
        return False
    return target.path.startswith(entry.path.removesuffix("kind"))


def crossed(one: Factor, other: Factor) -> np.ndarray | None:
    """The columns of what two choices do together, or None where one is a condition of the other or they never meet."""
    if family_of(one, other) or family_of(other, one) or not (one.live & other.live).any():
        return None
    products = one.columns[:, :, None] * other.columns[:, None, :]
    return products.reshape(len(one.live), -1)


def _in_order(options: Iterable[Any]) -> list[Any]:
    return sorted(options, key=lambda option: (isinstance(option, str), option))
