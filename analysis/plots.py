"""Figures in one style: colours that survive colour blindness, units, numbers of trials and intervals on each."""

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator

from analysis.drawing import (
    BLUE,
    CLAIM_COLOURS,
    GREY,
    ORANGE,
    ROW,
    STATUS_COLOURS,
    STYLE,
    VERMILION,
    canvas,
    cut,
    title,
    wrapped,
)
from analysis.effects import Effect, Effects
from analysis.frame import Search, short_path
from analysis.leaderboard import leaderboard, sampled, seed_spread
from analysis.pareto import front
from analysis.verdicts import Contrast
from search_space.records import Metric, Stage, Status

_MOST_ROWS = 60
_MOST_CURVES = 400
"""Curves that are drawn: the best, the baseline and an even sample of the others."""
_SIDE = 34
"""Characters of a side's name in a label."""
_ISO_COST = 1.02
"""Largest over smallest cost up to which all costs count as equal, and no front is drawn."""
_ROOM = 0.05
"""Share of a cost that is shown on either side of it where all trials cost the same."""


@mpl.rc_context(STYLE)
def leaderboard_figure(search: Search, top: int = 15) -> Figure:
    """Final losses of the best trials, with the spread of seeds where finals tell it."""
    board = leaderboard(search)
    done = board[board["status"] == Status.OK]
    shown = done[(np.arange(len(done)) < top) | done["is_baseline"].to_numpy()]
    spread, degrees = seed_spread(search)
    figure, axes = canvas(10.0, 1.7 + 1.4 * ROW * max(len(shown), 1))
    rows = np.arange(len(shown))
    if degrees:
        axes.errorbar(shown["loss"], rows, xerr=spread, fmt="none", ecolor=GREY, elinewidth=1.2, capsize=2, zorder=2)
    colours = [ORANGE if is_baseline else BLUE for is_baseline in shown["is_baseline"]]
    axes.scatter(shown["loss"], rows, c=colours, s=34, zorder=3)
    for row, loss in zip(rows, shown["loss"], strict=True):
        axes.annotate(f"{loss:.3f}", (loss, row), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=7)
    names = [wrapped(f"#{n}  {what}") for n, what in zip(shown["number"], shown["what"], strict=True)]
    axes.set_yticks(rows, names, fontsize=8)
    axes.set_ylim(len(shown) - 0.5, -0.8)
    axes.margins(x=0.08)
    axes.set_xlabel(f"final validation loss ({search.unit}); lower is better")
    notes = [f"best {len(shown)} of {len(done)} finished trials ({len(board)} started), one seed each"]
    if degrees:
        notes.append(f"bars: ±1 deviation between seeds, {spread:.3f}, from finals ({degrees} d.f.)")
    if shown["is_baseline"].any():
        notes.append("orange: the baseline")
    title(figure, f"{search.name}: leaderboard", notes)
    return figure


@mpl.rc_context(STYLE)
def curves_figure(search: Search) -> Figure:
    """Every learning curve from the first reading after training began; the best and the baseline stand out."""
    figure, axes = canvas(8.0, 4.8)
    begun = search.curves[(search.curves["tokens"] > 0) & (search.curves["stage"] == Stage.SEARCH)]
    best = search.finished["run_id"].iloc[0] if len(search.finished) else ""
    read = search.trials[search.trials["run_id"].isin(begun["run_id"].unique())]
    shown = sampled(read, _MOST_CURVES)
    curves = dict(list(begun[begun["run_id"].isin([*shown["run_id"], best])].groupby("run_id")))
    for _, row in shown.iterrows():
        if row["run_id"] == best or row["is_baseline"]:
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
    counts = read["status"].value_counts()
    for status, count in counts.items():
        colour = STATUS_COLOURS.get(str(status), GREY)
        axes.plot([], [], color=colour, lw=1.5, label=f"{str(status).replace('_', ' ')}: {count}")
    _robust_limits(axes, begun["loss"], bigram)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("training tokens")
    axes.set_ylabel(f"validation loss ({search.unit})")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)
    drawn = f"; {len(shown)} of them drawn" if len(shown) < counts.sum() else ""
    notes = [f"{int(counts.sum())} trials with readings, one seed each{drawn}"]
    title(figure, f"{search.name}: learning curves", notes)
    return figure


@mpl.rc_context(STYLE)
def effects_figure(effects: Effects) -> Figure:
    """Every effect with its interval and numbers of trials."""
    spoken = [row for row in effects.rows if row.claim != "too few"]
    rows = _widest_first(spoken)
    figure, axes = canvas(8.5, 1.7 + ROW * max(len(rows), 1))
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
        "; ".join(filter(None, [effects.early, "descriptive: the sampler chose the trials; paired finals decide"])),
        f"{effects.n} trials, adjusted for the other choices; intervals nominally at {level} for all of them",
    ]
    if effects.warning:
        notes.append(f"WARNING: {effects.warning}")
    elif not np.isnan(effects.agreement):
        notes.append(f"Spearman {effects.agreement:.2f} with the final loss over {effects.n_finished} finished trials")
    if len(rows) < len(spoken):
        notes.append(f"the {len(rows)} largest of {len(spoken)} effects")
    if len(spoken) < len(effects.rows):
        notes.append(
            f"{len(effects.rows) - len(spoken)} options tried by fewer than three trials are in the table only"
        )
    title(figure, "What each choice was worth", notes)
    return figure


@mpl.rc_context(STYLE)
def cost_figure(search: Search, measures: Sequence[str] = (Metric.PARAMS, Metric.FLOPS)) -> Figure:
    """Final loss against cost, with the trials no other betters in both."""
    names = {Metric.PARAMS: "parameters", Metric.FLOPS: "forward FLOPs/token", Metric.STATE_BYTES: "state bytes/token"}
    measures = [name for name in measures if name in search.finished and search.finished[name].notna().any()]
    figure, fronts = Figure(figsize=(4.6 * len(measures), 4.4)), 0
    for axes, measure in zip(np.atleast_1d(figure.subplots(1, len(measures))), measures, strict=True):
        done = search.finished.dropna(subset=[measure])
        axes.scatter(done[measure], done[Metric.LOSS], color=BLUE, s=26, alpha=0.75, zorder=2)
        equal = done[measure].max() <= _ISO_COST * done[measure].min()
        if not equal:
            best = front(done, {measure: "min", Metric.LOSS: "min"})
            axes.plot(best[measure], best[Metric.LOSS], "o-", color=VERMILION, mfc="none", ms=9, lw=1.2, zorder=3)
            for _, row in best.iterrows():
                place = (row[measure], row[Metric.LOSS])
                axes.annotate(f"#{row['number']}", place, xytext=(6, 6), textcoords="offset points", fontsize=8)
        else:
            leader, level = done.iloc[0], float(done[measure].mean())
            place = (leader[measure], leader[Metric.LOSS])
            axes.annotate(f"#{leader['number']}", place, xytext=(6, 6), textcoords="offset points", fontsize=8)
            axes.set_xlim(level * (1 - _ROOM), level * (1 + _ROOM))
        fronts += not equal
        marked = done[done["is_baseline"]]
        axes.scatter(marked[measure], marked[Metric.LOSS], color=ORANGE, s=60, marker="D", zorder=3)
        if done[measure].max() > 3 * max(done[measure].min(), 1):
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.minorticks_off()
        else:
            axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.margins(0.12)
        name = names.get(measure, measure)
        why = "equal by design" if measure in search.parent.experiment.get("size", {}) else "equal"
        axes.set_xlabel(f"{name} ({why}, within {_ISO_COST - 1:.0%})" if equal else name)
        axes.set_ylabel(f"final validation loss ({search.unit})")
    notes = [f"{len(search.finished)} finished trials, one seed each"]
    if fronts:
        notes.append("ring: no other is both cheaper and better")
    if search.baseline is not None:
        notes.append("diamond: the baseline")
    title(figure, f"{search.name}: loss against cost", ["; ".join(notes)])
    return figure


@mpl.rc_context(STYLE)
def failures_figure(search: Search) -> Figure:
    """How the trials ended."""
    counts = search.trials["status"].value_counts()
    figure, axes = canvas(7.0, 1.3 + 0.34 * len(counts))
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
    title(figure, f"{search.name}: how the trials ended", [f"{len(search.trials)} trials"])
    return figure


@mpl.rc_context(STYLE)
def finals_figure(search: Search, found: Sequence[Contrast]) -> Figure:
    """Every paired difference with the confidence sequence of its contrast."""
    figure, axes = canvas(9.0, 1.6 + 0.72 * max(len(found), 1))
    labels = []
    for place, contrast in enumerate(found):
        verdict = contrast.verdict
        sign = -1 if verdict.kind == "worse" else 1
        values, ends = sign * contrast.pairs["difference"].to_numpy(), (sign * verdict.low, sign * verdict.high)
        colour = CLAIM_COLOURS["better" if verdict.kind == "worse" else verdict.kind]
        if np.isfinite(verdict.low):
            axes.plot(ends, [place, place], color=colour, lw=6, alpha=0.35, solid_capstyle="butt")
        axes.scatter(values, np.full(len(values), place), s=22, color=colour, zorder=3, alpha=0.9)
        if len(values):
            axes.plot([sign * verdict.estimate] * 2, [place - 0.22, place + 0.22], color=colour, lw=2, zorder=4)
        labels.append(finals_label(contrast))
    axes.axvline(0, color="#000000", lw=0.9, zorder=1)
    axes.set_yticks(range(len(found)), labels)
    axes.set_ylim(len(found) - 0.5, -0.5)
    split = "test" if all(contrast.split == "test" for contrast in found) else "validation"
    axes.set_xlabel(
        f"paired difference of {split} loss, first named minus second ({search.unit}); left of 0 the first is better"
    )
    level = f"{1 - sum(contrast.verdict.alpha for contrast in found):.0%}"
    notes = ["dot: one pair of seeds; line: mean; band: anytime-valid interval", f"all bands hold together at {level}"]
    title(figure, f"{search.name}: paired finals", notes)
    return figure


def finals_label(contrast: Contrast) -> str:
    """The verdict in the order it is drawn in, and the trial it was found on."""
    verdict = contrast.verdict
    sides = [cut(side, _SIDE) for side in (verdict.contestant, verdict.baseline)]
    first, second = reversed(sides) if verdict.kind == "worse" else sides
    relation = {"better": "beats", "worse": "beats", "equal": "equals"}.get(verdict.kind, "against")
    bound = "" if np.isfinite(verdict.low) else ", no bound yet"
    said = f"{verdict.kind}, " if verdict.kind == "undecided" else ""
    lines = [contrast.name, f"{first} {relation} {second} ({said}n={verdict.n}{bound})"]
    if contrast.base:
        lines.append(f"base: {contrast.base}")
    return "\n".join(lines)


def _robust_limits(axes: Axes, losses: pd.Series, level: float | None) -> None:
    """Leave what shot up out of view (beyond Tukey's far fence), so that the rest can be told apart from each other.

    A line drawn at `level` stays in view.
    """
    finite = losses[np.isfinite(losses)]
    if len(finite):
        quarter, three = finite.quantile([0.25, 0.75])
        low, high = float(finite.min()), min(float(finite.max()), three + 3 * (three - quarter))
        low, high = (low, high) if level is None else (min(low, level), max(high, level))
        room = 0.06 * (high - low or 1.0)
        axes.set_ylim(low - room, high + room)


def _widest_first(rows: Sequence[Effect]) -> list[Effect]:
    """All rows, or where they are too many the decided and largest of them, in their order."""
    if len(rows) <= _MOST_ROWS:
        return list(rows)
    order = sorted(range(len(rows)), key=lambda i: (rows[i].claim not in ("better", "worse"), -abs(rows[i].estimate)))
    return [rows[i] for i in sorted(order[:_MOST_ROWS])]
