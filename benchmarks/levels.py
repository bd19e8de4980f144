"""Computes how often paired verdicts err at most on normal noise, looked at after every pair without end.

Nothing is drawn: it is the repeated integral that analysis/compare.py speaks of. Where the mean is true, let s be the
sum of n - 1 differences over the root of their sum of squares, and x_n/|(x_1..x_n)| = sin(a): then s goes on to
s cos(a) + sin(a), and a has density proportional to cos(a)^(n-2), whatever happened before. One line a level is
printed: an upper bound of the chance that any interval of a sequence without end leaves out the truth.
"""

import math
import sys

import numpy as np
from scipy.special import gammaln

from analysis.compare import LEVELS, decidable, enough, log_evidence

PAIRS = 64
"""After so many, Ville's inequality bounds the rest."""
POINTS = 160
NODES = np.polynomial.legendre.leggauss(40)
CLOSEST = 1.001
"""Levels this near that still do not prove each other are taken to be exceeded."""
DEVIATIONS = 9.0
"""Angles farther out are too rare to count: they are taken for errors."""


def error(alpha: float, *, pairs: int = PAIRS, endless: bool = True) -> float:
    """The chance that a decision at this level is ever wrong; with `endless` off, that it is by so many pairs."""
    bounds = [_bound(n, alpha) for n in range(pairs + 1)]
    places = np.linspace(0.0, min(bounds[pairs], math.sqrt(pairs)), POINTS)
    later = np.array([_ville(pairs, place, alpha) if endless else 0.0 for place in places])
    for n in range(pairs, 1, -1):
        before = np.linspace(0.0, min(bounds[n - 1], math.sqrt(n - 1)), POINTS) if n > 2 else np.array([1.0])
        later, places = _step(n, before, bounds[n], places, later), before
    return float(later[0])


def _bound(n: int, alpha: float) -> float:
    """How far s goes undecided."""
    gap = decidable(n, alpha)
    return math.sqrt(n) * gap / math.hypot(gap, math.sqrt((n - 1) / n)) if math.isfinite(gap) else math.inf


def _ville(n: int, place: float, alpha: float) -> float:
    """The chance that the evidence ever reaches what decides, given that it stands where s has this place."""
    share = min(place**2 / n, 1 - 1e-12)
    return min(math.exp(log_evidence(n, share / (1 - share))) / enough(alpha), 1.0)


def _step(n: int, before: np.ndarray, bound: float, places: np.ndarray, later: np.ndarray) -> np.ndarray:
    """The chance of an error from each place before the n-th difference on, from those after it; s is symmetric."""
    radius, top = np.hypot(1.0, before), np.arctan2(1.0, before)
    reach = min(math.pi / 2, DEVIATIONS / math.sqrt(n))
    ends = np.arccos(np.minimum(bound / radius, 1.0))
    first = top - np.arccos(np.maximum(-bound / radius, -1.0))
    undecided = np.zeros_like(before)
    found = np.zeros_like(before)
    for low, high in ((first, top - ends), (top + ends, np.full_like(before, reach))):
        low, high = np.clip(low, -reach, reach), np.clip(high, -reach, reach)
        half = np.maximum(high - low, 0.0) / 2
        angles = (low + high)[:, None] / 2 + half[:, None] * NODES[0]
        size = gammaln(n / 2) - gammaln((n - 1) / 2) - 0.5 * math.log(math.pi)
        weights = half[:, None] * NODES[1] * np.exp(size + (n - 2) * np.log(np.cos(angles)))
        after = np.abs(before[:, None] * np.cos(angles) + np.sin(angles))
        undecided += weights.sum(axis=1)
        found += (weights * np.interp(after, places, later)).sum(axis=1)
    return np.clip(1.0 - undecided + found, 0.0, 1.0)


def holds(low: float, high: float) -> bool:
    """Whether no level between the two is exceeded: the error grows with the level, so ends close together prove it."""
    if error(high) <= low:
        return True
    middle = math.sqrt(low * high)
    return high / low > CLOSEST and holds(low, middle) and holds(middle, high)


def main() -> int:
    """Prove the levels, and print what the usual ones come to; 1 when one is exceeded."""
    good = holds(*LEVELS)
    print(f"no level from {LEVELS[0]:g} to {LEVELS[1]:g} is exceeded: {good}")
    for alpha in (0.05, 0.025, 0.0125, 0.01):
        ten = error(alpha, pairs=10, endless=False)
        print(f"level {alpha:.2%}: ever wrong at most {error(alpha):.2%}, within 10 pairs {ten:.2%}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
