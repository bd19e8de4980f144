"""The data of the page's charts; analysis/report/charts.js draws them.

Kinds: `xy` (curves, clouds), `rows` (estimates with intervals), `grid` (cells). In an item, `l` is what hovering says,
`s` its short name, `g` its group under each choice of colour, `m` its mark, `e` how it ended badly; in a row, `l` is
its label, `e`, `lo`, `hi` the estimate and its interval, `d` single measurements, `c` the claim, `w` all in words.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis import diagnostics, landscape
from analysis.compare import interval_text
from analysis.diagnostics import Looked
from analysis.effects import Effects, Interaction
from analysis.frame import ENDED_BADLY, Search, short_path
from analysis.leaderboard import sampled, seed_spread
from analysis.pareto import front
from search_space.records import Metric, Stage

Chart = dict[str, Any]

MOST_CURVES = 250
MOST_READINGS = 60
"""Readings a curve is thinned to."""
MOST_POINTS = 1500
_MOST_COLOURS = 8
"""Choices that the reader can colour by."""
_EQUAL_COST = 1.02
MEASURES = {
    Metric.PARAMS: ("parameters", "min"),
    Metric.FLOPS: ("forward FLOPs/token", "min"),
    Metric.STATE_BYTES: ("state bytes/token", "min"),
    Metric.TOKENS_PER_SECOND: ("training tokens/s (more is better)", "max"),
    Metric.PEAK_BYTES: ("peak bytes", "min"),
    Metric.SECONDS: ("seconds of a training", "min"),
}


def seed_note(search: Search) -> str:
    """What the bars on single seeds are."""
    spread, degrees = seed_spread(search)
    if not degrees:
        return "One seed each; no candidate was trained on two seeds, so how far seeds lie apart is not known."
    width = landscape.seed_width(spread, degrees)
    return f"One seed each; bars: ±{width:.3f}, the 95 % interval of one seed ({degrees} degrees of freedom, finals)."


def curves_chart(search: Search) -> Chart:
    """Validation loss against training tokens of every trial, or of the best and an even sample of the others."""
    begun = search.curves[(search.curves["tokens"] > 0) & (search.curves["stage"] == Stage.SEARCH)]
    begun = begun[np.isfinite(begun["loss"])]
    trials = sampled(search.trials[search.trials["run_id"].isin(begun["run_id"].unique())], MOST_CURVES)
    readings = dict(list(begun[begun["run_id"].isin(trials["run_id"])].groupby("run_id")))
    items = _items(search, trials)
    for item, run_id in zip(items, trials["run_id"], strict=True):
        held = readings[run_id]
        places = np.unique(np.linspace(0, len(held) - 1, min(len(held), MOST_READINGS)).round().astype(int))
        item["p"] = [[int(t), float(y)] for t, y in held[["tokens", "loss"]].iloc[places].itertuples(index=False)]
        item["e"] = "bad" if item["e"] else ""
    bigram = search.parent.bigram_loss
    return {
        "kind": "xy",
        "lines": True,
        "label": f"Validation loss against training tokens of {len(items)} trials",
        "x": [{"label": "training tokens", "zero": True}],
        "y": f"validation loss ({search.unit})",
        "by": ["status", *map(short_path, _colours(search))],
        "items": items,
        "error": _seed_width(search),
        "levels": [] if bigram is None else [{"y": bigram, "label": f"bigram model {bigram:.3f}"}],
    }


def rates_chart(search: Search) -> Chart:
    """Loss at equal tokens against the learning rate, by variant; what ended badly stands at the top."""
    outcome, tokens = landscape.losses(search)
    paths = landscape.rates(search)
    ended = search.trials["status"].isin(ENDED_BADLY) | search.trials["run_id"].isin(outcome.index)
    trials = sampled(search.trials[ended], MOST_POINTS)
    items = _items(search, trials)
    places = [trials[f"param/{path}"].astype(float).tolist() for path in paths]
    losses = outcome.reindex(trials["run_id"]).tolist()
    for item, loss, *at in zip(items, losses, *places, strict=True):
        item["x"] = list(map(_number, at))
        item["y"] = None if item["e"] else loss
        item["m"] = "" if item["m"] == "best" else item["m"]
    groups = {path: values for path, values in search.options.items() if path in _colours(search)}
    whole = search.trials.set_index("run_id")[f"param/{paths[0]}"].astype(float)
    fits = [landscape.rate_fits(whole, outcome, values) for values in groups.values()] if len(paths) == 1 else []
    kinds = [k for k, path in enumerate(_colours(search), 1) if path.endswith(".kind")]
    return {
        "kind": "xy",
        "label": f"Validation loss at {tokens:,} tokens against the learning rate of {len(items)} trials",
        "x": [{"label": short_path(path).replace("_", " "), "log": True} for path in paths],
        "y": f"validation loss at {tokens:,} tokens ({search.unit})",
        "by": ["status", *map(short_path, _colours(search))],
        "picked": kinds[0] if kinds else 0,
        "items": items,
        "fits": [{}, *fits],
        "error": 0,
        "levels": [],
    }


def front_chart(search: Search) -> Chart:
    """Final loss against each cost that was measured, with the trials that no other betters in both."""
    done = sampled(search.finished, MOST_POINTS).reset_index(drop=True)
    names = [name for name in MEASURES if name in done and done[name].notna().any()]
    items = _items(search, done)
    for item, loss, *costs in zip(items, done[Metric.LOSS], *(done[name] for name in names), strict=True):
        item |= {"x": [_number(cost) for cost in costs], "y": float(loss)}
    equal = {name: bool(done[name].max() <= _EQUAL_COST * done[name].min()) for name in names}
    fronts, axes = [], []
    for name in names:
        words, direction = MEASURES[name]
        fronts.append([] if equal[name] else front(done, {name: direction, Metric.LOSS: "min"}).index.tolist())
        why = "equal by design, " if name in search.parent.experiment.get("size", {}) else "equal "
        axes.append(
            {
                "label": f"{words} ({why}within {_EQUAL_COST - 1:.0%})" if equal[name] else words,
                "log": bool(done[name].max() > 3 * max(done[name].min(), 1)),
            }
        )
    return {
        "kind": "xy",
        "label": f"Final validation loss against cost of {len(items)} finished trials",
        "x": axes,
        "y": f"final validation loss ({search.unit})",
        "by": ["status", *map(short_path, _colours(search))],
        "items": items,
        "fronts": fronts,
        "across": next((place for place, name in enumerate(names) if not equal[name]), 0),
        "error": _seed_width(search),
        "levels": [],
    }


def interactions_chart(effects: Effects) -> Chart:
    """What options are worth together beyond what each is worth alone, a map for each pair of choices."""
    by_pair: dict[tuple[str, str], list[Interaction]] = {}
    for row in effects.interactions:
        by_pair.setdefault((row.path, row.other_path), []).append(row)
    views = []
    for (path, other), held in by_pair.items():
        if all(row.claim == "too few" for row in held):
            continue
        lines = list(dict.fromkeys(f"{row.option} vs {row.reference}" for row in held))
        columns = list(dict.fromkeys(f"{row.other_option} vs {row.other_reference}" for row in held))
        empty = [[""] * len(columns) for _ in lines]
        view: dict[str, Any] = {
            "name": f"{short_path(path)} × {short_path(other)}",
            "rows": lines,
            "columns": columns,
            "across": short_path(other),
            "cells": [[None] * len(columns) for _ in lines],
            "notes": [list(line) for line in empty],
            "counts": [list(line) for line in empty],
        }
        for row in held:
            k = lines.index(f"{row.option} vs {row.reference}")
            j = columns.index(f"{row.other_option} vs {row.other_reference}")
            told = row.claim != "too few"
            view["cells"][k][j] = row.estimate if told else None
            bounds = f"interval {interval_text(row.low, row.high)}, " if told else ""
            view["notes"][k][j] = f"{bounds}n={row.n}, smallest of the four cells {row.fewest}: {row.claim}"
            view["counts"][k][j] = f"n={row.n}" + (f" ±{(row.high - row.low) / 2:.2g}" if told else "")
        views.append(view)
    unit = f"interaction ({effects.unit}):"
    return {"kind": "grid", "label": "Interactions", "pick": "choices", "unit": unit, "diverging": True, "views": views}


def pairs_chart(search: Search) -> Chart:
    """Mean loss of the trials with two options at once, for each pair of choices."""
    views = []
    for cells in landscape.pairs(search):
        notes = [
            [
                "no trial" if not n else f"n={n}, 95 % interval {_interval(mean, width)}"
                for mean, width, n in zip(*line, strict=True)
            ]
            for line in zip(cells.mean, cells.width, cells.n, strict=True)
        ]
        counts = [
            [f"n={n}" + ("" if math.isnan(width) else f" ±{width:.2g}") for width, n in zip(*line, strict=True)]
            for line in zip(cells.width, cells.n, strict=True)
        ]
        views.append(
            {
                "name": cells.name,
                "rows": cells.rows,
                "columns": cells.columns,
                "across": short_path(cells.other),
                "cells": cells.mean.tolist(),
                "notes": notes,
                "counts": counts,
            }
        )
    unit = f"difference from the mean of all ({search.unit}):"
    return {
        "kind": "grid",
        "label": "Two choices at a time",
        "pick": "choices",
        "unit": unit,
        "diverging": True,
        "views": views,
    }


def inside_chart(shown: Sequence[Looked]) -> Chart:
    """What checkups saw in the best trials, a map at a time."""
    views = []
    for trial in shown:
        for name, one in zip(diagnostics.MAPS, diagnostics.maps(trial), strict=True):
            if np.isfinite(one.values).any():
                positive = bool((one.values[np.isfinite(one.values)] > 0).all())
                views.append(
                    {
                        "name": f"{trial.run}: {name}",
                        "rows": [row if row.isalpha() else f"layer {row}" for row in one.rows],
                        "columns": one.columns,
                        "across": one.across,
                        "cells": one.values.tolist(),
                        "log": positive and not name.startswith("entropy"),
                    }
                )
    return {"kind": "grid", "label": "Inside the best trials", "pick": "map", "unit": "", "views": views}


def _items(search: Search, trials: pd.DataFrame) -> list[dict[str, Any]]:
    """One a trial: its names, its group under every colouring, its mark, and how it ended where that was badly."""
    groups = [search.options[path].reindex(trials["run_id"]) for path in _colours(search)]
    best = search.finished["run_id"].iloc[0] if len(search.finished) else ""
    columns = trials["run_id"], trials["number"], trials["status"], trials["is_baseline"]
    items = []
    for run_id, number, status, is_baseline, *held in zip(*columns, *groups, strict=True):
        said = str(status).replace("_", " ")
        items.append(
            {
                "l": f"{search.name}/{number}, {said}\n{search.described[run_id]}",
                "s": f"#{number}",
                "g": [str(status), *map(str, held)],
                "m": "best" if run_id == best else "baseline" if is_baseline else "",
                "e": said if status in ENDED_BADLY else "",
            }
        )
    return items


def _colours(search: Search) -> list[str]:
    return list(search.options)[:_MOST_COLOURS]


def _seed_width(search: Search) -> float:
    return landscape.seed_width(*seed_spread(search))


def _interval(mean: float, width: float) -> str:
    return "not known from one trial" if math.isnan(width) else interval_text(mean - width, mean + width)


def _number(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else float(value)
