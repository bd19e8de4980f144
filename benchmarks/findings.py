"""Trains what the files in search_space/presets/findings/ describe, and checks that known findings come out.

A table of measured against expected is printed and pictures go to reports/findings/; the exit status is 1 when a
finding does not hold. `--quickest` runs the quickest one alone.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

from search_space.domains import Scalar
from search_space.records import TrialResult

mpl.use("Agg")
from matplotlib import pyplot as plt

Point = dict[str, Scalar]
Results = Mapping[str, TrialResult]
"""Results by the label of the point."""
OUT = Path(__file__).parents[1] / "reports" / "findings"
LENGTHS = (64, 128, 256, 512)
WIDTHS = (16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One claim about one number."""

    what: str
    expected: str
    measured: float
    holds: bool


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An experiment file, the points of its grid that count, and what must come out."""

    preset: str
    label: Callable[[Point], str]
    """A name for a point; empty when the point is not needed."""
    checks: Callable[[Results], list[Check]]
    draw: Callable[[Results, Path], None]


def at_least(what: str, measured: float, bound: float) -> Check:
    """The claim that a number reaches a bound."""
    return Check(what=what, expected=f">= {bound:g}", measured=measured, holds=measured >= bound)


def at_most(what: str, measured: float, bound: float) -> Check:
    """The claim that a number does not pass a bound."""
    return Check(what=what, expected=f"<= {bound:g}", measured=measured, holds=measured <= bound)


def position_label(point: Point) -> str:
    return str(point["model.position.kind"])


def loss_at(result: TrialResult, length: int) -> float:
    """Validation loss of the trained model at a sequence length."""
    return result.metrics["loss" if length == LENGTHS[0] else f"loss_at/{length}"]


def check_positions(results: Results) -> list[Check]:
    def rise(kind: str, length: int) -> float:
        return loss_at(results[kind], length) - loss_at(results[kind], LENGTHS[0])

    flat = [at_most(f"alibi: loss at {length} minus loss at 64", rise("alibi", length), 0.05) for length in LENGTHS[1:]]
    rising = [
        at_least(f"{kind}: loss at 128 minus loss at 64", rise(kind, 128), 0.3) for kind in ("sinusoidal", "learned")
    ]
    return flat + rising


def draw_positions(results: Results, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for kind, result in results.items():
        axes.plot(LENGTHS, [loss_at(result, length) for length in LENGTHS], marker="o", label=kind)
    axes.set(xscale="log", xlabel="evaluation length (trained at 64)", ylabel="validation loss, nats per byte")
    axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def recall_label(point: Point) -> str:
    kind = str(point["model.mixer.kind"])
    width = point["model.d_model"]
    return f"{kind} {width}" if point[f"model.mixer.{kind}.head_dim"] == width else ""


def accuracies(results: Results, kind: str) -> list[float]:
    """Recall accuracy at each width."""
    return [results[f"{kind} {width}"].metrics["accuracy"] for width in WIDTHS]


def check_recall(results: Results) -> list[Check]:
    softmax, linear = accuracies(results, "softmax"), accuracies(results, "linear")
    checks = [at_least(f"softmax, width {width}: accuracy", softmax[i], 0.99) for i, width in enumerate(WIDTHS)]
    for i in (1, 2):
        claim = f"linear, width {WIDTHS[i]}: accuracy {linear[i]:.2f}, gain over width {WIDTHS[i - 1]}"
        checks.append(at_least(claim, linear[i] - linear[i - 1], 0.1))
    checks.append(at_most("linear, width 16: accuracy", linear[0], 0.5))
    return checks


def draw_recall(results: Results, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for kind in ("softmax", "linear"):
        axes.plot(WIDTHS, accuracies(results, kind), marker="o", label=kind)
    axes.set(xscale="log", xlabel="model width", ylabel="recall accuracy", ylim=(0, 1.05))
    axes.set_xticks(WIDTHS, [str(width) for width in WIDTHS])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def placement_label(point: Point) -> str:
    warmup = point["schedule.cosine.warmup"]
    return f"{point['model.placement.kind']}, {'warm-up' if warmup else 'no warm-up'}"


def check_placement(results: Results) -> list[Check]:
    def gap(schedule: str) -> float:
        post, pre = (results[f"{kind}, {schedule}"].metrics["loss"] for kind in ("post", "pre"))
        return post - pre

    cold, warm = gap("no warm-up"), gap("warm-up")
    return [
        at_least("no warm-up: post-norm loss minus pre-norm loss", cold, 0.3),
        Check(
            what="warm-up: post-norm loss minus pre-norm loss",
            expected=f"< {cold:.3f}",
            measured=warm,
            holds=warm < cold,
        ),
    ]


def draw_placement(results: Results, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for label, result in results.items():
        axes.plot([r.tokens for r in result.curve], [r.loss for r in result.curve], marker=".", label=label)
    axes.set(xlabel="training tokens", ylabel="validation loss, nats per byte")
    axes.minorticks_off()
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


FINDINGS = (
    Finding(
        preset="findings/post_norm_needs_warmup", label=placement_label, checks=check_placement, draw=draw_placement
    ),
    Finding(preset="findings/alibi_extrapolates", label=position_label, checks=check_positions, draw=draw_positions),
    Finding(preset="findings/width_and_recall", label=recall_label, checks=check_recall, draw=draw_recall),
)
"""The quickest first."""


def train_point(preset: str, point: Point) -> TrialResult:
    """One trial of an experiment file, in a process of its own."""
    from runners.candidate import full_space, make_spec, resolve
    from runners.tasks import TASKS, task_from_plain
    from runners.train import run_trial
    from search_space.experiment import preset_path, read
    from search_space.records import Seeds

    experiment = read(preset_path(preset), full_space=full_space, tasks=TASKS)
    task = task_from_plain(experiment.task)
    data = task.prepare()
    resolved = resolve(point, experiment, task.shape())
    seeds = Seeds(init=0, data=0, dropout=0)
    spec = make_spec(resolved, experiment, fingerprint=data.fingerprint, seeds=seeds)
    return run_trial(spec, data, lambda reading: True)


def points_of(finding: Finding) -> dict[str, Point]:
    """The points of the finding's grid that count, by label."""
    from runners.candidate import full_space
    from runners.tasks import TASKS
    from search_space.experiment import preset_path, read
    from search_space.space import enumerate_all

    space = read(preset_path(finding.preset), full_space=full_space, tasks=TASKS).space
    labelled = {finding.label(point): point for point in enumerate_all(space)}
    return {label: point for label, point in labelled.items() if label}


def judge(finding: Finding, results: Results) -> bool:
    """Print what was measured; True when every claim holds."""
    broken = {label: result for label, result in results.items() if result.status != "ok"}
    for label, result in broken.items():
        print(f"  {label}: {result.status}: {result.reason}\n{result.last_lines}")
    if broken:
        return False
    checks = finding.checks(results)
    for check in checks:
        print(f"  {'holds' if check.holds else 'FAILS':5}  {check.what:62} {check.measured:8.3f}   {check.expected}")
    OUT.mkdir(parents=True, exist_ok=True)
    finding.draw(results, OUT / f"{Path(finding.preset).name}.png")
    return all(check.holds for check in checks)


def main() -> int:
    """0 when every finding holds."""
    parser = argparse.ArgumentParser(description="Reproduce known findings from their experiment files.")
    parser.add_argument("--quickest", action="store_true", help="run the quickest finding alone")
    parser.add_argument(
        "--only", default="", help="run the finding of this preset alone, such as findings/width_and_recall"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each (default 2)")
    options = parser.parse_args()
    chosen = [finding for finding in FINDINGS if options.only in ("", finding.preset)][
        : 1 if options.quickest else None
    ]
    if not chosen:
        parser.error(f"--only {options.only}: takes one of {', '.join(finding.preset for finding in FINDINGS)}")
    os.environ["OMP_NUM_THREADS"] = "1"
    started = time.perf_counter()
    held = True
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=options.jobs, mp_context=spawn) as pool:
        for finding in chosen:
            points = points_of(finding)
            futures = {label: pool.submit(train_point, finding.preset, point) for label, point in points.items()}
            results = {label: future.result() for label, future in futures.items()}
            print(f"{finding.preset} ({time.perf_counter() - started:.0f} s)", flush=True)
            held = judge(finding, results) and held
    print(f"{'All findings hold' if held else 'A finding does not hold'}; pictures in {OUT}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
