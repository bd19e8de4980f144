"""How early the order of a search can be trusted, and where unfinished learning curves are going.

Both are told with intervals. Ranks agree as Spearman's correlation of the losses at some token count with the final
ones, its interval after Bonett & Wright (2000, "Sample size requirements for estimating Pearson, Kendall and Spearman
correlations", equation 3). Curves are extrapolated as a level that a power law of the tokens approaches, averaged over
exponents by their likelihood; a schedule that lowers the learning rate late bends curves in a way no such law foresees.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import special

from analysis import curves
from analysis.frame import Search
from search_space.errors import UserError
from search_space.records import Metric, Status

WANTED = 0.8
"""Rank correlation with the final losses from which an order is trusted."""
_FEWEST = 5
_LEAST_READINGS = 5
_EXPONENTS = np.linspace(0.05, 1.5, 59)


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """From which token count on the order of the trials is the final one, as far as can be told."""

    tokens: int
    """The smallest such token count; 0 when there is none before the whole budget."""
    budget: int
    wanted: float
    alpha: float
    agreement: pd.DataFrame
    """tokens, share (of the budget), correlation, low, high, n: one row a token count."""
    text: str
    """The answer as a sentence."""


def fidelity(search: Search, *, wanted: float = WANTED, alpha: float = 0.05) -> Fidelity:
    """Rank agreement with the final losses at every token count, over the trials that trained to the end.

    The token count is found from the whole budget downwards and the walk ends at the first interval that reaches below
    `wanted`, so that the chance of naming one too small stays alpha / 2 however many are looked at.
    """
    budget = int(search.parent.experiment.get("budget", {}).get("tokens", 0))
    table = rank_agreements(search, alpha=alpha)
    budget = budget or int(table["tokens"].max() if len(table) else 0)
    table.insert(1, "share", table["tokens"] / max(budget, 1))
    early = table[table["tokens"] < budget]
    trusted = 0
    for tokens, low in zip(early["tokens"][::-1], early["low"][::-1], strict=True):
        if low < wanted:
            break
        trusted = int(tokens)
    text = _sentence(early, trusted, budget, wanted)
    return Fidelity(tokens=trusted, budget=budget, wanted=wanted, alpha=alpha, agreement=table, text=text)


def rank_agreements(search: Search, *, alpha: float = 0.05) -> pd.DataFrame:
    """tokens, correlation, low, high, n at each token count that five finished trials have a reading at."""
    final = search.finished.set_index("run_id")[Metric.LOSS]
    readings = curves.readings_table(search).reindex(final.index)
    rows = []
    for place, tokens in enumerate(readings.columns.to_numpy(dtype=int)):
        both = pd.concat([readings.iloc[:, place], final], axis=1).dropna()
        if len(both) < _FEWEST or (both.nunique() < 2).any():
            continue
        ranks = both.rank().to_numpy()
        value = float(np.corrcoef(ranks.T)[0, 1])
        rows.append((int(tokens), value, *spearman_interval(value, len(both), alpha), len(both)))
    return pd.DataFrame(rows, columns=["tokens", "correlation", "low", "high", "n"])


def spearman_interval(correlation: float, n: int, alpha: float) -> tuple[float, float]:
    """The interval of a rank correlation at level 1 - alpha; the whole range under four pairs."""
    if n < 4:
        return -1.0, 1.0
    held = min(max(correlation, -1 + 1e-12), 1 - 1e-12)
    width = float(special.ndtri(1 - alpha / 2)) * math.sqrt((1 + held**2 / 2) / (n - 3))
    return math.tanh(math.atanh(held) - width), math.tanh(math.atanh(held) + width)


@dataclass(frozen=True, kw_only=True)
class Extrapolation:
    """Where a learning curve will be after so many tokens."""

    tokens: int
    estimate: float
    low: float
    high: float
    readings: int


def extrapolate(tokens: Sequence[float], losses: Sequence[float], at: int, *, alpha: float = 0.1) -> Extrapolation:
    """The loss a trial would read at `at` tokens, with a predictive interval at level 1 - alpha.

    For each exponent the level and the drop are least squares under flat priors, so that the prediction is a Student
    distribution; the mixture over exponents, weighed by their marginal likelihood, is cut at alpha / 2 on each side.
    The exponent counts as a third degree of freedom: else intervals from six readings held 86 % where 90 % was asked.
    The noise is taken to be the same at each reading.
    """
    t, y = np.asarray(tokens, dtype=float), np.asarray(losses, dtype=float)
    if len(t) < _LEAST_READINGS or len(np.unique(t)) < len(t) or (t <= 0).any() or not np.isfinite(y).all():
        raise UserError(
            f"extrapolation: needs at least {_LEAST_READINGS} finite readings at different token counts above 0, "
            f"got {len(t)}; train longer or read more often (budget.eval_every)"
        )
    if at <= t.max():
        raise UserError(
            f"extrapolation: tokens={at:,} is not beyond the last reading at {int(t.max()):,}; ask for more"
        )
    degrees = len(t) - 3
    weights, centres, scales = [], [], []
    for exponent in _EXPONENTS:
        first, last = t.min() ** -exponent, t.max() ** -exponent
        # The drop from the first to the last reading has a size whatever the exponent; a flat prior on it is fair.
        design = np.column_stack([np.ones(len(t)), (t**-exponent - last) / (first - last)])
        there = np.array([1.0, (float(at) ** -exponent - last) / (first - last)])
        inverse = np.linalg.inv(design.T @ design)
        found = inverse @ design.T @ y
        squares = max(float(((y - design @ found) ** 2).sum()), 1e-18)
        weights.append(0.5 * np.linalg.slogdet(inverse)[1] - 0.5 * (len(t) - 2) * np.log(squares))
        centres.append(float(there @ found))
        scales.append(math.sqrt(squares / degrees * (1 + float(there @ inverse @ there))))
    shares = np.exp(np.array(weights) - special.logsumexp(weights))
    middle, spread = np.array(centres), np.array(scales)

    def at_quantile(level: float) -> float:
        """The quantile of the mixture, between the outermost of its parts', by bisection."""
        ends = middle + spread * float(special.stdtrit(degrees, level))
        low, high = float(ends.min()), float(ends.max())
        for _ in range(60):
            half = (low + high) / 2
            below = float(shares @ special.stdtr(degrees, (half - middle) / spread))
            low, high = (half, high) if below < level else (low, half)
        return (low + high) / 2

    return Extrapolation(
        tokens=at,
        estimate=at_quantile(0.5),
        low=at_quantile(alpha / 2),
        high=at_quantile(1 - alpha / 2),
        readings=len(t),
    )


def extrapolations(search: Search, *, alpha: float = 0.1) -> pd.DataFrame:
    """Trials stopped or running, with five readings: number, run_id, status, tokens, estimate, low, high."""
    budget = int(search.parent.experiment.get("budget", {}).get("tokens", 0))
    open_trials = search.trials[search.trials["status"].isin([str(Status.PRUNED), "running"])]
    rows = []
    for trial in open_trials.itertuples():
        curve = search.curves[(search.curves["run_id"] == trial.run_id) & (search.curves["tokens"] > 0)]
        curve = curve[np.isfinite(curve["loss"])]
        if len(curve) < _LEAST_READINGS or curve["tokens"].max() >= budget:
            continue
        there = extrapolate(curve["tokens"].to_list(), curve["loss"].to_list(), budget, alpha=alpha)
        last = int(curve["tokens"].max())
        rows.append((trial.number, trial.run_id, trial.status, last, there.estimate, there.low, there.high))
    return pd.DataFrame(rows, columns=["number", "run_id", "status", "tokens", "estimate", "low", "high"])


def _sentence(early: pd.DataFrame, trusted: int, budget: int, wanted: float) -> str:
    if not len(early):
        return (
            f"How early the order can be trusted is not known: at no token count before the budget of {budget:,} have "
            f"{_FEWEST} finished trials a reading."
        )
    if trusted:
        row = early[early["tokens"] == trusted].iloc[0]
        return (
            f"The order can be trusted from {trusted:,} tokens on ({100 * row['share']:.0f} % of the budget): rank "
            f"correlation {row['correlation']:.2f} [{row['low']:.2f}, {row['high']:.2f}] with the final losses of "
            f"{int(row['n'])} finished trials. Trials stopped before the end are not among these."
        )
    row = early.iloc[-1]
    return (
        f"The order cannot be trusted before the whole budget: at {int(row['tokens']):,} tokens the rank correlation "
        f"is {row['correlation']:.2f} [{row['low']:.2f}, {row['high']:.2f}] over {int(row['n'])} finished trials, and "
        f"{wanted:g} is asked of its lower end."
    )
