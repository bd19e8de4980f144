"""Least squares with intervals that hold under unequal variances and small groups."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
from scipy import special

_FULL = 1 - 1e-9
_TINY = 1e-7
_FEWEST = 1.5
"""Rows a column of the design, at least."""
_PLENTY = 4.0
"""Rows a column from which nothing is gained by leaving columns out."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A least-squares fit; covariance is the larger of the HC3 and the classical one, direction by direction."""

    coefficients: np.ndarray
    classical: np.ndarray
    hc3: np.ndarray
    degrees: int

    def contrast(self, weights: np.ndarray, alpha: float) -> tuple[float, float, float]:
        """Estimate and interval of a linear combination of coefficients, at level 1 - alpha."""
        estimate = float(weights @ self.coefficients)
        variance = max(float(weights @ self.classical @ weights), float(weights @ self.hc3 @ weights))
        width = float(special.stdtrit(self.degrees, 1 - alpha / 2)) * variance**0.5
        return estimate, estimate - width, estimate + width


def chosen(
    start: Sequence[np.ndarray], candidates: Sequence[np.ndarray], outcome: np.ndarray
) -> tuple[np.ndarray, list[int]]:
    """The design [1, start, some candidates] of full rank, and which candidates it holds.

    All of them where there are _PLENTY rows a column; else, step by step, the one that leaves the least residual
    variance, while it falls and _FEWEST rows a column are left. What adds nothing new to the span is left out.
    """
    design = np.column_stack([np.ones(len(outcome)), *start])
    basis = np.linalg.qr(design)[0]
    width = design.shape[1] + sum(columns.shape[1] for columns in candidates)
    held: list[int] = []
    if len(outcome) < _PLENTY * width:
        held = _forward(basis, candidates, outcome)
    else:
        for place, columns in enumerate(candidates):
            wider = extended(basis, columns)
            if wider is not None:
                basis = wider
                held.append(place)
    return np.hstack([design, *(candidates[place] for place in held)]), held


def _forward(basis: np.ndarray, candidates: Sequence[np.ndarray], outcome: np.ndarray) -> list[int]:
    held: list[int] = []
    variance = _residual_variance(basis, outcome)
    while True:
        steps = []
        for place, columns in enumerate(candidates):
            wider = None if place in held else extended(basis, columns)
            if wider is not None and _bears(wider):
                steps.append((_residual_variance(wider, outcome), place, wider))
        best = min(steps, key=lambda step: step[:2], default=None)
        if best is None or best[0] >= variance:
            return held
        variance, place, basis = best
        held.append(place)


def _bears(basis: np.ndarray) -> bool:
    return basis.shape[0] >= _FEWEST * basis.shape[1]


def _residual_variance(basis: np.ndarray, outcome: np.ndarray) -> float:
    explained = basis.T @ outcome
    return float(outcome @ outcome - explained @ explained) / (len(outcome) - basis.shape[1])


def extended(basis: np.ndarray, columns: np.ndarray) -> np.ndarray | None:
    """The orthonormal basis widened by the columns, or None when they do not all add to its span."""
    rest = columns - basis @ (basis.T @ columns)
    rest -= basis @ (basis.T @ rest)
    directions, triangle = np.linalg.qr(rest)
    smallest = np.abs(np.diag(triangle)).min()
    if rest.shape[0] < rest.shape[1] or smallest <= _TINY * np.linalg.norm(columns, axis=0).max():
        return None
    return np.hstack([basis, directions])


def fit(design: np.ndarray, outcome: np.ndarray) -> Fit:
    """The fit of a design of full rank with more rows than columns.

    HC3 after MacKinnon & White (1985); a row that alone decides a coefficient has no residual and adds nothing.
    """
    rows, columns = design.shape
    assert rows > columns, f"{rows} rows cannot bear {columns} columns"
    inverse = np.linalg.inv(design.T @ design)
    coefficients = inverse @ design.T @ outcome
    residuals = outcome - design @ coefficients
    leverage = ((design @ inverse) * design).sum(axis=1)
    scaled = np.where(leverage < _FULL, residuals / np.maximum(1 - leverage, 1 - _FULL), 0.0)
    return Fit(
        coefficients=coefficients,
        classical=inverse * float(residuals @ residuals) / (rows - columns),
        hc3=inverse @ (design.T * scaled**2) @ design @ inverse,
        degrees=rows - columns,
    )


def fisher(hits: int, n: int, other_hits: int, other_n: int) -> float:
    """Two-sided p-value of Fisher's exact test that two rates are equal."""
    total, trials = hits + other_hits, n + other_n
    ways = [comb(n, k) * comb(other_n, total - k) for k in range(min(n, total) + 1)]
    return sum(way for way in ways if way <= ways[hits]) / comb(trials, total)
