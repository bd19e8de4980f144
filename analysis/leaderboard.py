"""The trials of a search in the order of what is known of them, with the difference to the baseline."""

import math

import numpy as np
import pandas as pd

from analysis.frame import ENDED_BADLY, PARAM, Search, short_path
from search_space.records import Metric, Stage, Status

_RANK = {str(Status.OK): 0, str(Status.PRUNED): 1}
_ALWAYS_TOLD = ("model.mixer.kind", "model.position.kind")
_COSTS = (Metric.PARAMS, Metric.FLOPS, Metric.STATE_BYTES, Metric.TOKENS_PER_SECOND, Metric.PEAK_BYTES, Metric.SECONDS)


def leaderboard(search: Search) -> pd.DataFrame:
    """One row a search trial: finished trials by loss, then pruned ones by how far they came, then the others.

    Columns: run, number, what, status, reason, loss (the last reading where the trial was cut short), tokens,
    difference (to the baseline, finished trials only), is_baseline, and the cost measures that were recorded.
    """
    trials = search.trials
    last = search.curves.groupby("run_id")[["tokens", "loss"]].last()
    board = pd.DataFrame(
        {
            "run": [f"{search.name}/{number}" for number in trials["number"]],
            "number": trials["number"],
            "what": trials["run_id"].map(search.described),
            "status": trials["status"],
            "reason": trials["reason"],
            "loss": trials[Metric.LOSS].fillna(trials["run_id"].map(last["loss"])),
            "tokens": trials[Metric.TOKENS].fillna(trials["run_id"].map(last["tokens"])),
            "is_baseline": trials["is_baseline"],
        }
    )
    baseline = search.baseline
    level = math.nan if baseline is None or baseline["status"] != Status.OK else float(baseline[Metric.LOSS])
    board["difference"] = np.where(trials["status"] == Status.OK, board["loss"] - level, math.nan)
    for cost in _COSTS:
        if cost in trials:
            board[cost] = trials[cost]
    keys = pd.DataFrame(
        {
            "rank": board["status"].map(_RANK).fillna(2 + board["status"].isin(ENDED_BADLY)),
            "cut": np.where(board["status"] == Status.PRUNED, -board["tokens"].fillna(0), 0),
            "loss": board["loss"].fillna(math.inf),
            "number": board["number"],
        }
    )
    return board.loc[keys.sort_values(["rank", "cut", "loss", "number"]).index].reset_index(drop=True)


def common_text(search: Search) -> str:
    """What all trials share of what the file let vary or set otherwise than usual, and a mixer or position for all."""
    trials = search.trials
    values = {
        path: trials[PARAM + path].iloc[0]
        for path in dict.fromkeys((*_ALWAYS_TOLD, *sorted(search.open_families), *sorted(search.usual_kinds)))
        if PARAM + path in trials and trials[PARAM + path].notna().all() and trials[PARAM + path].nunique() == 1
    }
    told = [
        f"{short_path(path)} {value}"
        for path, value in values.items()
        if path in _ALWAYS_TOLD or path in search.open_families or value != search.usual_kinds[path]
    ]
    return f"Common to all: {', '.join(told)}." if told else ""


def seed_spread(search: Search) -> tuple[float, int]:
    """Standard deviation of the final loss between seeds of one candidate, pooled over the finals, and its degrees.

    NaN and 0 when no candidate has two finished replicas.
    """
    done = search.frame[(search.frame["stage"] == Stage.FINAL) & (search.frame["status"] == Status.OK)]
    trained = done.drop_duplicates("spec_id")
    groups = [group[Metric.LOSS].dropna().to_numpy() for _, group in trained.groupby("point_id")]
    degrees = sum(len(group) - 1 for group in groups if len(group) > 1)
    if not degrees:
        return math.nan, 0
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
    return math.sqrt(squares / degrees), degrees


def lead_text(search: Search) -> str:
    """What one may say of the best trial against the next: one seed decides nothing within the spread of seeds."""
    best = search.finished
    if len(best) < 2:
        return "Fewer than two trials finished: there is nothing to order."
    lead = float(best[Metric.LOSS].iloc[1] - best[Metric.LOSS].iloc[0])
    names = [f"{search.name}/{number}" for number in best["number"].iloc[:2]]
    head = f"{names[0]} leads {names[1]} by {lead:.3f} {search.unit} on one seed each"
    spread, degrees = seed_spread(search)
    if not degrees:
        return f"{head}; no final tells how far seeds lie apart, so this order is undecided."
    rule = "within" if lead < 2 * math.sqrt(2) * spread else "beyond"
    close = "undecided" if rule == "within" else "likely, but a paired final has to say"
    return f"{head}, {rule} what seeds alone do (deviation {spread:.3f}, {degrees} degrees of freedom): {close}."


def sampled(trials: pd.DataFrame, most: int) -> pd.DataFrame:
    """All trials, or where they are too many the best, the baseline and an even sample of the others, by loss."""
    if len(trials) <= most:
        return trials
    order = trials.sort_values(Metric.LOSS, na_position="last", kind="stable")
    rest = np.linspace(most // 3, len(order) - 1, most - most // 3).round().astype(int)
    return order.iloc[np.unique([*range(most // 3), *rest, *np.flatnonzero(order["is_baseline"])])]
