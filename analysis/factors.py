"""What was varied, as columns of a regression: options, ranges, and fields that are live in some trials only."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.frame import PARAM, short_value

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

    @property
    def enough(self) -> bool:
        """True when both sides hold trials enough to be spoken of."""
        return min(self.n, self.n_reference) >= FEWEST


@dataclass(frozen=True, kw_only=True)
class Factor:
    """One varied path; its columns are zero where it is not live and have mean zero where it is."""

    path: str
    live: np.ndarray
    columns: np.ndarray
    levels: tuple[Level, ...]


def factor(path: str, trials: pd.DataFrame, preferred: Any) -> Factor | None:
    """The factor of a path over these trials, or None when it took one value wherever it was live.

    `preferred` is the value to compare with, where it was tried often enough; else the most frequent one is.
    """
    values = trials[PARAM + path]
    live = values.notna().to_numpy()
    seen = values[live]
    if seen.nunique() < 2:
        return None
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in seen)
    if numeric and seen.nunique() > _MOST_OPTIONS:
        return _range(path, seen.astype(float).to_numpy(), live)
    return _options(path, values, live, preferred)


def _options(path: str, values: pd.Series, live: np.ndarray, preferred: Any) -> Factor:
    counts = values[live].value_counts()
    reference = preferred if counts.get(preferred, 0) >= FEWEST else counts.index[0]
    others = [option for option in _in_order(counts.index) if option != reference]
    columns = np.column_stack([(values == option).to_numpy(dtype=float) for option in others])
    columns[live] -= columns[live].mean(axis=0)
    levels = tuple(
        Level(
            label=short_value(option),
            reference=short_value(reference),
            n=int(counts[option]),
            n_reference=int(counts[reference]),
            weights=np.eye(len(others))[place],
        )
        for place, option in enumerate(others)
    )
    return Factor(path=path, live=live, columns=columns, levels=levels)


def _range(path: str, seen: np.ndarray, live: np.ndarray) -> Factor:
    """Linear, or linear and square in doublings for a wide positive range (a learning rate has an optimum inside)."""
    wide = seen.min() > 0 and seen.max() / seen.min() >= _LOG_SPAN
    scale = np.log2 if wide else np.asarray
    low, high = np.quantile(seen, [0.25, 0.75], method="nearest")
    position = scale(seen)
    middle = position.mean()

    def basis(at: np.ndarray) -> np.ndarray:
        steps = at - middle
        return np.column_stack([steps, steps**2] if wide else [steps])

    own = basis(position)
    columns = np.zeros((len(live), own.shape[1]))
    columns[live] = own - own.mean(axis=0)
    ends = basis(scale(np.array([low, high])))
    level = Level(
        label=short_value(float(high)),
        reference=short_value(float(low)),
        n=int((seen >= high).sum()),
        n_reference=int((seen <= low).sum()),
        weights=ends[1] - ends[0],
    )
    return Factor(path=path, live=live, columns=columns, levels=(level,) if high > low else ())


def _in_order(options: Iterable[Any]) -> list[Any]:
    return sorted(options, key=lambda option: (isinstance(option, str), option))
