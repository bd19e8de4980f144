"""Non-dominated rows over any measures, the volume they dominate, and how sure both are."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from search_space.errors import UserError
from search_space.space import unknown

DIRECTIONS = ("min", "max")
_MOST_MEASURES = 5
"""Measures up to which the exact volume is computed."""


@dataclass(frozen=True, kw_only=True)
class Front:
    """A front with its volume and, by bootstrap, how far chance moved both."""

    rows: pd.DataFrame
    """The non-dominated rows, by the first measure, with a column `kept`: in which share of the draws a row stays."""
    reference: dict[str, float]
    """The corner up to which volume is counted."""
    volume: float
    """Share of the box between the best of each measure and the reference that the front dominates."""
    low: float
    high: float
    """Interval of the volume at 95 %."""
    draws: int


def front(frame: pd.DataFrame, measures: Mapping[str, str]) -> pd.DataFrame:
    """The rows that no other row matches or betters in every measure and betters in one, by the first measure.

    `measures` maps a column to 'min' or 'max'. Rows that lack a measure are left out; equal rows all stay.
    """
    _check(frame, measures)
    names = list(measures)
    held = frame.dropna(subset=names)
    return held[_keeps(_costs(held, measures))].sort_values(
        names, ascending=[measures[name] == "min" for name in names]
    )


def hypervolume(frame: pd.DataFrame, measures: Mapping[str, str], reference: Mapping[str, float]) -> float:
    """The volume between the front and the reference, in the product of the measures' units.

    Each measure is counted from the reference towards better; rows that are not better there in all add nothing.
    Exact, by slicing (While et al. 2006, "A faster algorithm for calculating hypervolume", section II).
    """
    _check(frame, measures)
    lacking = [name for name in measures if name not in reference]
    if lacking or len(measures) > _MOST_MEASURES:
        raise UserError(
            f"hypervolume: takes 1 to {_MOST_MEASURES} measures, each with a reference; got {len(measures)}"
            + (f", without a reference {', '.join(lacking)}" if lacking else "")
        )
    corner = np.array([reference[name] * (1.0 if measures[name] == "min" else -1.0) for name in measures])
    return _volume(_costs(frame.dropna(subset=list(measures)), measures), corner)


def sure_front(
    frame: pd.DataFrame,
    measures: Mapping[str, str],
    *,
    noise: Mapping[str, float] | None = None,
    reference: Mapping[str, float] | None = None,
    draws: int = 500,
    seed: int = 0,
) -> Front:
    """The front with its volume and an interval for it from `draws` bootstrap draws.

    `noise` holds the deviation of a measure between seeds: each draw then moves the values by as much again (a
    parametric bootstrap), and its volumes are reflected about the one seen, since the best of noisy values looks better
    than it is. Without noise whole rows are drawn, which tells what the choice of trials did but not what seeds did.
    Without a reference the worst value of each measure is one.
    """
    _check(frame, measures)
    names = list(measures)
    held = frame.dropna(subset=names)
    if not len(held):
        raise UserError(f"pareto front: no row has all of {', '.join(names)}; name other measures")
    costs = _costs(held, measures)
    signs = np.array([1.0 if measures[name] == "min" else -1.0 for name in names])
    corner = costs.max(axis=0) if reference is None else np.array([reference[name] for name in names]) * signs
    spread = np.maximum(corner - costs.min(axis=0), 1e-300)
    scaled = (costs - costs.min(axis=0)) / spread
    ones = np.ones(len(names))
    volume = _volume(scaled, ones)
    deviations = np.array([(noise or {}).get(name, 0.0) for name in names]) / spread
    rng = np.random.default_rng(seed)
    stays, volumes = np.zeros(len(held)), []
    for _ in range(draws):
        if noise:
            drawn, places = scaled + deviations * rng.standard_normal(scaled.shape), np.arange(len(held))
        else:
            places = rng.integers(len(held), size=len(held))
            drawn = scaled[places]
        kept = places[_keeps(drawn)]
        stays[np.unique(kept)] += 1
        volumes.append(_volume(drawn, ones))
    low, high = (float(end) for end in np.quantile(volumes, [0.025, 0.975]))
    if noise:
        low, high = 2 * volume - high, 2 * volume - low
    best = front(held.assign(kept=stays / draws), measures)
    return Front(
        rows=best,
        reference=dict(zip(names, (corner * signs).tolist(), strict=True)),
        volume=volume,
        low=max(min(low, volume), 0.0),
        high=min(max(high, volume), 1.0) if not noise else max(high, volume),
        draws=draws,
    )


def _check(frame: pd.DataFrame, measures: Mapping[str, str]) -> None:
    if not measures:
        raise UserError("pareto front: names no measure; give one or more columns with 'min' or 'max'")
    for name, direction in measures.items():
        if name not in frame:
            raise UserError(f"pareto front: {unknown('measure', name, frame.select_dtypes('number'))}")
        if direction not in DIRECTIONS:
            raise UserError(f"pareto front: measure {name!r} has direction {direction!r}; it takes 'min' or 'max'")


def _costs(held: pd.DataFrame, measures: Mapping[str, str]) -> np.ndarray:
    signs = np.array([1.0 if direction == "min" else -1.0 for direction in measures.values()])
    found: np.ndarray = held[list(measures)].to_numpy(dtype=float) * signs
    return found


def _keeps(costs: np.ndarray) -> np.ndarray:
    """True for each row no other row dominates."""
    kept = np.ones(len(costs), dtype=bool)
    for row in np.lexsort(costs.T[::-1]):
        if kept[row]:
            worse = (costs >= costs[row]).all(axis=1) & (costs > costs[row]).any(axis=1)
            kept[worse] = False
    return kept


def _volume(costs: np.ndarray, corner: np.ndarray) -> float:
    """The volume that the rows dominate within the corner, slice by slice along the last measure."""
    inside = costs[(costs < corner).all(axis=1)]
    if not len(inside):
        return 0.0
    if len(corner) == 1:
        return float(corner[0] - inside.min())
    inside = inside[_keeps(inside)]
    if len(corner) == 2:
        ordered = inside[np.lexsort(inside.T[::-1])]
        steps = np.minimum.accumulate(np.append(corner[1], ordered[:, 1]))
        return float(((corner[0] - ordered[:, 0]) * (steps[:-1] - steps[1:])).sum())
    ordered = inside[np.argsort(inside[:, -1], kind="stable")]
    ends = np.append(ordered[1:, -1], corner[-1])
    total = 0.0
    for place, end in enumerate(ends):
        thickness = end - ordered[place, -1]
        if thickness > 0:
            total += thickness * _volume(ordered[: place + 1, :-1], corner[:-1])
    return total
