"""Figures in one style: colours that survive colour blindness, units, numbers of trials and intervals on each."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from analysis.effects import Effect, Effects
from analysis.frame import Search, short_path
from analysis.leaderboard import leaderboard, seed_spread
from analysis.pareto import front
from analysis.verdicts import Contrast
from search_space.records import Metric, Stage, Status

# Okabe & Ito (2008), "Color Universal Design".
BLUE, ORANGE, GREEN, VERMILION, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#8C8C8C"
STATUS_COLOURS = {
    str(Status.OK): BLUE,
    str(Status.PRUNED): GREY,
    str(Status.DIVERGED): VERMILION,
    str(Status.OUT_OF_MEMORY): PURPLE,
    str(Status.TIMED_OUT): ORANGE,
    str(Status.PREEMPTED): GREEN,
    str(Status.FAILED): "#000000",
}
CLAIM_COLOURS = {"better": BLUE, "worse": VERMILION, "equal": GREEN, "undecided": GREY}
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "savefig.dpi": 130,
    "figure.constrained_layout.use": True,
}
_ROW = 0.27
"""Inches a labelled row takes."""
_MOST_ROWS = 60
_WRAP = 74
"""Characters in a line of a label."""


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as PNG."""
    with mpl.rc_context(STYLE):
        figure.savefig(path, format="png")
    return path


@mpl.rc_context(STYLE)
def leaderboard_figure(search: Search, top: int = 15) -> Figure:
    """Final losses of the best trials, with the spread of seeds where finals tell it."""
    board = leaderboard(search)
    done = board[board["status"] == Status.OK]
    shown = done[(np.arange(len(done)) < top) | done["is_baseline"].to_numpy()]
    spread, degrees = seed_spread(search)
    figure, axes = _canvas(10.0, 1.7 + 1.4 * _ROW * max(len(shown), 1))
    rows = np.arange(len(shown))
    if degrees:
        axes.errorbar(shown["loss"], rows, xerr=spread, fmt="none", ecolor=GREY, elinewidth=1.2, capsize=2, zorder=2)
    colours = [ORANGE if is_baseline else BLUE for is_baseline in shown["is_baseline"]]
    axes.scatter(shown["loss"], rows, c=colours, s=34, zorder=3)
    for row, loss in zip(rows, shown["loss"], strict=True):
        axes.annotate(f"{loss:.3f}", (loss, row), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=7)
    names = [_wrapped(f"#{n}  {what}") for n, what in zip(shown["number"], shown["what"], strict=True)]
    axes.set_yticks(rows, names, fontsize=8)
    axes.set_ylim(len(shown) - 0.5, -0.8)
    axes.margins(x=0.08)
    axes.set_xlabel(f"final validation loss ({search.unit}); lower is better")
    notes = [f"best {len(shown)} of {len(done)} finished trials ({len(board)} started), one seed each"]
    if degrees:
        notes.append(f"bars: ±1 deviation between seeds, {spread:.3f}, from finals ({degrees} d.f.)")
    if shown["is_baseline"].any():
        notes.append("orange: the baseline")
    _title(figure, f"{search.name}: leaderboard", notes)
    return figure


@mpl.rc_context(STYLE)
def curves_figure(search: Search) -> Figure:
    """Every learning curve from the first reading after training began; the best and the baseline stand out."""
    figure, axes = _canvas(8.0, 4.8)
    begun = search.curves[(search.curves["tokens"] > 0) & (search.curves["stage"] == Stage.SEARCH)]
    curves = dict(list(begun.groupby("run_id")))
    best = search.finished["run_id"].iloc[0] if len(search.finished) else ""
    for _, row in search.trials.iterrows():
        if row["run_id"] not in curves or row["run_id"] == best or row["is_baseline"]:
            continue
        curve, colour = curves[row["run_id"]], STATUS_COLOURS.get(row["status"], GREY)
        ends = row["status"] not in (Status.OK, Status.PRUNED)
        axes.plot(curve["tokens"], curve["loss"], color=colour, lw=1, alpha=0.55, zorder=2)
        axes.plot(
            curve["tokens"].iloc[-1:], curve["loss"].iloc[-1:], "x" if ends else ".", color=colour, ms=5, zorder=2
        )
    baseline = search.baseline
    marked = [(best, "best: ", "#003A5C", "-")]
    if baseline is not None and baseline["run_id"] != best:
        marked.append((baseline["run_id"], "baseline: ", ORANGE, "-"))
    for run_id, word, colour, line in marked:
        if run_id in curves:
            curve = curves[run_id]
            label = f"{word}#{curve['number'].iloc[0]} ({curve['loss'].iloc[-1]:.3f})"
            axes.plot(curve["tokens"], curve["loss"], line, color=colour, lw=2.4, label=label, zorder=4)
    bigram = search.parent.bigram_loss
    if bigram is not None:
        axes.axhline(bigram, color="#000000", lw=1, ls="--", label=f"bigram model ({bigram:.3f})", zorder=1)
    counts = search.trials[search.trials["run_id"].isin(curves)]["status"].value_counts()
    for status, count in counts.items():
        colour = STATUS_COLOURS.get(str(status), GREY)
        axes.plot([], [], color=colour, lw=1.5, label=f"{str(status).replace('_', ' ')}: {count}")
    _robust_limits(axes, pd.concat([curve["loss"] for curve in curves.values()]))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("training tokens")
    axes.set_ylabel(f"validation loss ({search.unit})")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)
    _title(figure, f"{search.name}: learning curves", [f"{int(counts.sum())} trials with readings, one seed each"])
    return figure


@mpl.rc_context(STYLE)
def effects_figure(effects: Effects) -> Figure:
    """Every effect with its interval and numbers of trials."""
    spoken = [row for row in effects.rows if row.claim != "too few"]
    rows = _widest_first(spoken)
    figure, axes = _canvas(8.5, 1.7 + _ROW * max(len(rows), 1))
    labels = []
    for place, row in enumerate(rows):
        colour = CLAIM_COLOURS[row.claim]
        axes.plot([row.low, row.high], [place, place], color=colour, lw=2, solid_capstyle="butt", zorder=2)
        axes.plot(row.estimate, place, "o", color=colour, ms=6, zorder=3)
        labels.append(f"{short_path(row.path)}: {row.option} vs {row.reference}  (n={row.n}, {row.n_reference})")
    axes.axvline(0, color="#000000", lw=0.9, zorder=1)
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    for before, (row, above) in enumerate(zip(rows[1:], rows, strict=False)):
        if row.path != above.path:
            axes.axhline(before + 0.5, color="#BBBBBB", lw=0.6)
    axes.set_xlabel(f"difference of validation loss ({effects.unit}) at {effects.tokens:,} tokens; left is better")
    for word in ("better", "worse", "undecided"):
        axes.plot([], [], "o-", color=CLAIM_COLOURS[word], label=word)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    level = f"{1 - effects.alpha:.0%}"
    notes = [
        "descriptive: the sampler chose the trials; paired finals decide",
        f"{effects.n} trials, adjusted for the other choices; intervals nominally at {level} for all of them",
    ]
    if len(rows) < len(spoken):
        notes.append(f"the {len(rows)} largest of {len(spoken)} effects")
    if len(spoken) < len(effects.rows):
        notes.append(
            f"{len(effects.rows) - len(spoken)} options tried by fewer than three trials are in the table only"
        )
    _title(figure, "What each choice was worth", notes)
    return figure


@mpl.rc_context(STYLE)
def cost_figure(search: Search, measures: Sequence[str] = (Metric.PARAMS, Metric.FLOPS)) -> Figure:
    """Final loss against cost, with the trials no other betters in both."""
    names = {Metric.PARAMS: "parameters", Metric.FLOPS: "forward FLOPs/token", Metric.STATE_BYTES: "state bytes/token"}
    measures = [name for name in measures if name in search.finished and search.finished[name].notna().any()]
    figure = Figure(figsize=(4.6 * len(measures), 4.4))
    for axes, measure in zip(np.atleast_1d(figure.subplots(1, len(measures))), measures, strict=True):
        done = search.finished.dropna(subset=[measure])
        axes.scatter(done[measure], done[Metric.LOSS], color=BLUE, s=26, alpha=0.75, zorder=2)
        best = front(done, {measure: "min", Metric.LOSS: "min"})
        axes.plot(best[measure], best[Metric.LOSS], "o-", color=VERMILION, mfc="none", ms=9, lw=1.2, zorder=3)
        for _, row in best.iterrows():
            place = (row[measure], row[Metric.LOSS])
            axes.annotate(f"#{row['number']}", place, xytext=(6, 6), textcoords="offset points", fontsize=8)
        marked = done[done["is_baseline"]]
        axes.scatter(marked[measure], marked[Metric.LOSS], color=ORANGE, s=60, marker="D", zorder=3)
        if done[measure].max() > 3 * max(done[measure].min(), 1):
            axes.set_xscale("log")
        else:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.locator_params(axis="x", nbins=5)
        axes.margins(0.12)
        axes.set_xlabel(names.get(measure, measure))
        axes.set_ylabel(f"final validation loss ({search.unit})")
    notes = [f"{len(search.finished)} finished trials, one seed each", "ring: no other is both cheaper and better"]
    if search.baseline is not None:
        notes.append("diamond: the baseline")
    _title(figure, f"{search.name}: loss against cost", ["; ".join(notes)])
    return figure


@mpl.rc_context(STYLE)
def failures_figure(search: Search) -> Figure:
    """How the trials ended."""
    counts = search.trials["status"].value_counts()
    figure, axes = _canvas(7.0, 1.3 + 0.34 * len(counts))
    colours = [STATUS_COLOURS.get(str(status), GREY) for status in counts.index]
    axes.barh(range(len(counts)), counts.to_numpy(), color=colours, height=0.65)
    for place, count in enumerate(counts):
        share = count / len(search.trials)
        axes.annotate(f"{count} ({share:.0%})", (count, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(counts)), [str(status).replace("_", " ") for status in counts.index])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("trials")
    _title(figure, f"{search.name}: how the trials ended", [f"{len(search.trials)} trials"])
    return figure


@mpl.rc_context(STYLE)
def finals_figure(search: Search, found: Sequence[Contrast]) -> Figure:
    """Every paired difference with the confidence sequence of its contrast."""
    figure, axes = _canvas(8.0, 1.6 + 0.55 * max(len(found), 1))
    labels = []
    for place, contrast in enumerate(found):
        verdict, values = contrast.verdict, contrast.pairs["difference"].to_numpy()
        colour = CLAIM_COLOURS[verdict.kind]
        if np.isfinite(verdict.low):
            axes.plot(
                [verdict.low, verdict.high], [place, place], color=colour, lw=6, alpha=0.35, solid_capstyle="butt"
            )
        axes.scatter(values, np.full(len(values), place), s=22, color=colour, zorder=3, alpha=0.9)
        if len(values):
            axes.plot([verdict.estimate] * 2, [place - 0.22, place + 0.22], color=colour, lw=2, zorder=4)
        bound = "" if np.isfinite(verdict.low) else ", no bound yet"
        versus = f"{_cut(verdict.contestant, 34)} − {_cut(verdict.baseline, 34)}"
        labels.append(f"{contrast.name}: {verdict.kind} (n={verdict.n}{bound})\n{versus}")
    axes.axvline(0, color="#000000", lw=0.9, zorder=1)
    axes.set_yticks(range(len(found)), labels)
    axes.set_ylim(len(found) - 0.5, -0.5)
    split = "test" if all(contrast.metric == Metric.TEST_LOSS for contrast in found) else "validation"
    axes.set_xlabel(f"paired difference of {split} loss ({search.unit}); left is better")
    level = f"{1 - sum(contrast.verdict.alpha for contrast in found):.0%}"
    notes = ["dot: one pair of seeds; line: mean; band: anytime-valid interval", f"all bands hold together at {level}"]
    _title(figure, f"{search.name}: paired finals", notes)
    return figure


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots()


def _title(figure: Figure, title: str, notes: Sequence[str]) -> None:
    """A title and what must be known to read the figure, from its left edge."""
    figure.suptitle("\n".join([title, *notes]), x=0.01, ha="left", fontsize=9.5, linespacing=1.4)


def _wrapped(text: str) -> str:
    return textwrap.fill(text.replace("+", " + "), _WRAP, break_long_words=False)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _robust_limits(axes: Axes, losses: pd.Series) -> None:
    """Leave what shot up out of view (beyond Tukey's far fence), so that the rest can be told apart."""
    finite = losses[np.isfinite(losses)]
    if len(finite):
        quarter, three = finite.quantile([0.25, 0.75])
        low, high = float(finite.min()), min(float(finite.max()), three + 3 * (three - quarter))
        room = 0.06 * (high - low or 1.0)
        axes.set_ylim(low - room, high + room)


def _widest_first(rows: Sequence[Effect]) -> list[Effect]:
    """All rows, or where they are too many the decided and largest of them, in their order."""
    if len(rows) <= _MOST_ROWS:
        return list(rows)
    order = sorted(range(len(rows)), key=lambda i: (rows[i].claim not in ("better", "worse"), -abs(rows[i].estimate)))
    return [rows[i] for i in sorted(order[:_MOST_ROWS])]
