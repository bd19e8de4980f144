"""Figures of a ladder: losses and paired differences over size, carried on to the target with intervals."""

from collections.abc import Sequence
from itertools import combinations
from textwrap import fill

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from analysis.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, STYLE, VERMILION, title
from analysis.extrapolation import Mixture
from analysis.ladder import Ladder, curve_of, gap_of
from analysis.projection import Projection, size_text

COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE)
_POINTS = 40
_NARROWER = 0.5
"""Level of the inner band."""
_WRAP = 130
"""Characters in a line above the figure."""
_MOST_GAPS = 3
"""Pairs of candidates that are drawn."""


def grid(ladder: Ladder) -> list[float]:
    """Sizes at which curves are drawn, from the smallest that was trained to the target."""
    return [float(size) for size in np.geomspace(min(one.rung for one in ladder.trainings), ladder.target, _POINTS)]


@mpl.rc_context(STYLE)
def ladder_figure(ladder: Ladder, found: Sequence[Projection]) -> Figure:
    """Losses of every training, and the differences of each pair of candidates, with what is believed of both."""
    pairs = list(combinations(ladder.candidates, 2))[:_MOST_GAPS]
    figure = Figure(figsize=(10.5, 1.6 + 3.1 * max(1, len(pairs))))
    cells = figure.add_gridspec(max(1, len(pairs)), 2)
    axes = figure.add_subplot(cells[:, 0])
    places = grid(ladder)
    level = found[0].level if found else 0.8
    for colour, label in zip(COLOURS, ladder.candidates, strict=False):
        losses = ladder.losses(label)
        counted = sum(map(len, losses.values()))
        for size, by_replica in losses.items():
            axes.scatter([size] * len(by_replica), list(by_replica.values()), s=18, color=colour, zorder=3)
        axes.plot([], [], "o-", ms=4, color=colour, label=f"{label} (n={counted})")
        believed = curve_of(ladder, label, places)
        if believed is not None:
            _band(axes, places, believed, colour, level)
    _sizes(axes, ladder)
    axes.set_ylabel(f"{'test' if ladder.metric.startswith('test') else 'validation'} loss ({ladder.unit})")
    axes.legend(loc="lower left")
    for row, (one, other) in enumerate(pairs):
        _gap(figure.add_subplot(cells[row, 1]), ladder, one, other, places, level)
    notes = [
        *(projection.text for projection in found[:_MOST_GAPS]),
        "dots: one training each (left), one pair of seeds each (right); bars: their means; lines: expected",
        f"bands: {_NARROWER:.0%} and {level:.0%} intervals of the curve itself, over several forms; dashed: the "
        "target, which was not trained",
    ]
    lines = [fill(note, _WRAP) for note in notes]
    title(figure, f"{ladder.name}: {', '.join(ladder.candidates)} over size", lines)
    return figure


def _gap(axes: Axes, ladder: Ladder, one: str, other: str, places: list[float], level: float) -> None:
    gap = gap_of(ladder, one, other, places)
    first, second = ladder.losses(one), ladder.losses(other)
    count = 0
    for size in sorted(first.keys() & second.keys()):
        values = [first[size][k] - second[size][k] for k in sorted(first[size].keys() & second[size].keys())]
        axes.scatter([size] * len(values), values, s=18, color=GREY, zorder=3)
        count += len(values)
    if gap is not None:
        measured, believed = gap
        _band(axes, places, believed, BLUE, level)
        axes.plot(measured.sizes, measured.means, "_", ms=12, mew=2, color="#000000", zorder=4)
    axes.axhline(0, color="#000000", lw=0.9, zorder=1)
    _sizes(axes, ladder)
    axes.set_ylabel(f"{one} minus {other}\n({ladder.unit})")
    axes.set_title(f"paired difference, n={count} pairs; below 0 {one} is better", fontsize=8.5)


def _band(axes: Axes, places: list[float], believed: Mixture, colour: str, level: float) -> None:
    for width, shade in ((level, 0.13), (_NARROWER, 0.2)):
        ends = np.array([believed.interval(width, place) for place in range(len(places))])
        axes.fill_between(places, ends[:, 0], ends[:, 1], color=colour, alpha=shade, lw=0, zorder=1)
    axes.plot(places, [believed.mean(place) for place in range(len(places))], color=colour, lw=1.4, zorder=2)


def _sizes(axes: Axes, ladder: Ladder) -> None:
    """A logarithmic axis with a tick at every size of the ladder and at the target."""
    axes.set_xscale("log")
    axes.axvline(ladder.target, color="#000000", lw=1, ls="--", zorder=1)
    ticks = [*sorted({float(one.rung) for one in ladder.trainings}), ladder.target]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("parameters")
