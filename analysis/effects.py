"""What each choice was worth: an additive model of the loss at equal tokens, with intervals, counts and failures.

All of it is descriptive: an adaptive sampler chose the trials in view of earlier losses, and the covariates are picked
on the same data, so an interval may miss more often than its level says. Between candidates, paired finals decide.

Pruned trials enter at the last token count that nearly all trained trials reached, so that nothing is compared at
unequal budgets; trials that ended badly are no loss but a rate. Each factor is estimated with as many of the other
factors beside it as the number of trials bears.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis import curves, regression
from analysis.factors import FEWEST, Factor, Level, factor
from analysis.frame import ENDED_BADLY, PARAM, TRAINED, Search, short_path, short_value

ALPHA = 0.05
STEADY = 0.6
"""Spearman correlation with the final loss under which an early order is called unsteady."""
ENOUGH_FINISHED = 8
"""Finished trials under which such a correlation says little."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The worth of one option against the reference option, or of a high value against a low one."""

    path: str
    option: str
    reference: str
    estimate: float
    """Difference of the loss, option minus reference, other choices being equal; below zero is better."""
    low: float
    high: float
    n: int
    n_reference: int
    claim: str
    """'better', 'worse', 'undecided' (the interval holds zero) or 'too few' (under three trials on one side)."""
    adjusted_for: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FailureRate:
    """How often trials with one option ended badly."""

    path: str
    option: str
    n: int
    counts: dict[str, int]
    """Trials by status, of those that ended badly."""
    claim: str
    """'more' or 'less' often than the other trials, or 'undecided'."""

    @property
    def text(self) -> str:
        """For example: diverged 3 of 9 with placement post."""
        counts = ", ".join(f"{status.replace('_', ' ')} {count}" for status, count in self.counts.items())
        return f"{counts} of {self.n} with {short_path(self.path)} {self.option}"


@dataclass(frozen=True, kw_only=True)
class Effects:
    """All main effects of a search."""

    tokens: int
    """Training tokens at which losses are compared; 0 when there was nothing to compare."""
    unit: str
    n: int
    alpha: float
    """The chance that any interval of the table would miss, were the trials drawn at random and the model given."""
    rows: tuple[Effect, ...]
    failures: tuple[FailureRate, ...]
    agreement: float
    """Spearman correlation with the final loss over the trials that trained to the end; NaN when there are under 3."""
    n_finished: int
    budget: int
    """Training tokens of a whole trial; 0 when the store lost the experiment."""

    @property
    def early(self) -> str:
        """How early the losses were compared, where that is before half of the budget; else empty."""
        if not 0 < 2 * self.tokens < self.budget:
            return ""
        parts = self.budget / self.tokens
        share = f"1/{parts:.0f}" if abs(parts - round(parts)) < 0.05 else f"{100 / parts:.0f} %"
        return f"early: at {share} of the budget"

    @property
    def warning(self) -> str:
        """Why the order at these tokens may not be the final one; empty where it is known to be."""
        if not self.rows or self.tokens >= self.budget > 0:
            return ""
        if np.isnan(self.agreement):
            return f"nothing shows that this order lasts: {self.n_finished} finished trials give no correlation"
        if self.agreement >= STEADY and self.n_finished >= ENOUGH_FINISHED:
            return ""
        why = "too few to trust" if self.n_finished < ENOUGH_FINISHED else "low"
        return (
            f"this order may not last: Spearman {self.agreement:.2f} with the final loss over {self.n_finished} "
            f"finished trials, {why}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data; what has no number is null."""
        return {
            "tokens": self.tokens,
            "unit": self.unit,
            "n": self.n,
            "alpha": self.alpha,
            "spearman_with_final": _number(self.agreement),
            "n_finished": self.n_finished,
            "budget": self.budget,
            "early": self.early,
            "warning": self.warning,
            "effects": [
                {**vars(row), "estimate": _number(row.estimate), "low": _number(row.low), "high": _number(row.high)}
                for row in self.rows
            ],
            "failures": [{**vars(row), "text": row.text} for row in self.failures],
        }


def main_effects(search: Search, *, alpha: float = ALPHA) -> Effects:
    """The effect of every varied choice on the loss at equal tokens: descriptive, since the sampler chose the trials.

    The intervals are widened for their number, as if they were to hold together at 1 - alpha.
    """
    tokens = curves.common_tokens(search)
    outcome = curves.loss_at(search, tokens)
    trials = search.trials[search.trials["run_id"].isin(outcome.index)].reset_index(drop=True)
    losses = outcome.loc[trials["run_id"]].to_numpy(dtype=float)
    baseline = search.baseline
    found = [
        factor(path, trials, None if baseline is None else baseline[PARAM + path])
        for path in search.varied
        if len(trials)
    ]
    factors = [entry for entry in found if entry is not None]
    claims = sum(level.enough for entry in factors for level in entry.levels)
    estimated = {entry.path: _effects(entry, factors, losses, alpha / max(claims, 1)) for entry in factors}
    agreement, n_finished = curves.rank_agreement(search, tokens)
    return Effects(
        tokens=tokens,
        unit=search.unit,
        n=len(trials),
        alpha=alpha,
        rows=tuple(row for path in search.varied for row in estimated.get(path, ())),
        failures=_failures(search, alpha),
        agreement=agreement,
        n_finished=n_finished,
        budget=int(search.parent.experiment.get("budget", {}).get("tokens", 0)),
    )


def _effects(target: Factor, factors: Sequence[Factor], losses: np.ndarray, alpha: float) -> list[Effect]:
    """The levels of one factor, the others held equal as far as the trials bear it."""
    design = np.column_stack([np.ones(len(losses)), target.columns])
    basis = regression.extended(np.full((len(losses), 1), len(losses) ** -0.5), target.columns)
    if basis is None or len(losses) <= design.shape[1]:
        return [_said(target, level, (float("nan"),) * 3, ()) for level in target.levels]
    parents = [entry for entry in factors if _is_parent(entry, target)]
    others = [entry for entry in factors if entry is not target and entry not in parents]
    held_equal = []
    for parent in parents:
        wider = regression.extended(basis, parent.columns)
        if wider is not None and wider.shape[1] < len(losses):
            basis = wider
            held_equal.append(parent)
    design, picked = regression.chosen(
        [target.columns, *(parent.columns for parent in held_equal)],
        [other.columns for other in others],
        losses - losses.mean(),
    )
    held_equal += [others[place] for place in picked]
    adjusted = [short_path(entry.path) for entry in held_equal]
    fit = regression.fit(design, losses)
    own = target.columns.shape[1]
    rows = []
    for level in target.levels:
        weights = np.zeros(design.shape[1])
        weights[1 : 1 + own] = level.weights
        rows.append(_said(target, level, fit.contrast(weights, alpha), tuple(adjusted)))
    return rows


def _is_parent(entry: Factor, target: Factor) -> bool:
    """True when `entry` is the family whose choice makes `target` live."""
    if entry is target or not entry.path.endswith(".kind"):
        return False
    return target.path.startswith(entry.path.removesuffix("kind"))


def _said(target: Factor, level: Level, numbers: tuple[float, ...], adjusted: tuple[str, ...]) -> Effect:
    estimate, low, high = numbers
    if not level.enough or np.isnan(estimate):
        low, high, claim = float("nan"), float("nan"), "too few"
    else:
        claim = "better" if high < 0 else "worse" if low > 0 else "undecided"
    return Effect(
        path=target.path,
        option=level.label,
        reference=level.reference,
        estimate=estimate,
        low=low,
        high=high,
        n=level.n,
        n_reference=level.n_reference,
        claim=claim,
        adjusted_for=adjusted,
    )


def _failures(search: Search, alpha: float) -> tuple[FailureRate, ...]:
    """Options and halves of ranges with which trials ended badly more often, or surely less, most telling first."""
    ended = search.trials[search.trials["status"].isin((*TRAINED, *ENDED_BADLY))]
    bad = ended["status"].isin(ENDED_BADLY)
    groups: list[tuple[str, str, pd.Series, pd.Series]] = []
    for path in search.varied if bad.any() else ():
        groups += [(path, *group) for group in _groups(ended[PARAM + path])]
    rates: list[tuple[float, FailureRate]] = []
    for path, option, inside, outside in groups:
        n, hits = int(inside.sum()), int((bad & inside).sum())
        rest, rest_hits = int(outside.sum()), int((bad & outside).sum())
        if not hits or not rest:
            continue
        chance = regression.fisher(hits, n, rest_hits, rest)
        decided = min(n, rest) >= FEWEST and chance < alpha / len(groups)
        more = hits * rest > rest_hits * n
        if not (more or decided):
            continue
        claim = "undecided" if not decided else "more" if more else "less"
        seen = {str(status): int(count) for status, count in ended[bad & inside]["status"].value_counts().items()}
        rates.append((chance, FailureRate(path=path, option=option, n=n, counts=seen, claim=claim)))
    return tuple(rate for _, rate in sorted(rates, key=lambda entry: entry[0]))


def _groups(values: pd.Series) -> list[tuple[str, pd.Series, pd.Series]]:
    """(label, inside, outside among the live) for each option, or for the halves of a range."""
    live = values.notna()
    seen = values[live]
    if seen.nunique() < 2:
        return []
    if seen.nunique() > FEWEST + 1 and not isinstance(seen.iloc[0], str | bool):
        middle = float(seen.astype(float).median())
        above = live & (values.where(live, middle).astype(float) > middle)
        return [(f"> {short_value(middle)}", above, live & ~above), (f"≤ {short_value(middle)}", live & ~above, above)]
    return [(short_value(option), live & (values == option), live & (values != option)) for option in seen.unique()]


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value
