"""Figures of losses over the learning rate and over pairs of choices."""

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from analysis import landscape
from analysis.drawing import GREY, STYLE, cut, title
from analysis.frame import ENDED_BADLY, PARAM, Search, short_path
from analysis.landscape import Cells

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6A51A3", "#7A3B2E")
_PANELS = 4
"""Choices, or pairs of them, that a figure shows side by side."""
_LABEL = 16


@mpl.rc_context(STYLE)
def rates_figure(search: Search) -> Figure:
    """Loss at equal tokens against the learning rate, a panel for each of the first choices of kind."""
    outcome, tokens = landscape.losses(search)
    rate = landscape.rates(search)[0]
    places = search.trials.set_index("run_id")[PARAM + rate].astype(float)
    ended = search.trials.set_index("run_id")["status"]
    groups = [(path, values) for path, values in search.options.items() if path.endswith(".kind")][:_PANELS]
    figure, panels = _panels(len(groups), 3.6, sharey=True)
    for axes, (path, values) in zip(panels, groups or [("", ended.map(lambda _: "all"))], strict=True):
        fits = landscape.rate_fits(places, outcome, values)
        for place, name in enumerate(values.value_counts().index):
            held = [run for run in values.index[values == name] if run in outcome.index]
            colour = _COLOURS[place % len(_COLOURS)] if place < len(_COLOURS) else GREY
            axes.scatter(places[held], outcome[held], s=20, color=colour, label=f"{name} (n={len(held)})", zorder=3)
            if str(name) in fits:
                at, middle, low, high = np.array(fits[str(name)]).T
                axes.plot(at, middle, color=colour, lw=1.4)
                axes.fill_between(at, low, high, color=colour, alpha=0.12, lw=0)
        bad = [run for run in ended.index[ended.isin(ENDED_BADLY)] if not np.isnan(places[run])]
        if bad:
            top = axes.get_xaxis_transform()
            axes.plot(places[bad], [1.0] * len(bad), "x", color="#000000", transform=top, clip_on=False)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.minorticks_off()
        axes.set_xlabel(short_path(rate).replace("_", " "))
        axes.legend(title=short_path(path) if path else None, fontsize=7.5, title_fontsize=8)
    figure.supylabel(f"validation loss at {tokens:,} tokens ({search.unit})", fontsize=9)
    notes = [
        f"{len(outcome)} trials, one seed each; line and band: a parabola with its 95 % interval, from six trials on",
        "cross at the top: the trial ended badly",
    ]
    title(figure, f"{search.name}: loss against the learning rate", notes)
    return figure


@mpl.rc_context(STYLE)
def pairs_figure(search: Search, shown: Sequence[Cells]) -> Figure:
    """Mean loss by two choices at once, for the pairs that share most trials."""
    cells = list(shown)[:_PANELS]
    figure, panels = _panels(len(cells), 1.1 + 0.5 * max(len(one.rows) for one in cells))
    peak = max(float(np.nanmax(np.abs(one.mean))) for one in cells) or 1.0
    scale = TwoSlopeNorm(0.0, -peak, peak)
    for axes, one in zip(panels, cells, strict=True):
        drawn = axes.imshow(np.ma.masked_invalid(one.mean), cmap="RdBu_r", norm=scale, aspect="auto")
        axes.grid(visible=False)
        axes.set_xticks(range(len(one.columns)), [cut(name, _LABEL) for name in one.columns], rotation=25, ha="right")
        axes.set_yticks(range(len(one.rows)), [cut(name, _LABEL) for name in one.rows])
        axes.set_xlabel(short_path(one.other))
        axes.set_ylabel(short_path(one.one))
        for row, column in np.ndindex(one.n.shape):
            if one.n[row, column]:
                width = one.width[row, column]
                words = _signed(float(one.mean[row, column])) + ("" if np.isnan(width) else f" ±{width:.2f}")
                far = abs(one.mean[row, column]) > 0.6 * peak
                axes.text(
                    column, row, f"{words}\nn={one.n[row, column]}",
                    ha="center", va="center", fontsize=6.5, color="#FFFFFF" if far else "#000000",
                )  # fmt: skip
    figure.colorbar(drawn, ax=list(panels), label=search.unit, aspect=30)
    _, tokens = landscape.losses(search)
    notes = [
        f"mean validation loss at {tokens:,} tokens minus that of all trials ({search.unit}); blue is better",
        "±: 95 % interval of the mean, from two trials on; not adjusted for the other choices",
    ]
    title(figure, f"{search.name}: two choices at a time", notes)
    return figure


def _panels(count: int, height: float, *, sharey: bool = False) -> tuple[Figure, Sequence[Axes]]:
    """A figure of so many panels, two in a row."""
    columns = min(max(count, 1), 2)
    rows = -(-max(count, 1) // columns)
    figure = Figure(figsize=(5.2 * columns, 1.0 + height * rows))
    panels = figure.subplots(rows, columns, squeeze=False, sharey=sharey).ravel()
    for spare in panels[max(count, 1) :]:
        spare.set_axis_off()
    return figure, list(panels[: max(count, 1)])


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-0.00", "0.00").replace("+0.00", "0.00").replace("-", "−")
