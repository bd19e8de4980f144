"""Verdicts on paired seeds that stay valid however often one looks at them.

The e-process is the t-test of Lai (1976, "On confidence sequences") with a proper mixture: under the right Haar prior
on the deviation and a symmetric prior on the standardised effect, the ratio of the densities of the scaled data is a
martingale that starts at 1, whatever the deviation. One part of the prior is normal, for which the ratio is the Bayes
factor of Gönen, Johnson, Lu & Westfall (2005, "The Bayesian two-sample t test") for one sample; the other stands at one
effect, plus and minus, as in the t-tests of Grünwald, de Heide & Koolen (2024, "Safe testing").
By Ville's inequality it ever passes 1/alpha with probability at most alpha, so the means it has not refuted form a
confidence sequence (Wang & Ramdas 2024, "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown
variance"). No deviation is plugged in. The guarantee is for pairs in the order of their seeds, none left out for what
it showed; it holds at any time of looking, even one chosen by what further seeds of other pairs have shown.

Ville's bound has slack, as the process jumps over 1/alpha and does not stop on it (Fischer & Ramdas 2024, "Improving
Wald's (approximate) sequential probability ratio test by avoiding overshoot", arXiv:2410.16076). Here that slack is
known: where the mean is true, x_n/|(x_1..x_n)| is independent of the process so far (Basu's theorem) and has density
proportional to (1 - w²)^((n-3)/2), so that t is a Markov chain free of parameters. The chance that the process passes a
bound by n = N is then a repeated integral in one variable, and after N it is at most what Ville leaves from there.
`benchmarks/levels.py` computes it: at JUMP/alpha it is below alpha for every alpha within LEVELS.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammaln, logsumexp

_LARGEST = math.log(sys.float_info.max)
WIDE_VARIANCE = 25.0
"""Variance of the normal part of the prior on mean/deviation: gaps so large that three or four pairs decide, and small
ones that take many."""
AIMED_EFFECT = 2.0
"""Where the other part stands: the effect that ten pairs should find."""
AIMED_SHARE = 0.6
"""Its weight. `decidable` gives the smallest gap that n pairs decide."""
JUMP = 0.75
"""The evidence that decides, in units of 1/alpha, at the levels for which its error is known."""
LEVELS = (1e-4, 0.5)
"""From and to; at others 1/alpha decides."""
_MOST_SEEDS = 1000
_FEWEST_FORETELL = 4
"""Pairs from which the spread is known well enough to say how many more would decide."""

Kind = str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the paired seeds say of a contestant against a baseline; lower values are better."""

    kind: Kind
    """'better', 'worse', 'equal' (within the margin) or 'undecided', said of the contestant."""
    contestant: str
    baseline: str
    estimate: float
    """Mean of contestant minus baseline."""
    low: float
    high: float
    n: int
    alpha: float
    """Chance that this statement is ever wrong, looks and contrasts all counted."""
    margin: float
    unit: str
    more_seeds: int
    """How many further pairs would probably decide a gap of the margin, or of the observed size where there is no
    margin, were the observed spread the true one; 0 when decided."""
    withheld: str = ""
    """Why nothing is decided although the pairs alone would decide; empty when the pairs speak for themselves."""

    @property
    def identical(self) -> bool:
        """True when every pair was equal to the last bit, which is a fact and no estimate."""
        return self.kind == "equal" and self.low == self.high == 0.0

    @property
    def text(self) -> str:
        """The verdict as a sentence with numbers and units."""
        return _sentence(self)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data; an unbounded interval has null ends."""
        plain = {**vars(self), "text": self.text}
        for end in ("low", "high", "estimate"):
            plain[end] = plain[end] if math.isfinite(plain[end]) else None
        return plain


def e_value(differences: Sequence[float], mean: float = 0.0) -> float:
    """Evidence against this mean, which stays below `enough(alpha)` at every n at once with probability 1 - alpha where
    the mean is true; its expectation is then 1.
    """
    n = len(differences)
    if n < 2:
        return 1.0
    centre, spread = _moments(differences)
    if spread == 0 and centre == mean:
        return 1.0
    evidence = log_evidence(n, n * ((centre - mean) / spread) ** 2 / (n - 1)) if spread else _most_evidence(n)
    return math.exp(evidence) if evidence < _LARGEST else math.inf


def log_evidence(n: int, ratio: float) -> float:
    """The log of the e-value where t²/(n - 1) is `ratio`; it grows with the ratio."""
    inflation = 1 + n * WIDE_VARIANCE
    wide = 0.5 * n * (math.log1p(ratio) - math.log1p(ratio / inflation)) - 0.5 * math.log(inflation)
    return _mixed(wide, _log_aimed(n, ratio / (1 + ratio)))


def _most_evidence(n: int) -> float:
    """What `log_evidence` tends to as the spread vanishes."""
    inflation = 1 + n * WIDE_VARIANCE
    return _mixed(0.5 * (n - 1) * math.log(inflation), _log_aimed(n, 1.0))


def _mixed(wide: float, aimed: float) -> float:
    return float(np.logaddexp(math.log(1 - AIMED_SHARE) + wide, math.log(AIMED_SHARE) + aimed))


def _log_aimed(n: int, share: float) -> float:
    """The log density ratio of t at effects of plus and minus AIMED_EFFECT, in halves; `share` is t²/(n - 1 + t²).

    It is exp(-n d²/2) 1F1(n/2; 1/2; share n d²/2), whose series of positive terms is summed here in logarithms.
    """
    if share == 0:
        return -0.5 * n * AIMED_EFFECT**2
    z = 0.5 * n * AIMED_EFFECT**2 * share
    largest = 0.5 * (z + math.sqrt(z * z + 2 * n * z))
    k = np.arange(int(2 * largest) + 60)
    terms = gammaln(0.5 * n + k) - gammaln(0.5 * n) - gammaln(0.5 + k) + gammaln(0.5) - gammaln(1 + k) + k * math.log(z)
    return float(logsumexp(terms)) - 0.5 * n * AIMED_EFFECT**2


def enough(alpha: float) -> float:
    """The evidence that decides at this level."""
    return (JUMP if LEVELS[0] <= alpha <= LEVELS[1] else 1.0) / alpha


@lru_cache(maxsize=100_000)
def decidable(n: int, alpha: float) -> float:
    """The smallest |mean|/deviation that n pairs decide at this level; infinite while none does."""
    wanted = math.log(enough(alpha))
    if n < 2 or _most_evidence(n) <= wanted:
        return math.inf
    top = 1.0
    while log_evidence(n, top) < wanted:
        top *= 4
    ratio = brentq(lambda ratio: log_evidence(n, ratio) - wanted, 0.0, top, xtol=1e-14, rtol=1e-12)
    return math.sqrt(ratio * (n - 1) / n)


def confidence_sequence(differences: Sequence[float], alpha: float) -> tuple[float, float]:
    """The means not refuted at this n; over every n at once, these intervals hold the true mean with 1 - alpha."""
    width = decidable(len(differences), alpha)
    if math.isinf(width):
        return -math.inf, math.inf
    centre, spread = _moments(differences)
    return centre - width * spread, centre + width * spread


def paired_verdict(
    differences: Sequence[float],
    *,
    alpha: float = 0.05,
    margin: float = 0.0,
    contestant: str = "contestant",
    baseline: str = "baseline",
    unit: str = "nats/token",
) -> Verdict:
    """The verdict on contestant minus baseline, one difference a seed, in the order they were trained."""
    values = [float(value) for value in differences]
    _check(values, alpha, margin)
    n = len(values)
    mean = math.fsum(values) / n if n else math.nan
    kind, low, high = standing(values, alpha=alpha, margin=margin)
    more = _more_seeds(values, alpha, margin) if kind == "undecided" else 0
    return Verdict(
        kind=kind,
        contestant=contestant,
        baseline=baseline,
        estimate=mean,
        low=low,
        high=high,
        n=n,
        alpha=alpha,
        margin=margin,
        unit=unit,
        more_seeds=more,
    )


def standing(values: Sequence[float], *, alpha: float, margin: float) -> tuple[Kind, float, float]:
    """What differences say by themselves, with their interval: the part of `paired_verdict` that decides."""
    if len(values) >= 2 and not any(values):
        return "equal", 0.0, 0.0
    low, high = confidence_sequence(values, alpha)
    if -margin <= low and high <= margin:
        return "equal", low, high
    if high < 0:
        return "better", low, high
    return ("worse" if low > 0 else "undecided"), low, high


def _check(values: list[float], alpha: float, margin: float) -> None:
    if not 0 < alpha < 1:
        raise ValueError(f"paired_verdict alpha={alpha}: takes a chance between 0 and 1; 0.05 is usual")
    if not (margin >= 0 and math.isfinite(margin)):
        raise ValueError(
            f"paired_verdict margin={margin}: takes a finite number from 0, in the unit of the differences"
        )
    for place, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(
                f"paired_verdict differences[{place}]={value}: takes finite numbers; count a diverged seed as a failure"
            )


def _moments(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _more_seeds(values: list[float], alpha: float, margin: float) -> int:
    """Further pairs until a gap as large as the margin, or as the observed one, would be decided."""
    n = len(values)
    if n < 2:
        return next(k for k in range(2, _MOST_SEEDS) if math.isfinite(decidable(k, alpha))) - n
    mean, spread = _moments(values)
    return pairs_to_settle(margin or abs(mean), spread, alpha=alpha, after=n) - n


def pairs_to_settle(gap: float, spread: float, *, alpha: float, after: int = 1) -> int:
    """How many pairs with such a mean and deviation decide; at least one and at most _MOST_SEEDS more than `after`."""
    low, high = after, after + _MOST_SEEDS
    if decidable(high, alpha) * spread >= gap:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decidable(middle, alpha) * spread < gap else (middle, high)
    return high


def _sentence(verdict: Verdict) -> str:
    v = verdict
    pairs = f"{v.n} paired seed{'' if v.n == 1 else 's'}"
    if v.kind in ("better", "worse"):
        winner, loser = (v.contestant, v.baseline) if v.kind == "better" else (v.baseline, v.contestant)
        ends = interval_text(*sorted((abs(v.low), abs(v.high))))
        return f"{winner} beats {loser} by {number_text(abs(v.estimate))} {v.unit} {ends}, {pairs}"
    if v.identical:
        return f"{v.contestant} and {v.baseline} are equal to the last bit in each of {pairs}: the change does nothing"
    ends = interval_text(v.low, v.high)
    if v.withheld and v.n == 0:
        return f"undecided: {v.withheld}; there is no seed on which both ended well"
    if v.withheld:
        gap = f"{v.contestant} minus {v.baseline} is {number_text(v.estimate)} {v.unit} {ends} over {pairs}"
        return f"undecided: {v.withheld}; {gap} alone on which both ended well"
    if v.kind == "equal":
        return f"{v.contestant} equals {v.baseline} within ±{number_text(v.margin)} {v.unit} {ends}, {pairs}"
    if v.n == 0:
        return f"undecided: {v.contestant} against {v.baseline} has no complete pair of seeds yet"
    said = f"undecided: {v.contestant} minus {v.baseline} is {number_text(v.estimate)} {v.unit} {ends} after {pairs}"
    if v.n < _FEWEST_FORETELL:
        return said
    wish = f"more than {_MOST_SEEDS:,}" if v.more_seeds >= _MOST_SEEDS else f"about {v.more_seeds}"
    gap = f"of {number_text(v.margin)} {v.unit}" if v.margin else "of this size"
    return f"{said}; {wish} more would probably settle a gap {gap}"


def number_text(value: float) -> str:
    """A number of nats: two digits, never fewer than two decimals, and a real minus sign."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}".replace("-", "−")
    digits = min(max(1 - math.floor(math.log10(abs(value))), 2), 6)
    return f"{value:.{digits}f}".replace("-", "−")


def interval_text(low: float, high: float) -> str:
    """An interval with as many digits as its width deserves, and enough to show on which side of zero an end lies."""
    if math.isinf(low) and math.isinf(high):
        return "[no bound yet]"
    digits = 2
    if high > low:
        digits = min(max(1 - math.floor(math.log10(high - low)), 2), 6)
    while digits < 6 and any(end and not round(end, digits) for end in (low, high)):
        digits += 1
    return f"[{low:.{digits}f}, {high:.{digits}f}]".replace("-", "−")
