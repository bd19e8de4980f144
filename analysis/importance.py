"""How much each choice matters, measured in two ways: functional ANOVA of the fitted effects, and PED-ANOVA.

Functional ANOVA (Hutter, Hoos & Leyton-Brown 2014, "An efficient approach for assessing hyperparameter importance",
section 3) splits the variance of the loss over the space among choices and pairs of them; here the surface is the mixed
model's, whose components are orthogonal over the space, so that the split is closed form. PED-ANOVA (Watanabe, Bansal &
Hutter 2023, arXiv:2304.10255, section 4) asks without a model how much the values of the best tenth differ from all
values tried; where the sampler went drops out of that ratio.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.estimates import Block, Model
from analysis.factors import Factor, family_of
from analysis.frame import PARAM

_DRAWS = 400
_BEST = 0.1
_BINS = 8
_MOST_OPTIONS = 4
_FEWEST_BEST = 3


@dataclass(frozen=True, kw_only=True)
class Importance:
    """What a choice, or two of them together, contribute to the differences of the loss over the space."""

    path: str
    other_path: str
    """The second choice of an interaction; empty for a choice alone."""
    share: float
    """Of the variance over the space that choices explain, from 0 to 1; all shares add up to 1."""
    low: float
    high: float
    """Pointwise interval at 95 %."""
    best_tenth: float
    """PED-ANOVA share, of choices alone; NaN for interactions and under 30 trials."""


def importances(model: Model, trials: pd.DataFrame, *, seed: int = 0) -> tuple[Importance, ...]:
    """Every choice, and every interaction the data supports, the most important first."""
    rng = np.random.default_rng(seed)
    blocks = model.blocks()
    parts = [_variance(block, model.factors, rng) for block in blocks]
    if not parts:
        return ()
    points = np.array([point for point, _ in parts])
    draws = np.array([draw for _, draw in parts])
    total = max(float(points.sum()), 1e-300)
    shares = draws / np.maximum(draws.sum(axis=0), 1e-300)
    low, high = np.quantile(shares, [0.025, 0.975], axis=1)
    tenth = _best_tenth(model.factors, model.mean, trials)
    rows = [
        Importance(
            path=block.factors[0].path,
            other_path=block.factors[1].path if len(block.factors) > 1 else "",
            share=float(points[place] / total),
            low=min(float(low[place]), float(points[place] / total)),
            high=max(float(high[place]), float(points[place] / total)),
            best_tenth=tenth.get(block.factors[0].path, float("nan")) if len(block.factors) == 1 else float("nan"),
        )
        for place, block in enumerate(blocks)
    ]
    return tuple(sorted(rows, key=lambda row: -row.share))


def _variance(block: Block, factors: list[Factor], rng: np.random.Generator) -> tuple[float, np.ndarray]:
    """Variance over the space of one component, without what noise adds to it, and draws of it."""
    weight = np.ones((1, 1))
    for entry in block.factors:
        weight = np.kron(weight, entry.covariance)
    live = float(np.prod([_live_share(entry, factors) for entry in block.factors]))
    added = float(np.trace(weight @ block.covariance))
    # By eigenvalues: what is known exactly has no variance in some direction, or in none.
    values, vectors = np.linalg.eigh(block.covariance)
    root = vectors * np.sqrt(values.clip(min=0.0))
    drawn = block.coefficients[:, None] + root @ rng.standard_normal((len(root), _DRAWS))
    spread = np.einsum("id,ij,jd->d", drawn, weight, drawn)
    point = float(block.coefficients @ weight @ block.coefficients)
    return live * max(point - added, 0.0), live * np.maximum(spread - added, 0.0)


def _live_share(entry: Factor, factors: list[Factor]) -> float:
    """The share of the space in which a choice is live, each variant of the families above it counting alike."""
    return float(np.prod([1 / (1 + len(other.levels)) for other in factors if family_of(other, entry)]))


def _best_tenth(factors: list[Factor], losses: np.ndarray, trials: pd.DataFrame) -> dict[str, float]:
    """Pearson divergence of the values of the best tenth from all values tried, as shares; pseudo-counts of one."""
    found: dict[str, float] = {}
    for entry in factors:
        values = trials.loc[entry.live, PARAM + entry.path]
        best = losses[entry.live] <= np.quantile(losses[entry.live], _BEST)
        if best.sum() < _FEWEST_BEST:
            continue
        codes = _codes(values)
        size = int(codes.max()) + 1
        tried = (np.bincount(codes, minlength=size) + 1 / size) / (len(codes) + 1)
        taken = (np.bincount(codes[best], minlength=size) + tried) / (best.sum() + 1)
        excess = float((tried * (taken / tried - 1) ** 2).sum())
        # Draws without any effect differ too, by (cells - 1) / (best trials + 1) or less.
        found[entry.path] = max(excess - (size - 1) / (float(best.sum()) + 1), 0.0) * float(entry.live.mean())
    total = sum(found.values())
    return {path: value / total for path, value in found.items()} if total > 0 else {}


def _codes(values: pd.Series) -> np.ndarray:
    """The cell of each value: its option, or one of a few bins of equal counts."""
    if values.nunique() <= _MOST_OPTIONS or isinstance(values.iloc[0], str | bool):
        return np.asarray(pd.factorize(values)[0])
    return np.asarray(pd.qcut(pd.to_numeric(values), _BINS, labels=False, duplicates="drop"))
