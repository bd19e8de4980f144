"""What `assay blocks --measure` writes: the figures as JSON, as a Markdown page and as a picture."""

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from analysis.complexity import complexity_figure
from analysis.drawing import save
from runners.complexity import D_MODEL, FITTED, Growth

NAME = "complexity"


def write(growths: Sequence[Growth], folder: Path, device: str) -> tuple[Path, Path, Path]:
    """complexity.json, complexity.md and complexity.png in the folder."""
    where = torch.cuda.get_device_name() if device == "cuda" else f"one thread of a CPU ({platform.machine()})"
    conditions = (
        f"One sequence, forward and backward, d_model {D_MODEL}, default settings, float32; {where}, "
        f"torch {torch.__version__.split('+')[0]}, {datetime.now(UTC):%Y-%m-%d}"
    )
    rows = [_plain(growth) for growth in growths]
    data, page, picture = (folder / f"{NAME}.{suffix}" for suffix in ("json", "md", "png"))
    data.write_text(json.dumps({"conditions": conditions, "mixers": rows}, indent=1) + "\n", encoding="utf-8")
    save(complexity_figure(rows, f"{conditions}\nExponents over the {FITTED} longest lengths"), picture)
    page.write_text(markdown(growths, conditions), encoding="utf-8")
    return data, page, picture


def markdown(growths: Sequence[Growth], conditions: str) -> str:
    """The page: a row for each mixer."""
    peaks = any(point.peak_bytes for growth in growths for point in growth.points)
    memory = "most memory held" if peaks else "memory kept for the backward pass"
    lines = [
        "# Time and memory against length",
        "",
        f"Written by `assay blocks --measure FOLDER`. {conditions}.",
        "",
        f"Exponents are slopes of logarithms over the {FITTED} longest lengths: 1 is linear, 2 quadratic. *Declared* "
        f"is the closed form of forward multiplications that searches count as FLOPs. Where time or memory grows "
        f"faster than declared, the mixer is computed here in a dense form, under a mask. Memory is the {memory}. "
        f"Lengths that would take a mixer too long are left out. The time is the best of a few passes.",
        "",
        "![exponents of time and memory, and time a token](complexity.png)",
        "",
        "| mixer | settings | time | memory | declared | longest | ms | MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for growth in growths:
        last = growth.points[-1]
        cells = [
            growth.kind + (" (encoder)" if growth.stack == "encoder" else ""),
            growth.fields,
            *(_power(p) for p in (growth.time_exponent, growth.memory_exponent, growth.flops_exponent)),
            f"{last.length:,}",
            f"{1000 * last.seconds:.3g}",
            f"{(last.peak_bytes or last.saved_bytes) / 1e6:.3g}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _plain(growth: Growth) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value for key, value in asdict(growth).items()
    }


def _power(exponent: float) -> str:
    return "-" if math.isnan(exponent) else f"N^{exponent:.2f}"
