"""A small real search, driven by hand, for the tests of everything that reads or writes the tracking store."""

import atexit
import functools
import json
import random
import shutil
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from runners.candidate import Resolved, full_space, make_spec, resolve
from runners.connecting import connect
from runners.environment import Environment, capture
from runners.store import Store
from runners.tasks import TASKS
from runners.tasks.data import AbstractTask, TaskData
from runners.tracking import Tracker
from runners.train import run_trial
from search_space.canon import seed_from
from search_space.experiment import Experiment, read
from search_space.places import locate
from search_space.records import Artifact, Metric, Reading, Seeds, Stage, Status, Tag, TrialResult, TrialSpec
from search_space.space import random_point

RECALL = "{mqar: {seq_len: 32, pairs: 4, vocabulary: 32, examples: 256, held_out: 32}}"
EXPERIMENT = """
name: {name}
description: A search of three tiny models
task: {task}
blocks: {blocks}
budget: {{tokens: 8192, batch_tokens: 512, eval_tokens: 512, eval_every: 2048}}
model:
  d_model: 32
  layers: 1
  mixer:
    softmax: {{kv_heads: 1, queries_per_kv: [1, 2], head_dim: 16}}
    sliding_window: {{kv_heads: 1, queries_per_kv: 1, head_dim: 16, window: 8}}
  position: [none, rotary]
  ffn: gelu
  norm: {norm}
optimizer: {{adamw: {{learning_rate: {{low: 1e-3, high: 1e-2, log: true}}}}}}
search: {{trials: 3, sampler: random}}
"""


@dataclass(frozen=True, kw_only=True)
class Searched:
    """What a driver holds while it writes a search."""

    experiment: Experiment
    data: TaskData
    environment: Environment

    def trial(self, number: int, seed: int = 0) -> tuple[TrialSpec, Resolved]:
        """The spec and candidate of a trial; equal for equal numbers."""
        shape = task_of(self.experiment).shape()
        point = random_point(self.experiment.space, random.Random(number))
        resolved = resolve(point, self.experiment, shape)
        seeds = Seeds(init=seed_from(seed, "init"), data=seed_from(seed, "data"), dropout=seed_from(seed, "dropout"))
        spec = make_spec(resolved, self.experiment, fingerprint=self.data.fingerprint, seeds=seeds)
        return spec, resolved

    def start(self, tracker: Tracker) -> str:
        """Open the search in a store."""
        return tracker.start_search(self.experiment, self.experiment.space.id, self.data, self.environment)

    def start_trial(self, tracker: Tracker, number: int, stage: Stage = Stage.SEARCH, **tags: str) -> str:
        """Open a trial in a store."""
        spec, resolved = self.trial(number)
        return tracker.start_trial(number, stage, 0, spec, resolved, f"{number:03d} tiny", tags)


def experiment_text(name: str = "tiny", *, task: str = RECALL, norm: str = "rmsnorm", blocks: str = "[]") -> str:
    """The tiny search's experiment file."""
    return EXPERIMENT.format(name=name, task=task, norm=norm, blocks=blocks)


def searched(name: str = "tiny", *, task: str = RECALL, norm: str = "rmsnorm", blocks: str = "[]") -> Searched:
    """The tiny search under a name."""
    text = experiment_text(name, task=task, norm=norm, blocks=blocks)
    experiment = read(text, full_space=full_space, tasks=TASKS)
    return Searched(experiment=experiment, data=task_of(experiment).prepare(), environment=capture(experiment.blocks))


def task_of(experiment: Experiment) -> AbstractTask:
    """The experiment's task."""
    kind = experiment.task["kind"]
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in experiment.task[kind].items()}
    task: AbstractTask = TASKS[kind](**fields)
    return task


def train_search(
    uri: str,
    *,
    trials: int,
    search: Searched | None = None,
    prune_at: Mapping[int, int] | None = None,
    keep_weights: tuple[int, ...] = (),
    stage: Stage = Stage.SEARCH,
) -> None:
    """Really train the first trials of a search into a store."""
    search, tracker = search or searched(), Tracker(uri)
    search.start(tracker)
    for number in range(trials):
        run = search.start_trial(tracker, number, stage)
        stop = (prune_at or {}).get(number, 1 << 60)

        def report(reading: Reading, run: str = run, stop: int = stop) -> bool:
            tracker.log_reading(run, reading)
            return reading.tokens < stop

        with tempfile.TemporaryDirectory() as folder:
            weights = Path(folder) / "model.safetensors" if number in keep_weights else None
            done = run_trial(search.trial(number)[0], search.data, report, weights=weights, test=stage == Stage.FINAL)
            assert done.status in (Status.OK, Status.PRUNED), done.last_lines
            tracker.finish_trial(run, done, weights)
    tracker.finish_search("FINISHED")


def readings(count: int) -> tuple[Reading, ...]:
    """A falling curve."""
    return tuple(
        Reading(tokens=2048 * i, loss=3.0 - i / 10, train_loss=3.1 - i / 10, seconds=0.1 * i) for i in range(count)
    )


def result(status: Status = Status.OK, count: int = 4, **changes: object) -> TrialResult:
    """What a trial with so many readings came to."""
    curve = readings(count)
    metrics = {"loss": curve[-1].loss, "seconds": 0.5} if curve else {}
    tokens = curve[-1].tokens if curve else 0
    whole = {"status": status, "metrics": metrics, "curve": curve, "tokens": tokens, "seconds": 0.5, **changes}
    return TrialResult(**whole)  # type: ignore[arg-type]


def free_port() -> int:
    """A port on loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def store_uri(folder: Path) -> str:
    """A SQLite store in a folder, empty at first; its schema is copied, since creating it takes seconds."""
    database = folder / "mlruns/mlflow.db"
    if not database.exists():
        database.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_empty_store(), database)
    return f"sqlite:///{database}"


@functools.cache
def _empty_store() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="assay-test-store-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    connect(locate(f"sqlite:///{folder}/mlflow.db"))
    return folder / "mlflow.db"


def children(uri: str, name: str = "tiny") -> list[Run]:
    """The trials of a search."""
    store = Store(locate(uri))
    return store.children(store.parent(name))


def write_search(uri: str, trials: int = 2, name: str = "tiny") -> str:
    """A finished search of made-up results; its parent run."""
    search, tracker = searched(name), Tracker(uri)
    parent = search.start(tracker)
    for number in range(trials):
        run = search.start_trial(tracker, number)
        for reading in readings(3):
            tracker.log_reading(run, reading)
        tracker.finish_trial(run, result())
    tracker.finish_search("FINISHED", {"best_loss": 2.7})
    return parent


def steps(client: MlflowClient, run: Run, metric: str) -> list[int]:
    """Every step at which a metric was logged."""
    return sorted(point.step for point in client.get_metric_history(run.info.run_id, metric))


def check_written(uri: str, parent: str) -> None:
    """What any store must hold of `write_search`."""
    store = Store(locate(uri))
    run = store.client.get_run(parent)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "tiny")
    assert run.data.metrics["best_loss"] == 2.7
    assert run.data.params["task.kind"] == "mqar"
    assert "tiny" in run.data.tags[Tag.NOTE]
    assert run.inputs.dataset_inputs[0].dataset.name == "mqar"
    assert "name: tiny" in store.text(run, Artifact.EXPERIMENT)
    assert json.loads(store.text(run, Artifact.ENVIRONMENT))["packages"]["torch"]
    assert "mlflow==" in store.text(run, Artifact.LOCK)
    fingerprint = run.data.tags[Tag.FINGERPRINT]
    assert store.artifact(run, f"{Artifact.DATA}/{fingerprint}.safetensors")
    trials = store.children(run)
    assert [trial.data.tags[Tag.NUMBER] for trial in trials] == ["0", "1"]
    for number, trial in enumerate(trials):
        spec, _ = searched().trial(number)
        assert store.spec(trial) == spec
        assert store.result(trial) == result()
        assert trial.data.tags["mlflow.parentRunId"] == parent
        assert trial.data.tags[Tag.STATUS] == "ok"
        assert trial.info.status == "FINISHED"
        assert trial.data.params["model.mixer.kind"] in ("softmax", "sliding_window")
        assert trial.data.params["model.d_ff"] == str(spec.candidate["model"]["d_ff"])
        assert steps(store.client, trial, Metric.VALIDATION_CURVE) == [0, 2048, 4096, 6144]
        assert steps(store.client, trial, Metric.LOSS) == [6144]
        assert trial.inputs.dataset_inputs[0].dataset.digest == fingerprint[:12]
    import pyarrow.parquet as parquet

    folder = store.artifact(run, Artifact.CURVES)
    assert folder is not None
    rows = [row for shard in folder.glob("*.parquet") for row in parquet.read_table(shard).to_pylist()]
    assert len(rows) == 8
    assert {row["run"] for row in rows} == {trial.info.run_id for trial in trials}
