"""The leaderboard as it stands in Markdown, and the whole of it as it stands on the page."""

import math
from typing import Any

import pandas as pd

from analysis import text
from analysis.compare import number_text
from analysis.frame import Search
from analysis.leaderboard import leaderboard
from analysis.report.charts import seed_note
from analysis.report.document import Board, Cell, Table
from analysis.tables import quantity
from search_space.records import Metric, Status

_TOP = 15
MOST_ROWS = 500


def board(search: Search) -> Board:
    """The best trials in brief, and all of them with what they cost."""
    header, rows = text.leaderboard_rows(search, _TOP)
    replays = [[*row, f"`assay replay {row[1]}`"] for row in rows]
    note = _shown(search, len(rows))
    brief = Table(header=[*header, "replay"], rows=replays, name="Leaderboard", note=note)
    return Board(brief=brief, whole=_whole_board(search))


def _shown(search: Search, rows: int) -> str:
    """Which trials a table shows, in which order, and how far apart seeds lie."""
    total = len(search.trials)
    which = f"{rows} of {total} trials are shown; `assay runs {search.name}` lists all." if rows < total else ""
    order = "Trials that finished stand by loss, then the others by how far they came."
    return " ".join(filter(None, [which, order, seed_note(search).replace("bars: ", "")]))


def _whole_board(search: Search) -> Table:
    board = leaderboard(search).head(MOST_ROWS)
    has_baseline = search.baseline is not None
    costs_ = {
        name: words
        for name, words in (
            (Metric.PARAMS, "parameters"),
            (Metric.FLOPS, "FLOPs/token"),
            (Metric.TOKENS_PER_SECOND, "tokens/s"),
            (Metric.SECONDS, "seconds"),
        )
        if name in board
    }
    header = ["#", "run", f"loss ({search.unit})", *(["to baseline"] if has_baseline else []), "status", "tokens"]
    rows: list[list[Cell]] = []
    for place, (_, row) in enumerate(board.iterrows(), 1):
        done = row["status"] == Status.OK
        rows.append(
            [
                (str(place) if done else "", float(place)),
                str(row["run"]),
                _cell(row["loss"], f"{row['loss']:.4f}"),
                *([_against(row)] if has_baseline else []),
                str(row["status"]).replace("_", " "),
                _cell(row["tokens"], quantity(row["tokens"])),
                *(_cell(row[name], quantity(row[name])) for name in costs_),
                str(row["what"]),
                f"`assay replay {row['run']}`",
            ]
        )
    marked = frozenset(place for place, value in enumerate(board["is_baseline"]) if value)
    header = [*header, *costs_.values(), "what", "replay"]
    name = f"Leaderboard of {search.name}"
    return Table(header=header, rows=rows, sorts=True, marked=marked, name=name, note=_shown(search, len(rows)))


def _against(row: "pd.Series[Any]") -> Cell:
    return _cell(row["difference"], "baseline" if row["is_baseline"] else number_text(row["difference"]))


def _cell(value: float, words: str) -> Cell:
    return ("", math.nan) if math.isnan(value) else (words, float(value))
