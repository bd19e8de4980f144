"""Training a candidate of a search longer, on one or several devices: plan, processes, and the run that shows it.

Its files lie beside the search's study: the last checkpoint, the events that the first process tells, its end. They go
once the run is closed as ok; until then the same command with --resume goes on from them.
"""

import dataclasses
import fcntl
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runners import long_worker
from runners.checkpoints import CheckpointRefused, find
from runners.engine import Interrupts
from runners.environment import capture
from runners.long_plan import Asked, check_devices, in_whole_batches, longer
from runners.long_processes import Processes
from runners.long_run import LongRun, begun, create
from runners.progress import Progress, in_words
from runners.stale import close_stale
from runners.store import Store
from runners.study import study_folder
from runners.tasks import task_from_plain
from runners.tasks.data import TaskData
from search_space.errors import UserError
from search_space.places import study_uri
from search_space.records import (
    DEVICES,
    Artifact,
    Reading,
    Stage,
    Status,
    Tag,
    TrialResult,
    TrialSpec,
    result_from_plain,
    to_plain,
)

if TYPE_CHECKING:
    from mlflow.entities import Run

CHECKPOINTS = 100
"""Checkpoints over the whole budget, about, where --checkpoint-tokens is 0."""
_RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of it."""

    path: str
    """Of the run: NAME/train/NUMBER."""
    result: TrialResult
    is_shown: bool
    """False when the tracking store could not be written; --resume writes it then."""


def train_longer(store: Store, asked: Asked, progress: Progress | None = None) -> Trained:
    """Train, or go on, to the end; Ctrl-C and SIGTERM end it with a checkpoint."""
    shown = progress or Progress()
    close_stale(store)
    source = store.find_run(asked.run)
    recorded = store.result(source) if store.artifact(source, Artifact.RESULT, required=False) else None
    if Tag.MUTATIONS in source.data.tags:
        raise UserError(
            f"run {asked.run}: went on from other trials' states with settings that changed on the way, for which "
            f"there is no longer schedule; assay replay {asked.run} trains the same again, and `optimizer:` in a file "
            "of your own takes the settings it ended with (assay show)"
        )
    given, asked = asked, in_whole_batches(asked, store.spec(source).budget.batch_tokens)
    if asked.tokens != given.tokens:
        print(f"--tokens {given.tokens:,}: trains {asked.tokens:,}, which are whole batches", file=sys.stderr)
    spec = longer(store.spec(source), asked, recorded)
    check_devices(spec, asked.devices)
    name = asked.name or f"{path_of(source)} longer: {asked.tokens:,} tokens"
    search = source.data.tags[Tag.SEARCH]
    parent = store.parent_of(source)
    root = study_folder(parent.data.tags.get(Tag.STUDY) or study_uri(store.place, search), search) / str(Stage.TRAIN)
    root.mkdir(parents=True, exist_ok=True)
    with _alone(root / ".lock", wait=True, what=""):
        run = begun(store, parent, spec, name)
        _check_resume(run, asked)
        if run is None:
            data = _data(store, source, spec, asked.data_path)
            run = create(store, source, spec, name, capture(spec.blocks), data)
    folder = root / run.info.run_id
    folder.mkdir(exist_ok=True)
    with _alone(folder / ".lock", wait=False, what=path_of(run)):
        held = folder / f"data-{spec.data_fingerprint[:12]}.safetensors"
        if not held.exists():
            _data(store, source, spec, asked.data_path).save(held)
        return _Training(store, run, source, spec, asked, folder, shown).carry_out(held)


def path_of(run: "Run") -> str:
    """NAME/NUMBER, NAME/final/NUMBER or NAME/train/NUMBER."""
    tags = run.data.tags
    stage = "" if tags[Tag.STAGE] == Stage.SEARCH else f"{tags[Tag.STAGE]}/"
    return f"{tags[Tag.SEARCH]}/{stage}{tags[Tag.NUMBER]}"


def _check_resume(run: "Run | None", asked: Asked) -> None:
    if run is None:
        if asked.resume:
            raise UserError(
                f"assay train {asked.run} --resume: no such training has begun; leave --resume out, or type --tokens, "
                f"--device and --name as they were"
            )
        return
    status = run.data.tags.get(Tag.STATUS, "running")
    if run.info.status == "FINISHED":
        raise UserError(
            f"assay train {asked.run}: {path_of(run)} is this training, and it has ended as {status}; "
            f"see assay show {path_of(run)}, or train anew under another --name"
        )
    if not asked.resume:
        raise UserError(
            f"assay train {asked.run}: {path_of(run)} is this training ({status}); go on with it by --resume, or train "
            f"anew under another --name"
        )


@contextmanager
def _alone(file: Path, *, wait: bool, what: str) -> Iterator[None]:
    """Hold the file's lock; UserError when another process has it, unless that is waited for."""
    with file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise UserError(f"{what}: is being trained by another process; wait for it, or stop it first") from None
        yield


def _data(store: Store, source: "Run", spec: TrialSpec, path: str) -> TaskData:
    """The data of the run: what the store holds, unless a path is given."""
    name = f"{Artifact.DATA}/{spec.data_fingerprint}.safetensors"
    held = None if path else store.artifact(store.parent_of(source), name, required=False)
    data = TaskData.load(held) if held else task_from_plain(spec.task).prepare(path)
    if data.fingerprint != spec.data_fingerprint:
        raise UserError(
            f"the data has the fingerprint {data.fingerprint}, the run was trained on {spec.data_fingerprint}; "
            f"name that data with --data PATH"
        )
    return data


class _Training:
    """One attempt at a training, from its checkpoint when it has one."""

    def __init__(
        self,
        store: Store,
        run: "Run",
        source: "Run",
        spec: TrialSpec,
        asked: Asked,
        folder: Path,
        progress: Progress,
    ) -> None:
        self._run, self._spec, self._asked, self._folder = run, spec, asked, folder
        self._progress = progress
        self._curve = self._kept_curve()
        self._shown = LongRun(store, run, source, progress.note)
        self._began = time.monotonic()
        self._first_tokens = 0

    def _kept_curve(self) -> list[Reading]:
        """Readings up to the checkpoint; UserError where there is one that nothing may go on from."""
        try:
            found = find(self._folder / long_worker.CHECKPOINT, self._spec.id, self._spec.budget.micro_batch_tokens)
        except CheckpointRefused as refusal:
            raise UserError(
                f"{path_of(self._run)}: {refusal}; bring it back, or delete the folder to train from the start"
            ) from refusal
        return list(found.curve) if found else []

    def carry_out(self, data: Path) -> Trained:
        """Train and close the run."""
        result = TrialResult(status=Status.FAILED)
        try:
            result = self._kept_result() or self._train(data)
        except BaseException as error:
            status = Status.PREEMPTED if isinstance(error, KeyboardInterrupt) else Status.FAILED
            result = TrialResult(status=status, reason=f"the driver of the training ended by {error!r}")
            raise
        finally:
            self._progress.end()
            is_shown = self._shown.finish(result, self._folder / long_worker.WEIGHTS)
        if result.status is Status.OK and is_shown:
            shutil.rmtree(self._folder)
        return Trained(path=path_of(self._run), result=result, is_shown=is_shown)

    def _kept_result(self) -> TrialResult | None:
        """The result of a training that ended well and could not be shown then."""
        file = self._folder / _RESULT
        return result_from_plain(json.loads(file.read_text())) if file.exists() else None

    def _train(self, data: Path) -> TrialResult:
        batch, tokens = self._spec.budget.batch_tokens, self._spec.budget.tokens
        every = self._asked.checkpoint_tokens or max(tokens // batch // CHECKPOINTS, 1) * batch
        used = self._note_devices()
        with (
            Interrupts() as interrupts,
            Processes(
                self._folder, self._spec, data, devices=self._asked.devices, strategy=self._asked.strategy, every=every
            ) as processes,
        ):
            for event in processes.events(interrupts):
                self._take(event)
            result = processes.result(tuple(self._curve), interrupts.asked)
        if result.environment and used != "1":
            result = dataclasses.replace(result, environment={**result.environment, DEVICES: used})
        if result.status is Status.OK:
            partial = self._folder / f"{_RESULT}.partial"
            partial.write_text(json.dumps(to_plain(result)))
            partial.replace(self._folder / _RESULT)
        return result

    def _note_devices(self) -> str:
        """On how many devices all attempts so far were trained, and how several shared the work."""
        asked, file = self._asked, self._folder / DEVICES
        now = "1" if asked.devices == 1 else f"{asked.devices} {asked.strategy}"
        before = file.read_text().splitlines() if file.exists() else []
        every = list(dict.fromkeys([*before, now]))
        file.write_text("\n".join(every))
        return ", ".join(every)

    def _take(self, event: dict[str, object]) -> None:
        if "reading" in event:
            reading = event["reading"]
            assert isinstance(reading, Reading)
            self._curve.append(reading)
            self._shown.reading(reading)
            self._show(reading.tokens)
        elif "tokens" in event:
            assert isinstance(event["tokens"], int)
            self._show(event["tokens"])
        self._shown.beat()

    def _show(self, tokens: int) -> None:
        now = time.monotonic()
        if not self._first_tokens:
            self._first_tokens, self._began = tokens, now
        pace = (tokens - self._first_tokens) / (now - self._began) if now > self._began else 0.0
        loss = self._curve[-1].loss if self._curve else None
        self._progress.show(_Line(tokens=tokens, total=self._spec.budget.tokens, loss=loss, pace=pace))


@dataclass(frozen=True, kw_only=True)
class _Line:
    """Where a training stands."""

    tokens: int
    total: int
    loss: float | None
    pace: float
    """Tokens per second."""

    def line(self) -> str:
        parts = [f"tokens {self.tokens:,}/{self.total:,}"]
        if self.loss is not None:
            parts.append(f"validation loss {self.loss:.4f}")
        if self.pace:
            parts += [f"{self.pace:,.0f} tokens/s", f"about {in_words((self.total - self.tokens) / self.pace)} left"]
        return "  ".join(parts)
