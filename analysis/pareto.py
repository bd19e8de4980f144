"""Non-dominated rows over any measures."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from search_space.errors import UserError
from search_space.space import unknown

DIRECTIONS = ("min", "max")


def front(frame: pd.DataFrame, measures: Mapping[str, str]) -> pd.DataFrame:
    """The rows that no other row matches or betters in every measure and betters in one, by the first measure.

    `measures` maps a column to 'min' or 'max'. Rows that lack a measure are left out; equal rows all stay.
    """
    if not measures:
        raise UserError("pareto front: names no measure; give one or more columns with 'min' or 'max'")
    for name, direction in measures.items():
        if name not in frame:
            raise UserError(f"pareto front: {unknown('measure', name, frame.select_dtypes('number'))}")
        if direction not in DIRECTIONS:
            raise UserError(f"pareto front: measure {name!r} has direction {direction!r}; it takes 'min' or 'max'")
    names = list(measures)
    held = frame.dropna(subset=names)
    signs = np.array([1.0 if measures[name] == "min" else -1.0 for name in names])
    costs = held[names].to_numpy(dtype=float) * signs
    return held[_keeps(costs)].sort_values(names, ascending=[measures[name] == "min" for name in names])


def _keeps(costs: np.ndarray) -> np.ndarray:
    """True for each row no other row dominates."""
    kept = np.ones(len(costs), dtype=bool)
    for row in np.lexsort(costs.T[::-1]):
        if kept[row]:
            worse = (costs >= costs[row]).all(axis=1) & (costs > costs[row]).any(axis=1)
            kept[worse] = False
    return kept
