"""The picture of how time and memory of mixers grow with the length of the sequence."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from analysis.drawing import BLUE, GREY, ORANGE, ROW, STYLE, title


@mpl.rc_context(STYLE)
def complexity_figure(growths: Sequence[Mapping[str, Any]], conditions: str) -> Figure:
    """Exponents of time, memory and declared FLOPs beside the time at each mixer's longest length; fastest on top.

    A growth holds `kind`, `time_exponent`, `memory_exponent`, `flops_exponent` and `points` of `length` and `seconds`.
    """
    ordered = sorted(growths, key=lambda growth: _per_token(growth), reverse=True)
    rows = np.arange(len(ordered))
    figure = Figure(figsize=(10.0, 1.9 + ROW * len(ordered)))
    exponents, times = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for name, label, colour, marker in (
        ("flops_exponent", "multiplications, as declared", GREY, "|"),
        ("memory_exponent", "memory, measured", ORANGE, "s"),
        ("time_exponent", "time, measured", BLUE, "o"),
    ):
        found = [np.nan if growth[name] is None else growth[name] for growth in ordered]
        exponents.scatter(found, rows, c=colour, marker=marker, s=70 if marker == "|" else 22, label=label, zorder=3)
    exponents.set_yticks(rows, [growth["kind"] for growth in ordered], fontsize=8)
    for slope in (1, 2):
        exponents.axvline(slope, color=GREY, linewidth=0.8, zorder=1)
    exponents.set_xlabel("exponent p of growth like length^p (1: linear, 2: quadratic)")
    exponents.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8)
    times.scatter([_per_token(growth) for growth in ordered], rows, c=BLUE, s=22, zorder=3)
    times.set_xscale("log")
    times.margins(x=0.15)
    times.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    times.set_ylim(-0.8, len(ordered) - 0.2)
    times.set_xlabel("microseconds a token at the longest length")
    for growth, row in zip(ordered, rows, strict=True):
        longest = growth["points"][-1]["length"]
        times.annotate(
            f"{longest:,}",
            (_per_token(growth), row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    title(figure, "Time and memory of one mixer against the length of the sequence", [conditions])
    return figure


def _per_token(growth: Mapping[str, Any]) -> float:
    longest = growth["points"][-1]
    return float(1e6 * longest["seconds"] / longest["length"])
