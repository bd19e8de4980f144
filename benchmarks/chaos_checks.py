"""What must hold of a search after any number of kills: nothing lost, doubled, changed or left running."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fake_trials import SECONDS

from runners.audit import audit
from runners.candidate import full_space
from runners.ledger import Entry, Ledger, exists
from runners.search import run_search
from runners.store import Store
from runners.study import Study
from runners.tasks import TASKS, task_from_plain
from runners.telling import directions
from runners.tracking import Tracker
from runners.warm import FINGERPRINT
from search_space.experiment import Experiment, read
from search_space.places import locate
from search_space.records import Artifact, Metric, Stage, Status, Tag

TEXT = """
name: {name}
task: {{mqar: {{seq_len: 32, pairs: 4, vocabulary: 32, examples: 64, held_out: 16}}}}
budget: {{tokens: 1024, batch_tokens: 128, eval_tokens: 128, eval_every: 256, max_seconds: 60}}
model:
  d_model: 16
  layers: 1
  tied: true
  mixer:
    softmax: {{kv_heads: 1, queries_per_kv: [1, 2], head_dim: 8, qk_norm: none}}
    sliding_window: {{kv_heads: 1, queries_per_kv: 1, head_dim: 8, qk_norm: none, window: [8, 16]}}
  position: [none, rotary]
  ffn: {{gelu: {{expansion: 2.0}}}}
  norm: rmsnorm
  placement: pre
  init: scaled_normal
optimizer: {{adamw: {{learning_rate: {{low: 1e-3, high: 1e-2, log: true}}}}}}
search: {{trials: 30, sampler: tpe, pruner: none, seed: 0}}
engine: {{device: cpu, jobs: 1}}
"""
"""The experiment; its trials are made up, so it only has to be proposed and shown."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A search that ended after kills, and where its undisturbed twin is to run."""

    folder: Path
    name: str
    overrides: tuple[str, ...]
    shown: str
    """Tracking store, read from its database."""


@dataclass
class Found:
    """What checks of searches found."""

    trials: int = 0
    lost: int = 0
    doubled: int = 0
    running: int = 0
    compared: int = 0
    audited: int = 0
    again: int = 0
    """Attempts that were taken away and made again."""
    faults: list[str] = field(default_factory=list)

    def __add__(self, other: "Found") -> "Found":
        """Both together."""
        return Found(**{name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__})

    def __str__(self) -> str:
        return (
            f"{self.trials} trials, {self.again} attempts taken away: {self.lost} lost, {self.doubled} doubled, "
            f"{self.running} runs RUNNING, {self.compared} equal to the undisturbed search, {self.audited} proposals "
            f"proved, {len(self.faults)} faults"
        )


def shown_by(folder: Path) -> str:
    """The server's database, read without the server."""
    return f"sqlite:///{folder}/mlflow.db"


def checked(comparison: Comparison, context: Any) -> Found:
    """What all checks find; they run in a process of their own, whose memory goes with it."""
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_check, args=(comparison, send))
    process.start()
    send.close()
    found: Found = receive.recv()
    process.join()
    return found


def _check(comparison: Comparison, answer: Connection) -> None:
    experiment = read(
        TEXT.format(name=comparison.name), full_space=full_space, tasks=TASKS, overrides=comparison.overrides
    )
    found = Found()
    with Study.open(f"sqlite:///{comparison.folder}/{comparison.name}.db", experiment) as study:
        study.bind(task_from_plain(experiment.task).shape(), study.noted(FINGERPRINT, ""))
        entries = {stage: list(_entries(study, stage)) for stage in (Stage.SEARCH, Stage.FINAL)}
        for audited in audit(study):
            found.audited += audited.holds is True
            if audited.drawn and not audited.holds:
                found.faults.append(f"{comparison.name}/{audited.number}: {audited.why}")
    for stage, stored in entries.items():
        _check_study(found, comparison, experiment, stage, stored)
    if experiment.engine.jobs == 1:
        _compare(found, comparison, experiment, entries)
    _check_store(found, comparison, [entry for stored in entries.values() for entry in stored])
    answer.send(found)


def _entries(study: Study, stage: Stage) -> Iterator[Entry]:
    if stage is Stage.SEARCH:
        yield from study.trials()
    elif exists(study.storage, name := f"{study.experiment.name}/{study.generation}/{stage}"):
        yield from Ledger(study.storage, name, directions([Metric.LOSS])).entries()


def _check_study(
    found: Found, comparison: Comparison, experiment: Experiment, stage: Stage, entries: list[Entry]
) -> None:
    found.trials += len(entries)
    if stage is Stage.SEARCH:
        found.lost += experiment.search.trials - len(entries)
    found.again += sum(len(entry.attempts) for entry in entries)
    for entry in entries:
        where = f"{comparison.name}/{stage}/{entry.number}"
        if entry.result is None or not entry.settled:
            found.lost += 1
            found.faults.append(f"{where}: has no settled end in the study")
        elif entry.result.status not in (Status.OK, Status.PRUNED, Status.DIVERGED):
            found.faults.append(f"{where}: ended as {entry.result.status}: {entry.result.reason}")
        if [each["status"] for each in entry.attempts if each["status"] != Status.PREEMPTED]:
            found.faults.append(f"{where}: earlier attempts {entry.attempts}")


def _compare(found: Found, comparison: Comparison, experiment: Experiment, entries: dict[Stage, list[Entry]]) -> None:
    """With the search of the same seed that nobody disturbs, on the local engine, without sleep."""
    os.environ[SECONDS] = "0"
    place = comparison.folder / "whole"
    place.mkdir(exist_ok=True)
    overrides = (*comparison.overrides, "engine.kind=local")
    twin = read(TEXT.format(name=comparison.name), full_space=full_space, tasks=TASKS, overrides=overrides)
    study_uri = f"sqlite:///{place}/{comparison.name}.db"
    run_search(twin, tracker=Tracker(f"sqlite:///{place}/mlflow.db"), study_uri=study_uri, trials="fake_trials:made_up")
    with Study.open(study_uri, twin) as study:
        for stage, stored in entries.items():
            whole = list(_entries(study, stage))
            if len(whole) != len(stored):
                found.faults.append(f"{comparison.name}: {len(stored)} {stage} trials, undisturbed {len(whole)}")
            for ours, theirs in zip(stored, whole, strict=False):
                differing = [what for what, value in _told(ours).items() if _told(theirs)[what] != value]
                found.compared += not differing
                if differing:
                    found.faults.append(f"{comparison.name}/{stage}/{ours.number}: differs in {', '.join(differing)}")


def _told(entry: Entry) -> dict[str, object]:
    """What must not depend on kills: all but times."""
    result = entry.result
    return {
        "number": entry.number,
        "point": dict(entry.point),
        "spec": entry.spec.id,
        "redraws": entry.marks.get("redraws"),
        "history": entry.marks.get("history"),
        "status": result and result.status,
        "curve": result and [(reading.tokens, reading.loss) for reading in result.curve],
        "loss": result and result.metrics.get(Metric.LOSS),
    }


def _check_store(found: Found, comparison: Comparison, entries: list[Entry]) -> None:
    """Each trial has one run, with its end, its losses and every step once."""
    store = Store(locate(comparison.shown))
    parent = store.parent(comparison.name)
    runs = store.runs([parent.info.experiment_id])
    unfinished = [run.info.run_name for run in runs if run.info.status != "FINISHED"]
    found.running += len([run for run in runs if run.info.status == "RUNNING"])
    if unfinished:
        found.faults.append(f"{comparison.name}: not FINISHED in the store: {unfinished}")
    keys = Counter(run.data.tags[Tag.KEY] for run in runs)
    found.doubled += sum(count - 1 for count in keys.values())
    trials = [run for run in runs if run.data.tags[Tag.KIND] == "trial"]
    children = {(run.data.tags[Tag.STAGE], int(run.data.tags[Tag.NUMBER])): run for run in trials}
    strangers = [run for run in trials if run.data.tags.get("mlflow.parentRunId") != parent.info.run_id]
    found.faults.extend(f"{run.data.tags[Tag.KEY]}: is no child of its search" for run in strangers)
    for entry in entries:
        _check_run(found, comparison.name, entry, children, store)
    if len(trials) != len(entries):
        found.faults.append(f"{comparison.name}: the store shows {len(trials)} trials of {len(entries)}")


def _check_run(found: Found, search: str, entry: Entry, children: dict[Any, Any], store: Store) -> None:
    stage = Stage.FINAL if "contrast" in entry.marks else Stage.SEARCH
    where = f"{search}/{stage}/{entry.number}"
    run = children.get((stage, entry.number))
    if run is None:
        found.lost += 1
        found.faults.append(f"{where}: has no run in the store")
        return
    assert entry.result is not None
    points = store.client.get_metric_history(run.info.run_id, Metric.VALIDATION_CURVE)
    written = [(point.step, point.value) for point in sorted(points, key=lambda point: (point.timestamp, point.step))]
    if written != [(reading.tokens, reading.loss) for reading in entry.result.curve]:
        found.faults.append(f"{where}: the store shows the curve {written}")
    losses = [point.value for point in store.client.get_metric_history(run.info.run_id, Metric.LOSS)]
    if losses != [value for name, value in entry.result.metrics.items() if name == Metric.LOSS]:
        found.faults.append(f"{where}: the store shows the losses {losses}")
    if run.data.tags.get(Tag.STATUS) != entry.result.status:
        found.faults.append(f"{where}: the store says {run.data.tags.get(Tag.STATUS)}, not {entry.result.status}")
    if store.result(run) != entry.result:
        found.faults.append(f"{where}: the store keeps another result")
    if stage is Stage.SEARCH and entry.result.status is Status.OK:
        model = store.artifact(run, Artifact.MODEL, required=False)
        if model is None or model.read_text() != entry.spec.id:
            found.faults.append(f"{where}: its model is not in the store")
