"""The MLflow run of a long training: a child of the search it was taken from, written by the training's driver alone.

It is closed by its own driver, or by whoever finds that driver dead; the search's driver leaves it alone.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from runners import rows
from runners.artifacts import ArtifactWriter, write
from runners.driver import this_driver
from runners.environment import Environment
from runners.openrun import OpenRun
from runners.shared import store_environment
from runners.store import Store
from search_space.canon import canonical_json
from search_space.records import (
    TERMINAL,
    Artifact,
    Reading,
    Stage,
    Status,
    Tag,
    TrialResult,
    TrialSpec,
    to_plain,
)

if TYPE_CHECKING:
    from mlflow.entities import Run

    from runners.tasks.data import TaskData

BEAT_SECONDS = 20.0


def begun(store: Store, parent: "Run", spec: TrialSpec, name: str) -> "Run | None":
    """The run of this training; None when there is none."""
    found = [
        run
        for run in store.children(parent)
        if run.data.tags[Tag.STAGE] == Stage.TRAIN
        and run.data.tags.get(Tag.SPEC) == spec.id
        and run.info.run_name == name
    ]
    return found[0] if found else None


def create(
    store: Store, source: "Run", spec: TrialSpec, name: str, environment: Environment, data: "TaskData"
) -> "Run":
    """A new run for the candidate of a run, numbered after those there are."""
    parent, tags = store.parent_of(source), source.data.tags
    trained = [run for run in store.children(parent) if run.data.tags[Tag.STAGE] == Stage.TRAIN]
    number = max((int(run.data.tags[Tag.NUMBER]) for run in trained), default=-1) + 1
    generation = tags.get(Tag.GENERATION, "0")
    path = f"{tags[Tag.SEARCH]}/{Stage.TRAIN}/{number}"
    kept = (Tag.SEARCH, Tag.SPACE, Tag.ARCH, Tag.FINGERPRINT, Tag.CAUTIONS, "mlflow.parentRunId")
    given = {
        **{tag: tags[tag] for tag in kept if tag in tags},
        Tag.KIND: "trial",
        Tag.KEY: f"{tags[Tag.SEARCH]}/{generation}/{Stage.TRAIN}/{number}",
        Tag.NUMBER: str(number),
        Tag.STAGE: str(Stage.TRAIN),
        Tag.GENERATION: generation,
        Tag.SPEC: spec.id,
        Tag.POINT: spec.point_id,
        Tag.DETERMINISTIC: str(spec.deterministic).lower(),
        Tag.ENVIRONMENT: environment.id,
        Tag.TRAINED_FROM: source.info.run_id,
        Tag.DRIVER: this_driver(),
        Tag.BEAT: str(int(time.time())),
        Tag.NOTE: _note(path, source, spec),
    }
    store_environment(ArtifactWriter(store.client, store.place, parent), environment)
    stamp = int(time.time() * 1000)
    run = write(lambda: store.client.create_run(source.info.experiment_id, stamp, given, name))
    write(lambda: store.client.log_inputs(run.info.run_id, datasets=[rows.dataset(spec.task, data)]))
    ArtifactWriter(store.client, store.place, run).put_text(Artifact.SPEC, canonical_json(to_plain(spec)))
    return run


def _note(path: str, source: "Run", spec: TrialSpec) -> str:
    search = source.data.tags[Tag.SEARCH]
    return "\n".join(
        [
            f"### {path}",
            f"the candidate of {search}: {source.info.run_name} (`{source.info.run_id}`), trained on "
            f"{spec.budget.tokens:,} tokens",
            "",
            f"`assay show {path}`, `assay export {path} --to FOLDER`",
        ]
    )


class LongRun:
    """Writes the run. A store that fails costs the view for a while: what could not be sent is sent later."""

    def __init__(self, store: Store, run: "Run", source: "Run", warn: Callable[[str], None]) -> None:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        self._errors = (MlflowException, OSError, SQLAlchemyError)
        self._client = store.client
        self._warn = warn
        self._warned = False
        self._next_beat = 0.0
        run_id = run.info.run_id
        steps = {
            metric: {point.step for point in store.client.get_metric_history(run_id, metric)}
            for metric in run.data.metrics
        }
        self._opened = OpenRun(
            run_id=run_id,
            number=int(run.data.tags[Tag.NUMBER]),
            stage=Stage.TRAIN,
            files=ArtifactWriter(store.client, store.place, run),
            params={name: value for name, value in source.data.params.items() if name not in run.data.params},
            tags={Tag.DRIVER: this_driver()},
            started=run.info.start_time / 1000,
            steps=steps,
        )
        for tag in (Tag.STATUS, Tag.REASON):
            if tag in run.data.tags:
                store.client.delete_tag(run_id, tag)
        write(lambda: store.client.update_run(run_id, status="RUNNING"))
        self._opened.send(store.client)

    def reading(self, reading: Reading) -> None:
        """Add a reading to the curve."""
        self._opened.take_reading(reading, self._opened.stamp(reading.seconds))
        self._attempt(lambda: self._opened.send(self._client))

    def beat(self) -> None:
        """Show now and then that the driver lives."""
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + BEAT_SECONDS
            self._opened.tags[Tag.BEAT] = str(int(time.time()))
            self._attempt(lambda: self._opened.send(self._client))

    def finish(self, result: TrialResult, weights: Path) -> bool:
        """Close the run with what it came to; False when the store failed, and then it may be called again."""
        return self._attempt(lambda: self._finish(result, weights))

    def _finish(self, result: TrialResult, weights: Path) -> None:
        opened = self._opened
        for reading in result.curve:
            opened.take_reading(reading, opened.stamp(reading.seconds))
        opened.tags.update(rows.result_tags(result))
        if result.last_lines:
            opened.files.put_text(Artifact.TRACEBACK, result.last_lines)
        else:
            opened.files.remove(Artifact.TRACEBACK)
        if result.status != Status.PREEMPTED:
            for name, value in result.metrics.items():
                opened.take(name, value, result.tokens, opened.stamp(result.seconds))
            opened.files.put_text(Artifact.RESULT, rows.result_json(result))
            if weights.exists():
                opened.files.put(Artifact.MODEL, weights)
        opened.send(self._client)
        write(lambda: self._client.set_terminated(opened.run_id, TERMINAL[result.status]))

    def _attempt(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except self._errors as error:
            if not self._warned:
                said = (str(error).splitlines() or [""])[0]
                self._warn(f"the tracking store cannot be written ({type(error).__name__}: {said}); training goes on")
            self._warned = True
            return False
        self._warned = False
        return True
