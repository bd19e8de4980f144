"""Tables and counts as text, for the terminal and for Markdown."""

import math
from collections.abc import Sequence

Row = Sequence[str]


def aligned(header: Row, rows: Sequence[Row]) -> str:
    """A table in columns; numbers to the right."""
    table = [header, *rows]
    widths = [max(len(row[place]) for row in table) for place in range(len(header))]
    right = [all(_is_number(row[place]) for row in table[1:]) for place in range(len(header))]
    lines = [
        "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in table
    ]
    return "\n".join(f"  {line}" for line in lines)


def markdown(header: Row, rows: Sequence[Row]) -> str:
    """The same as a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def quantity(value: float) -> str:
    """A count in three digits: 1.02M; empty for NaN."""
    if math.isnan(value):
        return ""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _is_number(cell: str) -> bool:
    return not cell or cell[0].isdigit() or (cell[0] in "−-+" and cell[1:2].isdigit())
