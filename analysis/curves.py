"""Learning curves compared at equal tokens."""

import numpy as np
import pandas as pd

from analysis.frame import Search
from search_space.records import Metric

_ENOUGH = 0.9
"""Share of the trained trials that must have reached a token count before outcomes are compared there."""


def common_tokens(search: Search) -> int:
    """The largest token count at which 90 % of the ok and pruned trials have a reading; 0 when there is none."""
    readings = search.readings
    counts = readings.groupby("tokens")["run_id"].nunique()
    wanted = _ENOUGH * readings["run_id"].nunique()
    reached = counts[counts >= wanted]
    return int(reached.index.max()) if len(reached) else 0


def loss_at(search: Search, tokens: int) -> pd.Series:
    """Validation loss after exactly so many training tokens, by run id, for ok and pruned search trials."""
    readings = search.readings
    return readings[readings["tokens"] == tokens].set_index("run_id")["loss"]


def readings_table(search: Search) -> pd.DataFrame:
    """Validation losses of ok and pruned search trials: a row a run id, a column a token count, NaN where stopped."""
    readings = search.readings
    return readings.pivot_table(index="run_id", columns="tokens", values="loss", aggfunc="last", sort=True)


def up_to(readings: pd.DataFrame, tokens: int) -> pd.DataFrame:
    """The columns of a table of readings up to a token count."""
    return readings.loc[:, readings.columns.to_numpy(dtype=float) <= tokens]


def rank_agreement(search: Search, tokens: int) -> tuple[float, int]:
    """Spearman correlation of the loss at a token count with the final loss, and over how many finished trials."""
    final = search.finished.set_index("run_id")[Metric.LOSS]
    both = pd.concat([loss_at(search, tokens), final], axis=1, join="inner").dropna()
    if len(both) < 3 or (both.nunique() < 2).any():
        return float("nan"), len(both)
    ranks = both.rank()
    return float(np.corrcoef(ranks.iloc[:, 0], ranks.iloc[:, 1])[0, 1]), len(both)
