"""Losses and their differences carried on to model sizes that nobody trained: a mixture over forms, scales and noise.

Two families that each follow L(N) = E + A N^-a (Hoffmann et al. 2022, arXiv:2203.15556, eq. 2) differ by
dE + dA u + da v, where u = N^-a and v = log(N) u, to first order in their differences. Which of these terms there are,
how large they are, which exponent a holds and how loud the seeds are is not known from a few sizes; so every
combination on a grid is tried, weighed by how probable it makes what was measured (Bayesian model averaging), and asked
for the target. Beside the forms stands a departure from all of them whose slope wanders with log(N), as that of broken
laws does (Caballero et al. 2022, arXiv:2210.14891).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

Array = NDArray[np.float64]

EXPONENTS = np.array([0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7])
"""Of the number of parameters, in the laws that are tried."""
SCALES = np.geomspace(0.001, 1.0, 8)
"""Sizes of a difference that are tried, nats."""
WANDERINGS: Mapping[float, float] = {0.0: 0.5, 0.3: 0.4, 1.0: 0.1}
"""How far the slope wanders over the ladder, in scales, and the weight that each has at first."""
MEASURED_QUANTILES = (np.arange(12) + 0.5) / 12
FORMS: Mapping[str, tuple[str, ...]] = {
    "the same gap at every size": ("1",),
    "a gap that shrinks to nothing": ("u",),
    "other floors and other slopes": ("1", "u"),
    "other exponents too": ("1", "u", "v"),
    "a gap straight in the logarithm of the size": ("1", "t"),
}
"""The terms of each form of a difference; all forms weigh the same at first."""
LAWS: Mapping[str, tuple[str, ...]] = {"a power law with a floor": ("1", "u"), "a power law to zero": ("u",)}
_NEGLIGIBLE = 1e-7
"""Weight of a component, over that of the heaviest, below which it is left out."""
_FAR, _HALVINGS = 10.0, 40
"""Deviations on either side within which a quantile is looked for, and how often that stretch is halved."""
_BROKEN_SHARES: Mapping[float, float] = {0.01: 0.4, 0.05: 0.4, 0.2: 0.2}
"""How far the slope of a loss wanders, in the loss's fall over the ladder."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured at each size: means over seeds, and how loud the seeds are."""

    sizes: Array
    """Parameters, increasing."""
    means: Array
    """Nats, one a size."""
    counts: Array
    """Seeds behind each mean."""
    deviation: float
    """Standard deviation between seeds, pooled over sizes."""
    degrees: int
    """Degrees of freedom of that deviation."""

    def only(self, kept: int) -> "Measured":
        """The same at the smallest sizes alone."""
        return Measured(
            sizes=self.sizes[:kept],
            means=self.means[:kept],
            counts=self.counts[:kept],
            deviation=self.deviation,
            degrees=self.degrees,
        )


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """What is believed of a quantity at some sizes: a weighted mixture of normal distributions."""

    weights: Array
    means: Array
    """One row a component, one column a size."""
    deviations: Array
    labels: NDArray[np.str_]
    """The form that each component has."""

    def below(self, value: float = 0.0, place: int = -1) -> float:
        """The probability of a value below this one at one of the sizes."""
        return float(self.weights @ special.ndtr((value - self.means[:, place]) / self.deviations[:, place]))

    def mean(self, place: int = -1) -> float:
        """The expected value at one of the sizes."""
        return float(self.weights @ self.means[:, place])

    def quantile(self, share: float, place: int = -1) -> float:
        """The value below which the share of all probability lies at one of the sizes."""
        means, deviations = self.means[:, place], self.deviations[:, place]
        low, high = float((means - _FAR * deviations).min()), float((means + _FAR * deviations).max())
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.below(middle, place) < share else (low, middle)
        return (low + high) / 2

    def interval(self, level: float, place: int = -1) -> tuple[float, float]:
        """The central interval of this probability at one of the sizes."""
        return self.quantile((1 - level) / 2, place), self.quantile((1 + level) / 2, place)

    def shares(self) -> dict[str, float]:
        """How probable each form is after what was measured."""
        return {str(name): float(self.weights[self.labels == name].sum()) for name in dict.fromkeys(self.labels)}


def pooled(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """The standard deviation within groups, and its degrees of freedom."""
    squares = sum(float(np.var(group) * len(group)) for group in groups if len(group))
    degrees = sum(len(group) - 1 for group in groups if len(group))
    return (float(np.sqrt(squares / degrees)) if degrees else float("nan")), degrees


def difference_at(difference: Measured, level_curve: Measured, wanted: Sequence[float]) -> Mixture:
    """What a paired difference of losses is believed to be at other sizes.

    `level_curve` holds the losses of both sides together, which tell the exponent.
    """
    exponents = _exponents(level_curve)
    parts: list[_Part] = []
    for name, terms in FORMS.items():
        bends = bool({"u", "v"} & set(terms))
        for exponent, weight in zip(EXPONENTS, exponents, strict=True) if bends else [(1.0, 1.0)]:
            basis = _basis(difference.sizes, wanted, terms, float(exponent))
            prior = float(weight) / len(FORMS)
            for scale in SCALES:
                for wandering, share in WANDERINGS.items():
                    widths = np.full(len(terms), scale)
                    parts.append(
                        _Part(
                            label=name,
                            basis=basis,
                            widths=widths,
                            wandering=wandering * scale,
                            weight=prior * share / len(SCALES),
                        )
                    )
    return _mixed(difference, wanted, parts)


def loss_at(curve: Measured, wanted: Sequence[float]) -> Mixture:
    """What the loss of one family is believed to be at other sizes."""
    parts = [part for exponent in EXPONENTS for part in _law_parts(curve, wanted, float(exponent))]
    return _mixed(curve, wanted, parts)


def _exponents(curve: Measured) -> Array:
    """How probable each exponent is, given the losses themselves."""
    found = []
    for exponent in EXPONENTS:
        parts = _law_parts(curve, [], float(exponent))
        found.append(np.logaddexp.reduce(_evidence(curve, [], parts)[0].ravel()))
    return _normalised(np.array(found))


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One combination of the grid, but for the loudness of seeds."""

    label: str
    basis: Array
    """Terms at the measured sizes, then at the wanted ones."""
    widths: Array
    """How large each coefficient may be, one standard deviation."""
    wandering: float
    weight: float


def _law_parts(curve: Measured, wanted: Sequence[float], exponent: float) -> list[_Part]:
    fall = max(float(np.ptp(curve.means)), 1e-3)
    parts = []
    for name, terms in LAWS.items():
        widths = np.array([2 * float(curve.means.max())] * len(terms))
        basis = _basis(curve.sizes, wanted, terms, exponent)
        for broken, share in _BROKEN_SHARES.items():
            weight = share / len(LAWS) / len(EXPONENTS)
            parts.append(_Part(label=name, basis=basis, widths=widths, wandering=broken * fall, weight=weight))
    return parts


def _basis(sizes: Array, wanted: Sequence[float], terms: Sequence[str], exponent: float) -> Array:
    """A column for each term, a row for each size: those measured, then those wanted."""
    logs = np.log(np.concatenate([sizes, np.asarray(wanted, dtype=float)]) / sizes[0])
    power = np.exp(-exponent * logs)
    columns = {
        "1": np.ones_like(logs),
        "u": power,
        # At its largest where log(N) = 1 / a; that value is set to 1.
        "v": exponent * np.e * logs * power,
        "t": _place(sizes, logs),
    }
    return np.stack([columns[term] for term in terms], axis=1)


def _place(sizes: Array, logs: Array) -> Array:
    """0 at the smallest size of the ladder and 1 at the largest, straight in the logarithm."""
    return cast(Array, logs / np.log(sizes[-1] / sizes[0]))


def _mixed(measured: Measured, wanted: Sequence[float], parts: Sequence[_Part]) -> Mixture:
    evidence, means, variances = _evidence(measured, wanted, parts)
    logs = evidence.ravel()
    kept = logs > logs.max() + np.log(_NEGLIGIBLE)
    return Mixture(
        weights=_normalised(logs[kept]),
        means=means.reshape(-1, len(wanted))[kept],
        deviations=np.sqrt(np.maximum(variances.reshape(-1, len(wanted))[kept], 1e-18)),
        labels=np.repeat([part.label for part in parts], len(MEASURED_QUANTILES))[kept],
    )


def _evidence(measured: Measured, wanted: Sequence[float], parts: Sequence[_Part]) -> tuple[Array, Array, Array]:
    """For each part and each loudness: log weight, then mean and variance at each wanted size."""
    n = len(measured.sizes)
    logs = np.log(np.concatenate([measured.sizes, np.asarray(wanted, dtype=float)]) / measured.sizes[0])
    wander = _wandering(_place(measured.sizes, logs))
    basis = [part.basis * part.widths for part in parts]
    spread = np.array([part.wandering for part in parts])
    prior = np.stack([columns @ columns.T for columns in basis]) + spread[:, None, None] ** 2 * wander
    noise = _loudness(measured)[:, None] ** 2 / measured.counts
    whole = prior[:, None, :n, :n] + np.einsum("qi,ij->qij", noise, np.eye(n))[None]
    solved = np.linalg.solve(whole, np.broadcast_to(measured.means[:, None], (*whole.shape[:3], 1)))[..., 0]
    _, volume = np.linalg.slogdet(whole)
    fits = -0.5 * (np.einsum("pqi,i->pq", solved, measured.means) + volume)
    weight = np.log([part.weight for part in parts])[:, None] + fits
    across = prior[:, n:, :n]
    means = np.einsum("pwi,pqi->pqw", across, solved)
    pulled = np.linalg.solve(whole, np.broadcast_to(across.swapaxes(1, 2)[:, None], (*whole.shape[:3], len(wanted))))
    own = np.einsum("pww->pw", prior[:, n:, n:])
    variances = own[:, None] - np.einsum("pwi,pqiw->pqw", across, pulled)
    return weight, means, variances


def _wandering(places: Array) -> Array:
    """The covariance of a line whose slope takes a random walk from the first place on, after which it starts."""
    low, high = np.minimum.outer(places, places), np.maximum.outer(places, places)
    return cast(Array, low**2 * (3 * high - low) / 6)


def _loudness(measured: Measured) -> Array:
    """Deviations between seeds that are as probable as each other, given the one that was measured."""
    chances = stats.chi2.ppf(1 - MEASURED_QUANTILES, measured.degrees)
    floor = max(measured.deviation, 1e-6)
    return cast(Array, floor * np.sqrt(measured.degrees / np.maximum(chances, 1e-3)))


def _normalised(logs: Array) -> Array:
    return cast(Array, np.exp(logs - np.logaddexp.reduce(logs)))
