"""Losses at equal tokens of trials that were stopped before: filled in from what they showed, many times over.

A pruner stops a trial for its readings, so what is missing depends on nothing that was not seen ("missing at random",
Rubin 1976). Step by step from one token count at which trials stop to the next, the loss is predicted from the last one
and from the choices, with the coefficients and the scatter drawn anew for each imputation (Rubin 1987, chapter 5). Left
out, the stopped trials would make bad options look better than they are: only their lucky trials would be seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd

from analysis import curves
from analysis.factors import Factor
from analysis.mixed import Columns, Fit
from analysis.support import Groups
from search_space.errors import UserError

IMPUTATIONS = 20
FEWEST_ON = 8
"""Trials that went on past a token count, at least, for the others to be judged by them."""


@dataclass(frozen=True, kw_only=True)
class Filled:
    """Outcomes of all trials, one array an imputation; a single one when nothing was missing."""

    outcomes: tuple[np.ndarray, ...]
    censored: np.ndarray
    """True for trials that were stopped before."""


def filled(
    readings: pd.DataFrame, tokens: int, factors: Sequence[Factor], *, draws: int = IMPUTATIONS, seed: int = 0
) -> Filled:
    """The losses at so many tokens, from a table of one row a trial and one column a token count, NaN where stopped.

    Each row has a reading at or before these tokens.
    """
    table = curves.up_to(readings, tokens).interpolate(axis=1, limit_area="inside").bfill(axis=1)
    known = table.to_numpy(dtype=float)
    marks = table.columns.to_numpy(dtype=int)
    censored = np.isnan(known[:, -1])
    if not censored.any():
        return Filled(outcomes=(known[:, -1],), censored=censored)
    last = np.array([np.flatnonzero(~np.isnan(row))[-1] for row in known])
    stops = [*sorted(set(last[censored])), len(marks) - 1]
    rng = np.random.default_rng(seed)
    completed = [known.copy() for _ in range(draws)]
    for before, after in pairwise(stops):
        on = ~np.isnan(known[:, after])
        if on.sum() < FEWEST_ON:
            raise UserError(
                f"losses at {tokens:,} tokens: only {int(on.sum())} trials went on past {marks[before]:,} tokens, "
                f"{FEWEST_ON} are needed to judge the others by; ask for at most {marks[before]:,}"
            )
        _step(known, completed, (before, after), on, factors, rng)
    return Filled(outcomes=tuple(table[:, -1] for table in completed), censored=censored)


def _step(
    known: np.ndarray,
    completed: Sequence[np.ndarray],
    places: tuple[int, int],
    on: np.ndarray,
    factors: Sequence[Factor],
    rng: np.random.Generator,
) -> None:
    """Fill in the loss at the second place from that at the first, each imputation with its own draw of the rule."""
    before, after = places
    lacking = np.isnan(completed[0][:, after])
    groups = [entry.columns for entry in factors]
    here = known[on, before]
    middle = here.mean()
    free = np.column_stack([np.ones(len(here)), here - middle])
    own = [columns[on] for columns in groups]
    outcome = known[on, after] - known[on, after].mean()
    kept = Groups(free=free, columns=own, outcome=outcome, prices=[0.0] * len(own)).supported()
    ratios = [np.full(own[place].shape[1], ratio) for place, ratio in kept.items()]
    held = Columns(
        free=free,
        drawn=np.hstack([own[place] for place in kept]) if kept else np.empty((len(here), 0)),
        ratios=np.concatenate(ratios) if ratios else np.empty(0),
    )
    fit = Fit(columns=held, outcome=known[on, after])
    root = np.linalg.cholesky(held.inverse)
    beside = [groups[place][lacking] for place in kept]
    for table in completed:
        variance = fit.variance * held.degrees / rng.chisquare(held.degrees)
        rule = fit.coefficients + variance**0.5 * (root @ rng.standard_normal(len(root)))
        design = np.column_stack([np.ones(int(lacking.sum())), table[lacking, before] - middle, *beside])
        table[lacking, after] = design @ rule + variance**0.5 * rng.standard_normal(len(design))
