"""A small experiment and made-up results, for the tests of everything that proposes and runs trials."""

import math
from pathlib import Path

from runners.candidate import full_space
from runners.study import Proposed, Study
from runners.tasks import TASKS
from runners.tasks.data import TaskShape
from search_space.experiment import Experiment, read
from search_space.records import Reading, Status, TrialResult

EXPERIMENT = """
name: small
description: A search of tiny models
task: {mqar: {seq_len: 32, pairs: 4, vocabulary: 32, examples: 64, held_out: 16}}
budget: {tokens: 1024, batch_tokens: 128, eval_tokens: 128, eval_every: 256, max_seconds: 60}
model:
  d_model: 16
  layers: 1
  tied: true
  mixer:
    softmax: {kv_heads: 1, queries_per_kv: [1, 2], head_dim: 8, qk_norm: none}
    sliding_window: {kv_heads: 1, queries_per_kv: 1, head_dim: 8, qk_norm: none, window: [8, 16]}
  position: [none, rotary]
  ffn: {gelu: {expansion: 2.0}}
  norm: rmsnorm
  placement: pre
  init: scaled_normal
optimizer: {adamw: {learning_rate: {low: 1e-3, high: 1e-2, log: true}}}
search: {trials: 30, sampler: tpe, pruner: none, seed: 0}
engine: {device: cpu, jobs: 1}
"""
SHAPE = TaskShape(vocab_size=32, train_len=32, max_len=32)
FINITE = ("optimizer.adamw.learning_rate=0.003",)
"""Makes the space finite: 8 points."""


def experiment(*overrides: str, text: str = EXPERIMENT) -> Experiment:
    """The small experiment with overrides."""
    return read(text, full_space=full_space, tasks=TASKS, overrides=overrides)


def uri(folder: Path) -> str:
    """A study storage in the folder."""
    return f"sqlite:///{folder}/study.db"


def opened(folder: Path, *overrides: str, extend: bool = False, text: str = EXPERIMENT) -> Study:
    """The study of the small experiment, bound to made-up data."""
    study = Study.open(uri(folder), experiment(*overrides, text=text), extend=extend)
    study.bind(SHAPE, "made up")
    return study


def curve(loss: float, *, until: int = 1024) -> tuple[Reading, ...]:
    """Readings that fall to the loss at 1,024 tokens."""
    return tuple(
        Reading(tokens=tokens, loss=loss + (1024 - tokens) / 1024, train_loss=1.0, seconds=0.1)
        for tokens in range(256, until + 1, 256)
    )


def made_up(proposed: Proposed) -> TrialResult:
    """A result that depends on the point alone: best for softmax, rotary positions and a rate of 0.003."""
    point = proposed.resolved.flat
    rate = point["optimizer.adamw.learning_rate"]
    assert isinstance(rate, float)
    loss = 1.0 + abs(math.log10(rate / 0.003))
    loss += 0.3 * (point["model.mixer.kind"] != "softmax") + 0.2 * (point["model.position.kind"] != "rotary")
    return ok(loss)


def ok(loss: float) -> TrialResult:
    """A finished trial."""
    return TrialResult(
        status=Status.OK, metrics={"loss": loss, "tokens_per_second": 1.0}, curve=curve(loss), tokens=1024, seconds=0.1
    )


def broken(status: Status = Status.DIVERGED) -> TrialResult:
    """A trial that ended badly after two readings."""
    return TrialResult(status=status, reason="made up", curve=curve(5.0, until=512), tokens=512, seconds=0.1)


def points(study: Study) -> list[dict[str, object]]:
    """The points of all trials, by number."""
    return [dict(entry.point) for entry in study.trials()]
