"""The style of all figures, and the parts they share."""

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from search_space.records import Status

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
    # Names are no formulas, whatever signs they hold.
    "text.parse_math": False,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "savefig.dpi": 130,
    "figure.constrained_layout.use": True,
}
ROW = 0.27
"""Inches a labelled row takes."""
WRAP = 74
"""Characters in a line of a label."""
_BREAK = re.compile(r"(?= )|(?<!\de)(?=\+)")


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as PNG."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        # A sign that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(path, format="png")
    return path


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty figure of this size in inches, with one pair of axes."""
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots()


def title(figure: Figure, title: str, notes: Sequence[str]) -> None:
    """A title and what must be known to read the figure, from its left edge."""
    figure.suptitle("\n".join([title, *notes]), x=0.01, ha="left", fontsize=9.5, linespacing=1.4)


def wrapped(text: str) -> str:
    """The text in lines of at most WRAP characters where its words allow, broken at spaces and before a plus sign."""
    lines = [""]
    for piece in _BREAK.split(text):
        if lines[-1] and len(lines[-1]) + len(piece) > WRAP:
            lines.append(piece.lstrip())
        else:
            lines[-1] += piece
    return "\n".join(lines)


def cut(text: str, most: int) -> str:
    """The text, or its beginning and an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
