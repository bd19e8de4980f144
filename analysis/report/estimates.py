"""The data of the charts of estimates: a row each, with its interval and what it rests on."""

import math
from collections.abc import Sequence
from typing import Any

from analysis import landscape
from analysis.compare import interval_text, number_text
from analysis.effects import Effects
from analysis.frame import ENDED_BADLY, NOT_LIVE, Search, short_path
from analysis.plots import finals_label
from analysis.report.charts import Chart
from analysis.verdicts import Contrast
from search_space.records import Status

MOST_ROWS = 60
_MOST_OPTIONS = 15


def finals_chart(search: Search, found: Sequence[Contrast], axis: str) -> Chart:
    """Each contrast: its pairs of seeds, their mean, and the interval that holds however often one looked."""
    rows = []
    for contrast in found:
        verdict = contrast.verdict
        sign = -1 if verdict.kind == "worse" else 1
        ends = sorted((sign * verdict.low, sign * verdict.high))
        rows.append(
            {
                "l": finals_label(contrast).split("\n")[1],
                "c": "better" if verdict.kind == "worse" else verdict.kind,
                "e": sign * verdict.estimate,
                "lo": ends[0],
                "hi": ends[1] if math.isfinite(ends[0]) else None,
                "d": [sign * float(value) for value in contrast.pairs["difference"]],
                "w": f"{contrast.name}\n{contrast.text}",
            }
        )
    return {"kind": "rows", "label": f"Paired finals of {search.name}", "x": axis, "rows": rows}


def effects_chart(effects: Effects) -> Chart:
    """Every effect with its interval and counts; where they are too many, the decided and largest ones."""
    spoken = [row for row in effects.rows if row.claim != "too few"]
    order = sorted(spoken, key=lambda row: (row.claim not in ("better", "worse"), -abs(row.estimate)))
    kept = set(map(id, order[:MOST_ROWS]))
    rows = [
        {
            "l": f"{short_path(row.path)}: {row.option} vs {row.reference} (n={row.n}, {row.n_reference})",
            "c": row.claim,
            "e": row.estimate,
            "lo": row.low,
            "hi": row.high,
            "w": f"{short_path(row.path)}: {row.option} against {row.reference}\n{number_text(row.estimate)} "
            f"{effects.unit} {interval_text(row.low, row.high)}\n{row.n} trials against {row.n_reference}: {row.claim}",
        }
        for row in spoken
        if id(row) in kept
    ]
    axis = f"difference of validation loss ({effects.unit}); left is better"
    return {"kind": "rows", "label": f"{len(rows)} effects", "x": axis, "rows": rows, "legend": True}


def endings_chart(search: Search) -> Chart:
    """The share of each ending."""
    counts, total = search.trials["status"].value_counts(), len(search.trials)
    rows = [_share_row(str(status).replace("_", " "), int(n), total, str(status)) for status, n in counts.items()]
    return {"kind": "rows", "share": True, "label": "How the trials ended", "x": "share of the trials", "rows": rows}


def failures_chart(search: Search) -> Chart:
    """The share of trials that ended badly with each option, most first; {} where none did."""
    ended = search.trials[search.trials["status"].isin((Status.OK, Status.PRUNED, *ENDED_BADLY))]
    bad = ended.set_index("run_id")["status"].isin(ENDED_BADLY)
    rows = []
    for path, values in search.options.items() if bad.any() else ():
        for option, part in bad.groupby(values.reindex(bad.index)):
            if option != NOT_LIVE and part.any():
                rows.append(
                    _share_row(f"{short_path(path)} {option}", int(part.sum()), len(part), str(Status.DIVERGED))
                )
    rows.sort(key=lambda row: -row["lo"])
    axis = "share of the trials that ended badly"
    return {"kind": "rows", "share": True, "label": axis, "x": axis, "rows": rows[:_MOST_OPTIONS]} if rows else {}


def _share_row(label: str, hits: int, n: int, colour: str) -> dict[str, Any]:
    low, high = landscape.share_interval(hits, n)
    words = f"{label}: {hits} of {n}\n95 % interval {low:.0%} to {high:.0%}"
    return {"l": f"{label} ({hits} of {n})", "c": colour, "e": hits / n, "lo": low, "hi": high, "w": words}
