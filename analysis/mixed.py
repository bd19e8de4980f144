"""Mixed models: effects that are asked for are free, others are drawn to zero as far as analysis.support finds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import special

_FULL = 1 - 1e-9
_TINY = 1e-9
_NOTHING_NEW = 1e-7


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


def cautious(parts: Sequence[Contrast], weights: Sequence[float]) -> Contrast:
    """The first of several accounts of one contrast, with the mean square around it over all of them."""
    first = parts[0]
    squares = [part.variance + (part.estimate - first.estimate) ** 2 for part in parts]
    degrees = min(part.degrees for part in parts)
    return Contrast(estimate=first.estimate, variance=float(np.average(squares, weights=weights)), degrees=degrees)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Columns that are free, and columns that are drawn to zero; what depends on no outcome is found once."""

    free: np.ndarray
    drawn: np.ndarray
    ratios: np.ndarray
    """Variance of each drawn column's coefficient, as a multiple of the residual variance."""

    @cached_property
    def design(self) -> np.ndarray:
        """The free columns, then the drawn ones."""
        return np.hstack([self.free, self.drawn])

    @cached_property
    def inverse(self) -> np.ndarray:
        """Covariance of the coefficients, in units of the residual variance."""
        penalty = np.concatenate([np.zeros(self.free.shape[1]), 1 / self.ratios])
        found: np.ndarray = np.linalg.inv(self.design.T @ self.design + np.diag(penalty))
        return found

    @cached_property
    def leverage(self) -> np.ndarray:
        """How much each row decides its own fitted value."""
        found: np.ndarray = np.einsum("ij,ij->i", self.design @ self.inverse, self.design)
        return found

    @property
    def degrees(self) -> float:
        """Rows less the effective number of columns."""
        return len(self.design) - float(self.leverage.sum())

    def beside(self, more: np.ndarray) -> "Beside | None":
        """Further free columns beside all of these; None where they add nothing.

        By partial regression (Frisch & Waugh 1933), so that many sets of columns can be asked about one fit.
        """
        rest = more - self.design @ (self.inverse @ (self.design.T @ more))
        gram = more.T @ rest
        size = np.linalg.norm(more, axis=0)
        degrees = self.degrees - more.shape[1]
        if degrees < 1 or not size.all() or np.linalg.eigvalsh(gram / np.outer(size, size))[0] < _TINY:
            return None
        inverse = np.linalg.inv(gram)
        leverage = self.leverage + np.einsum("ij,ij->i", rest @ inverse, rest)
        return Beside(rest=rest, inverse=inverse, leverage=leverage, degrees=degrees)


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Further free columns, less what other columns explain of them."""

    rest: np.ndarray
    inverse: np.ndarray
    leverage: np.ndarray
    """Of all columns together."""
    degrees: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Coefficients of columns; variances are the larger of the model's and HC3, contrast by contrast."""

    columns: Columns
    outcome: np.ndarray

    @cached_property
    def coefficients(self) -> np.ndarray:
        """Best linear unbiased estimates of the free columns, predictions of the drawn ones."""
        found: np.ndarray = self.columns.inverse @ (self.columns.design.T @ self.outcome)
        return found

    @cached_property
    def residuals(self) -> np.ndarray:
        """Outcome less what all columns explain."""
        found: np.ndarray = self.outcome - self.columns.design @ self.coefficients
        return found

    @cached_property
    def variance(self) -> float:
        """The residual variance, by restricted maximum likelihood."""
        return float(self.outcome @ self.residuals) / (len(self.outcome) - self.columns.free.shape[1])

    @cached_property
    def _scaled(self) -> np.ndarray:
        return _scaled(self.residuals, self.columns.leverage)

    def contrast(self, weights: np.ndarray) -> Contrast:
        """A combination of the coefficients; HC3 after MacKinnon & White (1985)."""
        towards = self.columns.inverse @ weights
        model = self.variance * float(weights @ towards)
        robust = float((((self.columns.design @ towards) * self._scaled) ** 2).sum())
        estimate = float(weights @ self.coefficients)
        return Contrast(estimate=estimate, variance=max(model, robust), degrees=self.columns.degrees)

    def with_more(self, beside: Beside, weights: np.ndarray) -> list[Contrast]:
        """Contrasts (rows of `weights`) of further free columns."""
        found = beside.inverse @ (beside.rest.T @ self.outcome)
        residuals = self.residuals - beside.rest @ found
        scaled = _scaled(residuals, beside.leverage)
        left = len(self.outcome) - self.columns.free.shape[1] - beside.rest.shape[1]
        variance = float(self.outcome @ residuals) / left
        towards = [beside.inverse @ one for one in weights]
        return [
            Contrast(
                estimate=float(one @ found),
                variance=max(variance * float(one @ way), float((((beside.rest @ way) * scaled) ** 2).sum())),
                degrees=beside.degrees,
            )
            for one, way in zip(weights, towards, strict=True)
        ]


def _scaled(residuals: np.ndarray, leverage: np.ndarray) -> np.ndarray:
    """Residuals as HC3 takes them; a row that decides its own fitted value says nothing."""
    found: np.ndarray = residuals / np.maximum(1 - leverage, 1 - _FULL) * (leverage < _FULL)
    return found


def extended(basis: np.ndarray, columns: np.ndarray) -> np.ndarray | None:
    """The orthonormal basis widened by the columns, or None when they do not all add to its span."""
    rest = columns - basis @ (basis.T @ columns)
    rest -= basis @ (basis.T @ rest)
    directions, triangle = np.linalg.qr(rest)
    smallest = np.abs(np.diag(triangle)).min()
    if rest.shape[0] < rest.shape[1] or smallest <= _NOTHING_NEW * np.linalg.norm(columns, axis=0).max():
        return None
    return np.hstack([basis, directions])
