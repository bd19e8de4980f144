"""Specs of small trials, made the way a search makes them: an experiment text, a point, a spec."""

from collections.abc import Callable
from dataclasses import dataclass

from runners.candidate import Resolved, full_space, make_spec, resolve
from runners.tasks import TASKS, TaskData, task_from_plain
from runners.train import run_trial
from search_space.domains import Scalar
from search_space.experiment import Experiment, read
from search_space.records import Reading, Seeds, TrialResult, TrialSpec
from search_space.space import default_point

SMALL = """
task:
  mqar: {seq_len: 16, pairs: 2, vocabulary: 16, examples: 256, held_out: 32}
budget: {tokens: 2560, batch_tokens: 128, micro_batch_tokens: 128, eval_tokens: 512, eval_every: 640}
model:
  d_model: 16
  layers: 1
  mixer: {softmax: {kv_heads: 2, queries_per_kv: 1, head_dim: 8, qk_norm: none}}
  position: rotary
  tied: true
  ffn: {gelu: {expansion: 4.0}}
  norm: layernorm
  placement: pre
  init: xavier
optimizer: {adamw: {learning_rate: 1e-2}}
search: {trials: 1}
engine: {jobs: 1, device: cpu}
"""

BYTES = """
task:
  python_source: {seq_len: 32, max_bytes: 262144}
budget: {tokens: 16384, batch_tokens: 512, eval_tokens: 2048, eval_every: 4096}
model:
  d_model: 32
  layers: 2
  mixer: {softmax: {kv_heads: 2, queries_per_kv: 1, head_dim: 16, qk_norm: none}}
  position: rotary
  tied: true
  ffn: {swiglu: {expansion: 4.0}}
  norm: rmsnorm
  placement: pre
  init: xavier
optimizer: {adamw: {learning_rate: 1e-2}}
search: {trials: 1}
engine: {jobs: 1, device: cpu}
"""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything run_trial needs, and where it came from."""

    experiment: Experiment
    resolved: Resolved
    data: TaskData
    spec: TrialSpec


def experiment_of(text: str = SMALL, *overrides: str) -> Experiment:
    """The experiment of a text with overrides 'path=value'."""
    return read(text, full_space=full_space, tasks=TASKS, overrides=overrides, name="small")


def prepare(
    *overrides: str,
    text: str = SMALL,
    init: int = 0,
    data: int = 0,
    dropout: int = 0,
    point: dict[str, Scalar] | None = None,
) -> Prepared:
    """The spec and data of one candidate of an experiment: the default point, or a given one."""
    experiment = experiment_of(text, *overrides)
    task = task_from_plain(experiment.task)
    task_data = task.prepare()
    resolved = resolve(point or default_point(experiment.space), experiment, task.shape())
    seeds = Seeds(init=init, data=data, dropout=dropout)
    spec = make_spec(resolved, experiment, fingerprint=task_data.fingerprint, seeds=seeds)
    return Prepared(experiment=experiment, resolved=resolved, data=task_data, spec=spec)


def keep_going(reading: Reading) -> bool:
    """A report that prunes nothing."""
    return True


def run(made: Prepared, report: Callable[[Reading], bool] = keep_going, **options: bool) -> TrialResult:
    """The trial of a prepared spec."""
    return run_trial(made.spec, made.data, report, **options)


def losses(result: TrialResult) -> list[float]:
    """Every loss of every reading."""
    return [value for reading in result.curve for value in (reading.loss, reading.train_loss)]
