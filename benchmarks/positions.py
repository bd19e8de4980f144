"""Trains one small model per position scheme, all else equal, and writes docs/positions.md with its picture.

Measured per scheme: whether answers move with the text, parameters, loss at the training length and beyond, and what a
step costs beside one without positions, timed in turns. `--only` takes some schemes, `--out` writes elsewhere.
"""

import argparse
import dataclasses
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import torch
from torch.nn import functional as F

from blocks import cost, registry
from blocks.families import AbstractPosition
from blocks.model import ModelConfig
from runners.candidate import Candidate, full_space, make_spec, rebuild, resolve
from runners.tasks import TASKS, task_from_plain
from runners.tasks.data import TaskData
from runners.train import run_trial
from search_space.experiment import Experiment, read
from search_space.records import Seeds, Status, TrialSpec
from search_space.space import default_point

mpl.use("Agg")
from matplotlib import pyplot as plt

DOCS = Path(__file__).parents[1] / "docs"
LENGTHS = (64, 128, 256, 512)
TOKENS = 614400
EVALUATED = 32768
SHIFT = 1024
"""Columns by which a text is moved, behind padding."""
STILL = 1e-9
"""Nats, in float64: what changes less changes by rounding alone."""
TIMED_STEPS = 30
PLAIN = "none"
"""What others are timed beside; trained under two further seeds as well, to show what a seed alone does."""
SETTINGS: dict[str, dict[str, object]] = {
    "learned": {"beyond": "clamp"},
    "sinusoidal": {"amplitude": 1.0},
    "nope_layers": {"every": 2},
}
"""What is not at its default: rows past the training length, sinusoids as published, one of two layers without."""

EXPERIMENT = """
name: positions_measured
task:
  python_source: {{seq_len: 64, eval_lengths: [128, 256, 512]}}
budget: {{tokens: {tokens}, batch_tokens: 1024, eval_tokens: {evaluated}, eval_every: {tokens}}}
model:
  d_model: 64
  layers: 2
  tied: true
  mixer: {{softmax: {{kv_heads: 4, queries_per_kv: 1, head_dim: 16, qk_norm: none}}}}
  position: {{{kind}: {{{fields}}}}}
  ffn: {{gelu: {{expansion: 4.0}}}}
  norm: rmsnorm
  placement: pre
  init: xavier
optimizer: {{adamw: {{learning_rate: 3e-3}}}}
engine: {{device: cpu}}
"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one scheme came to."""

    kind: str
    fields: str
    parameters: int
    """Beyond those of the model without positions."""
    shift: float
    """Largest change of a log-probability, in nats, when the text stands SHIFT columns later."""
    losses: tuple[float, ...]
    """Validation loss at each of LENGTHS, nats per byte."""
    flops: float
    """Forward FLOPs of matrix products per token, relative to none."""
    seconds: float
    """Processor time of a training step, relative to none."""


def written_fields(kind: str) -> str:
    """The fields a scheme is tried with, as an experiment file has them."""
    fields = {**registry.encode(registry.lookup(AbstractPosition, kind)()), **SETTINGS.get(kind, {})}
    return ", ".join(f"{name}: {value}" for name, value in fields.items())


def experiment_of(kind: str, tokens: int) -> Experiment:
    text = EXPERIMENT.format(tokens=tokens, evaluated=min(tokens, EVALUATED), kind=kind, fields=written_fields(kind))
    return read(text, full_space=full_space, tasks=TASKS)


def spec_of(kind: str, tokens: int, data: TaskData, seed: int = 0) -> TrialSpec:
    experiment = experiment_of(kind, tokens)
    resolved = resolve(default_point(experiment.space), experiment, task_from_plain(experiment.task).shape())
    return make_spec(resolved, experiment, fingerprint=data.fingerprint, seeds=Seeds(init=seed, data=seed, dropout=0))


def trained(spec: TrialSpec, data: TaskData) -> tuple[float, ...]:
    """Losses at LENGTHS of a model that is trained as the spec says."""
    result = run_trial(spec, data, lambda reading: True)
    if result.status != Status.OK:
        sys.exit(f"{result.status}: {result.reason}\n{result.last_lines}")
    return tuple(result.metrics["loss" if length == LENGTHS[0] else f"loss_at/{length}"] for length in LENGTHS)


def change_when_shifted(config: ModelConfig) -> float:
    """Largest change of a log-probability when a text stands behind SHIFT columns of padding; weights are random."""
    model = dataclasses.replace(config, max_len=SHIFT + LENGTHS[0]).build(seed=0).double().eval()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (4, LENGTHS[0]), generator=generator)
    padded = F.pad(tokens, (SHIFT, 0))
    live = torch.arange(padded.shape[1]).expand_as(padded) >= SHIFT
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        here = model(tokens)[0].log_softmax(-1)
        later = model(padded, live)[0][:, SHIFT:].log_softmax(-1)
    return (later - here).abs().max().item()


def stepper(candidate: Candidate, data: TaskData) -> Callable[[int], float]:
    """A function that makes one training step and returns its processor time in seconds."""
    model = candidate.model.build(seed=0).train()
    optimizer = candidate.optimizer.build(model)

    def step(index: int) -> float:
        inputs, targets = data.batch(index, 16, 0)
        started = time.process_time()
        logits, _ = model(inputs)
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - started

    return step


def relative_step_time(candidate: Candidate, plain: Candidate, data: TaskData) -> float:
    """Time of a step over that of a step without positions: median of steps made in turns, after five of each."""
    ours, theirs = stepper(candidate, data), stepper(plain, data)
    ratios = [ours(index) / theirs(index) for index in range(TIMED_STEPS + 5)]
    return statistics.median(ratios[5:])


def measure(kind: str, tokens: int, data: TaskData) -> Measured:
    spec, plain = spec_of(kind, tokens, data), spec_of(PLAIN, tokens, data)
    candidate, other = rebuild(spec), rebuild(plain)
    mine, none = (cost.measure(each.model, LENGTHS[0]) for each in (candidate, other))
    return Measured(
        kind=kind,
        fields=written_fields(kind),
        parameters=mine.params - none.params,
        shift=change_when_shifted(candidate.model),
        losses=trained(spec, data),
        flops=mine.flops_per_token / none.flops_per_token,
        seconds=relative_step_time(candidate, other, data),
    )


def page(rows: Sequence[Measured], tokens: int, spread: Sequence[tuple[float, ...]]) -> str:
    """The document: how it was measured, the picture, a row per scheme, the least rise at 8x first."""
    span = [max(losses) - min(losses) for losses in zip(*spread, strict=True)]
    how = (
        f"Written by `python benchmarks/positions.py`. One model per scheme: 2 layers, width 64, 4 heads of 16 "
        f"channels, bytes of the Python library, {tokens // 1024} steps of 1,024 bytes at length {LENGTHS[0]}; same "
        f"data, same seed, fields at their defaults unless shown. Losses are nats per byte on the validation split; "
        f"what stands under 2x, 4x and 8x is the loss at that length minus the loss at {LENGTHS[0]}: more context "
        f"alone lowers it. One seed each: {len(spread)} seeds of `{PLAIN}` lie {span[0]:.3f} nats apart at "
        f"{LENGTHS[0]} and {span[-1]:.3f} at {LENGTHS[-1]}; differences of that size say nothing."
    )
    columns = (
        f"*Under a shift*: a model with random weights reads {LENGTHS[0]} tokens, and again {SHIFT:,} columns later "
        f"behind padding, in float64. A scheme is relative where no log-probability changes by more than {STILL:g} "
        f"nats, else absolute, with the largest change. *Step* is processor time of a training step over that of a "
        f"model without positions, in turns on one core; *FLOPs* are those of all matrix products of a forward pass, "
        f"likewise. (`p_rope` stops the two slowest of eight pairs, which hardly turn within {LENGTHS[-1]} places: it "
        f"learns and fails as `rotary` does.)"
    )
    lines = [
        "# Position schemes, measured",
        "",
        *textwrap.wrap(how, 118, break_on_hyphens=False),
        "",
        *textwrap.wrap(columns, 118, break_on_hyphens=False),
        "",
        "![rise of the loss beyond the training length, by scheme](positions.png)",
        "",
        "| scheme | under a shift | parameters | loss at 64 | 2x | 4x | 8x | step | FLOPs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=rise):
        name = f"`{row.kind}`" + (f" ({row.fields})" if row.fields else "")
        kept = "relative" if row.shift < STILL else f"absolute ({row.shift:.2g} nats)"
        first, *later = row.losses
        rises = " | ".join(f"{loss - first:+.3f}" for loss in later)
        lines.append(
            f"| {name} | {kept} | {row.parameters:,} | {first:.3f} | {rises} | {row.seconds:.2f} | {row.flops:.2f} |"
        )
    return "\n".join(lines) + "\n"


def rise(row: Measured) -> float:
    """By how much the loss is higher at the longest length than at the training length."""
    return row.losses[-1] - row.losses[0]


def draw(rows: Sequence[Measured], path: Path) -> None:
    """Two panels that share the schemes: loss at the training length, and its rise at 2x, 4x and 8x."""
    ordered = sorted(rows, key=rise, reverse=True)
    places = range(len(ordered))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9, 1.4 + 0.27 * len(rows)), sharey=True, layout="constrained", width_ratios=(1, 2)
    )
    left.plot([row.losses[0] for row in ordered], places, "ko")
    left.set_yticks(places, [row.kind for row in ordered])
    left.set(xlabel=f"loss at {LENGTHS[0]} (nats per byte)")
    for index, mark in enumerate(("o", "s", "D"), start=1):
        rises = [row.losses[index] - row.losses[0] for row in ordered]
        right.plot(rises, places, mark, label=f"{LENGTHS[index]} ({2**index}x)", markersize=5, alpha=0.8)
    right.axvline(0, color="black", linewidth=0.8)
    right.set(xlabel=f"loss at a longer length minus loss at {LENGTHS[0]} (nats per byte)")
    right.legend(title="evaluated at", loc="upper right")
    for axes in (left, right):
        axes.grid(axis="y", alpha=0.3)
    figure.suptitle(f"Trained at {LENGTHS[0]} bytes, evaluated beyond; one seed each")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = registry.variants(AbstractPosition)
    parser.add_argument("--only", nargs="+", default=list(kinds), choices=list(kinds), metavar="KIND")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="training tokens per scheme")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder to write positions.md and positions.png to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = task_from_plain(experiment_of(PLAIN, options.tokens).task).prepare()
    rows: list[Measured] = []
    for kind in options.only:
        started = time.perf_counter()
        rows.append(measure(kind, options.tokens, data))
        print(f"{rows[-1]} in {time.perf_counter() - started:.0f} s", flush=True)
    spread = [trained(spec_of(PLAIN, options.tokens, data, seed), data) for seed in range(3)]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "positions.md").write_text(page(rows, options.tokens, spread))
    draw(rows, options.out / "positions.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
