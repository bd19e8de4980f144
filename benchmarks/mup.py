"""Trains models of several widths on a grid of learning rates, and checks which rule keeps the best one in place.

Two layers, Adam, 120 steps at a constant rate on bytes of Python source. Every loss goes to docs/mup.json, a table to
docs/mup.md and the picture to docs/mup.png; the exit status is 1 when the claim does not hold. `--draw` trains nothing.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch.nn import functional as F

from analysis.drawing import BLUE, GREEN, ORANGE, STYLE, VERMILION, save
from blocks import registry
from blocks.model import ModelConfig
from runners.optimize import AdamW
from runners.tasks.data import TaskData
from runners.tasks.python_source import PythonSource
from search_space.canon import unflatten
from search_space.domains import Scalar
from search_space.space import derive, walk

DOCS = Path(__file__).parents[1] / "docs"
WIDTHS = (32, 64, 128, 256)
STEPS, LAST = 120, 12
ROWS, LENGTH = 8, 64
HEADS = 4
MOVE_OF_MUP = 1.0
"""The most that the best rate may move over all widths under maximal update, in factors of 2."""
SLOPE_OF_STANDARD = (-1.3, -0.7)
"""The power of the width with which the best rate moves under a rule that scales the draw alone; about -1."""
COLOURS = (BLUE, GREEN, ORANGE, VERMILION)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An init rule under test."""

    name: str
    changes: Mapping[str, Scalar]
    exponents: tuple[int, ...]
    """Learning rates are 2 to these powers."""


MAXIMAL = Rule(name="mup", changes={"init.kind": "mup", "init.mup.base_width": 32}, exponents=tuple(range(-10, -3)))
STANDARD = Rule(name="xavier", changes={"init.kind": "xavier"}, exponents=tuple(range(-11, -4)))
Losses = dict[str, dict[int, dict[int, list[float]]]]
"""Losses of each seed by rule, width and exponent of the learning rate."""


def configured(rule: Rule, width: int) -> ModelConfig:
    """Two pre-norm layers of four heads; everything in them grows with the width."""
    wanted: dict[str, Scalar] = {
        "d_model": width,
        "layers": 2,
        "tied": False,
        "mixer.softmax.kv_heads": HEADS,
        "mixer.softmax.head_dim": width // HEADS,
        "ffn.kind": "gelu",
        **rule.changes,
    }
    point = walk(derive(ModelConfig, registry.variants), lambda path, domain: wanted.get(path, domain.default))
    unused = wanted.keys() - point.keys()
    assert not unused, f"not live: {sorted(unused)}"
    return registry.decode(
        ModelConfig, unflatten(point), vocab_size=256, train_len=LENGTH, max_len=LENGTH, d_ff=2 * width
    )


def final_loss(rule: Rule, width: int, exponent: int, seed: int, data: TaskData) -> float:
    """Mean training loss of the last steps, each on bytes not seen before; nats per byte."""
    model = configured(rule, width).build(seed)
    optimizer = AdamW(learning_rate=2.0**exponent, weight_decay=0.0).build(model)
    losses = []
    for step in range(STEPS):
        inputs, targets = data.batch(step, ROWS, seed)
        logits, _ = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses[-LAST:]) / LAST


def best_exponent(losses: Mapping[int, float]) -> float:
    """Base-2 logarithm of the best rate: the vertex of a parabola through the least loss and its neighbours.

    AssertionError where the least loss lies at the edge of the grid.
    """
    best = min(losses, key=lambda exponent: losses[exponent])
    assert {best - 1, best + 1} <= losses.keys(), f"the best rate, 2^{best}, is at the edge of the grid; widen it"
    left, middle, right = (losses[best + step] for step in (-1, 0, 1))
    return best + 0.5 * (left - right) / (left - 2 * middle + right)


def means(by_exponent: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """The mean over seeds at each rate."""
    return {exponent: sum(losses) / len(losses) for exponent, losses in by_exponent.items()}


def moves(by_width: Mapping[int, Mapping[int, Sequence[float]]]) -> dict[str, Any]:
    """Where the best rate lies at each width, how far apart those are, and with which power of the width it moves."""
    best = {width: best_exponent(means(by_exponent)) for width, by_exponent in by_width.items()}
    x = [math.log2(width) for width in best]
    centre = sum(x) / len(x)
    slope = sum((at - centre) * y for at, y in zip(x, best.values(), strict=True)) / sum((at - centre) ** 2 for at in x)
    on_grid = {
        width: min(found := means(by_exponent), key=found.__getitem__) for width, by_exponent in by_width.items()
    }
    return {
        "best_exponent": best,
        "best_exponent_on_grid": on_grid,
        "range": max(best.values()) - min(best.values()),
        "range_on_grid": max(on_grid.values()) - min(on_grid.values()),
        "power_of_width": slope,
    }


def claim(found: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """What must hold, and whether it does."""
    maximal, standard = found[MAXIMAL.name], found[STANDARD.name]
    low, high = SLOPE_OF_STANDARD
    return {
        f"{MAXIMAL.name}: the best rate moves by at most one factor of 2": max(
            maximal["range"], maximal["range_on_grid"]
        )
        <= MOVE_OF_MUP,
        f"{STANDARD.name}: the best rate goes as width to the power {low} to {high}": low
        <= standard["power_of_width"]
        <= high,
    }


def train_all(rules: Sequence[Rule], widths: Sequence[int], seeds: Sequence[int]) -> Losses:
    """Every model, one after the other; a line of output for each width."""
    data = PythonSource(seq_len=LENGTH).prepare()
    losses: Losses = {}
    started = time.perf_counter()
    for rule in rules:
        for width in widths:
            by_exponent = {
                exponent: [final_loss(rule, width, exponent, seed, data) for seed in seeds]
                for exponent in rule.exponents
            }
            losses.setdefault(rule.name, {})[width] = by_exponent
            shown = "  ".join(f"2^{exponent} {loss:.3f}" for exponent, loss in means(by_exponent).items())
            print(f"{time.perf_counter() - started:4.0f} s  {rule.name} {width}: {shown}", flush=True)
    return losses


@mpl.rc_context(STYLE)
def draw(losses: Losses, found: Mapping[str, Mapping[str, Any]], seeds: Sequence[int]) -> Figure:
    """Loss over learning rate, a panel for each rule and a curve for each width; marks are the best rates."""
    figure = Figure(figsize=(9.6, 4.2))
    axes = figure.subplots(1, len(losses), sharey=True)
    lowest = min(min(means(e).values()) for w in losses.values() for e in w.values())
    for panel, (rule, by_width) in zip(axes, losses.items(), strict=True):
        best = found[rule]["best_exponent"]
        for colour, (width, by_exponent) in zip(COLOURS, by_width.items(), strict=True):
            rates = [2.0**exponent for exponent in by_exponent]
            for index in range(len(seeds)):
                each = [by_exponent[exponent][index] for exponent in by_exponent]
                panel.plot(rates, each, color=colour, linewidth=0.6, alpha=0.45)
            mean = list(means(by_exponent).values())
            panel.plot(rates, mean, color=colour, marker="o", markersize=3.5, label=f"width {width}")
            panel.plot(2.0 ** best[width], min(mean) - 0.03, marker="v", color=colour, markersize=7, clip_on=False)
        panel.set(xlabel="learning rate of Adam (factor-2 grid)", ylim=(lowest - 0.08, lowest + 0.9))
        panel.set_xscale("log", base=2)
        panel.set_title(
            f"{rule}: best rate ~ width^{found[rule]['power_of_width']:+.2f}, "
            f"spread {2 ** found[rule]['range']:.1f}x over {min(by_width)}..{max(by_width)}"
        )
    axes[0].legend(loc="upper center", ncols=2)
    axes[0].set_ylabel(f"training loss, last {LAST} of {STEPS} steps (nats per byte)")
    n_runs = sum(len(e) for w in losses.values() for by in w.values() for e in by.values())
    figure.suptitle(
        f"2 layers, Adam, {STEPS} steps of {ROWS * LENGTH} bytes of Python source; n = {n_runs} runs, seeds "
        f"{', '.join(map(str, seeds))} (thin) and their mean (thick); triangles: best rate by a parabola",
        fontsize=9,
    )
    return figure


def table(losses: Losses, found: Mapping[str, Mapping[str, Any]], seeds: Sequence[int]) -> str:
    """The page that shows it."""
    widths = list(next(iter(losses.values())))
    lines = [
        "# The best learning rate under maximal update",
        "",
        "Made by `python benchmarks/mup.py`; every loss is in [mup.json](mup.json).",
        "",
        "![loss over learning rate at four widths](mup.png)",
        "",
        f"Two pre-norm layers, {HEADS} heads, untied, gelu FFN of twice the width; Adam without weight decay at a "
        f"constant rate; {STEPS} steps of {ROWS} x {LENGTH} bytes of Python source; seeds "
        f"{', '.join(map(str, seeds))}. `mup` has base_width 32.",
        "",
        "| rule | " + " | ".join(f"best at {width}" for width in widths) + " | spread | power of the width |",
        "|---|" + "---|" * (len(widths) + 2),
    ]
    for rule, of_rule in found.items():
        rates = " | ".join(f"2^{of_rule['best_exponent'][width]:.2f}" for width in widths)
        lines.append(f"| `{rule}` | {rates} | {2 ** of_rule['range']:.2f}x | {of_rule['power_of_width']:+.2f} |")
    lines += ["", *(f"- {'holds' if holds else 'FAILS'}: {what}" for what, holds in claim(found).items()), ""]
    return "\n".join(lines)


def in_numbers(plain: Mapping[str, Mapping[str, Mapping[str, list[float]]]]) -> Losses:
    """Losses as docs/mup.json has them, whose keys are text."""
    return {
        rule: {int(width): {int(power): found for power, found in by.items()} for width, by in widths.items()}
        for rule, widths in plain.items()
    }


def main() -> int:
    """0 when the claim holds."""
    parser = argparse.ArgumentParser(description="Measure how the best learning rate moves with the width.")
    parser.add_argument("--seeds", type=int, default=2, help="seeds of weights and data, from 0 on (default 2)")
    parser.add_argument("--draw", action="store_true", help="read docs/mup.json instead of training")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = list(range(options.seeds))
    if options.draw:
        kept = json.loads((DOCS / "mup.json").read_text())
        seeds = kept["seeds"]
        losses = in_numbers(kept["losses"])
    else:
        losses = train_all((MAXIMAL, STANDARD), WIDTHS, seeds)
    found = {rule: moves(by_width) for rule, by_width in losses.items()}
    held = claim(found)
    plain = {"seeds": seeds, "steps": STEPS, "batch_bytes": ROWS * LENGTH, "claim": held, "found": found}
    (DOCS / "mup.json").write_text(json.dumps(plain | {"losses": losses}, indent=1) + "\n")
    (DOCS / "mup.md").write_text(table(losses, found, seeds))
    save(draw(losses, found, seeds), DOCS / "mup.png")
    for what, holds in held.items():
        print(f"{'holds' if holds else 'FAILS'}  {what}")
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
