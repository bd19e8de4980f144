"""What each choice was worth, alone and together with others, at equal tokens: intervals, counts and failures.

A mixed model (analysis.mixed) holds main effects and interactions at once. What is said of an option is the average
over the space, every option of the other choices counting alike, not over the trials, most of which lie where the
sampler went. Trials that were stopped before the token count enter with losses filled in (analysis.censoring); trials
that ended badly are no loss but a rate (analysis.failures). All of it is descriptive: the sampler chose the trials in
view of earlier losses. Between candidates, paired finals decide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis import curves
from analysis.censoring import FEWEST_ON, Filled, filled
from analysis.compare import number_text
from analysis.estimates import MainEstimate, Model, PairEstimate
from analysis.factors import FEWEST, Factor, factor
from analysis.failures import FailureRate, failure_rates
from analysis.frame import PARAM, Search, short_path
from analysis.importance import Importance, importances

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
class Interaction:
    """How much more an option is worth beside an option of another choice than beside that choice's reference."""

    path: str
    option: str
    reference: str
    other_path: str
    other_option: str
    other_reference: str
    estimate: float
    """Difference of two differences of the loss; below zero the two options are better together than apart."""
    low: float
    high: float
    n: int
    """Trials that hold both options."""
    fewest: int
    """Trials in the smallest of the four combinations."""
    claim: str
    """'better together', 'worse together', 'undecided' (the interval holds zero) or 'too few'."""

    @property
    def text(self) -> str:
        """For example: placement post instead of pre costs 0.05 more with ffn gelu than with relu."""
        verb = "costs" if self.estimate > 0 else "saves"
        change = f"{short_path(self.path)} {self.option} instead of {self.reference}"
        beside = f"{short_path(self.other_path)} {self.other_option} than with {self.other_reference}"
        return f"{change} {verb} {number_text(abs(self.estimate))} more with {beside}"


@dataclass(frozen=True, kw_only=True)
class Effects:
    """All main effects and interactions of a search."""

    tokens: int
    """Training tokens at which losses are compared; 0 when there was nothing to compare."""
    unit: str
    n: int
    alpha: float
    """The chance that any interval of main effects would miss, were the trials drawn at random; so for interactions."""
    rows: tuple[Effect, ...]
    interactions: tuple[Interaction, ...]
    importances: tuple[Importance, ...]
    censored: int
    """Trials that were stopped before these tokens; their losses are filled in from what they showed."""
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
            "censored": self.censored,
            "effects": [_plain(row) for row in self.rows],
            "interactions": [_plain(row) for row in self.interactions],
            "importances": [_plain(row) for row in self.importances],
            "failures": [row.to_json() for row in self.failures],
        }


def main_effects(search: Search, *, alpha: float = ALPHA, tokens: int = 0) -> Effects:
    """The effects of all varied choices, alone and in pairs, on the loss after so many tokens (0: see common_tokens).

    Intervals of main effects are widened for their number, as if they were to hold together at 1 - alpha; those of
    interactions likewise.
    """
    at = tokens or curves.common_tokens(search)
    trials, factors, losses = _outcomes(search, at, as_asked=bool(tokens))
    model = Model(factors, losses.outcomes) if len(trials) > 2 else None
    agreement, n_finished = curves.rank_agreement(search, at)
    return Effects(
        tokens=at,
        unit=search.unit,
        n=len(trials),
        alpha=alpha,
        rows=_mains(list(model.mains()), alpha) if model else (),
        interactions=_pairs(list(model.pairs()), alpha) if model else (),
        importances=importances(model, trials) if model else (),
        censored=int(losses.censored.sum()),
        failures=failure_rates(search, alpha),
        agreement=agreement,
        n_finished=n_finished,
        budget=int(search.parent.experiment.get("budget", {}).get("tokens", 0)),
    )


def effects_frame(effects: Effects) -> pd.DataFrame:
    """The main effects as a table: one row an option."""
    return pd.DataFrame([vars(row) for row in effects.rows], columns=list(Effect.__dataclass_fields__))


def interactions_frame(effects: Effects) -> pd.DataFrame:
    """The interactions as a table: one row a pair of options of two choices."""
    return pd.DataFrame([vars(row) for row in effects.interactions], columns=list(Interaction.__dataclass_fields__))


def importances_frame(effects: Effects) -> pd.DataFrame:
    """The importances as a table: one row a choice, the most important first."""
    return pd.DataFrame([vars(row) for row in effects.importances], columns=list(Importance.__dataclass_fields__))


def _outcomes(search: Search, tokens: int, *, as_asked: bool) -> tuple[pd.DataFrame, list[Factor], Filled]:
    """The trials that trained, the factors that vary among them, and their losses at so many tokens.

    Where too few went on to judge the others by, those that did not are left out, or refused as_asked.
    """
    readings = curves.readings_table(search)
    readings = readings[curves.up_to(readings, tokens).notna().any(axis=1)]
    if tokens and not as_asked and readings[tokens].notna().sum() < FEWEST_ON:
        readings = readings[readings[tokens].notna()]
    trials = search.trials[search.trials["run_id"].isin(readings.index)].reset_index(drop=True)
    baseline = search.baseline
    found = [
        factor(path, trials, None if baseline is None else baseline[PARAM + path], search.domains.get(path))
        for path in search.varied
        if len(trials)
    ]
    factors = [entry for entry in found if entry is not None]
    if not len(trials) or not tokens:
        nothing = np.empty(0)
        return trials.iloc[:0], [], Filled(outcomes=(nothing,), censored=nothing.astype(bool))
    return trials, factors, filled(readings.loc[trials["run_id"]], tokens, factors)


def _mains(found: Sequence[MainEstimate], alpha: float) -> tuple[Effect, ...]:
    spoken = [one for one in found if one.level.enough and one.contrast]
    rows = []
    for one in found:
        low, high, claim = float("nan"), float("nan"), "too few"
        if one.level.enough and one.contrast:
            low, high = one.contrast.interval(alpha / len(spoken))
            claim = "better" if high < 0 else "worse" if low > 0 else "undecided"
        rows.append(
            Effect(
                path=one.factor.path,
                option=one.level.label,
                reference=one.level.reference,
                estimate=one.contrast.estimate if one.contrast else float("nan"),
                low=low,
                high=high,
                n=one.level.n,
                n_reference=one.level.n_reference,
                claim=claim,
                adjusted_for=tuple(short_path(path) for path in one.adjusted_for),
            )
        )
    return tuple(rows)


def _pairs(found: Sequence[PairEstimate], alpha: float) -> tuple[Interaction, ...]:
    """All pairs of options that were tried together, the surest first, those of too few trials last."""
    spoken = [one for one in found if one.fewest >= FEWEST and one.contrast]
    rows = []
    for one in found:
        estimate, low, high, claim = float("nan"), float("nan"), float("nan"), "too few"
        if one.fewest >= FEWEST and one.contrast:
            estimate = one.contrast.estimate
            low, high = one.contrast.interval(alpha / len(spoken))
            claim = "better together" if high < 0 else "worse together" if low > 0 else "undecided"
        rows.append(
            Interaction(
                path=one.factors[0].path,
                option=one.levels[0].label,
                reference=one.levels[0].reference,
                other_path=one.factors[1].path,
                other_option=one.levels[1].label,
                other_reference=one.levels[1].reference,
                estimate=estimate,
                low=low,
                high=high,
                n=one.n,
                fewest=one.fewest,
                claim=claim,
            )
        )
    return tuple(sorted(rows, key=_unsure))


def _unsure(row: Interaction) -> float:
    """Interval width by size of the estimate; infinite where there is none."""
    return (row.high - row.low) / abs(row.estimate) if row.estimate and row.claim != "too few" else float("inf")


def _plain(row: Effect | Interaction | Importance) -> dict[str, Any]:
    plain = dict(vars(row))
    return {key: None if isinstance(value, float) and np.isnan(value) else value for key, value in plain.items()}


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value
