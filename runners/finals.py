"""Paired finals: the best trial against itself with one change, trained again with the same seeds and the same data.

Their results never steer the sampler. A contrast's base is chosen once, when its first final is stored.
"""

import dataclasses
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blocks.families import InfeasibleArchitecture
from runners.attempts import CHECKPOINTS, Attempts
from runners.candidate import Resolved, make_spec, resolve
from runners.engine import AbstractSource, Job
from runners.generations import study_name
from runners.ledger import Entry, Ledger
from runners.progress import Progress, Snapshot
from runners.recorder import Recorder
from runners.showing import Shown, final_trial, part_of
from runners.study import Study, study_folder
from runners.telling import as_resolved, directions, objective_values
from search_space.canon import digest, seed_from
from search_space.contest import CONTEST
from search_space.records import BASE, CHANGED, Metric, Reading, Seeds, Stage, Status, TrialResult

if TYPE_CHECKING:
    from search_space.experiment import Contrast


@dataclass(frozen=True, kw_only=True)
class FinalOutcome:
    """How the finals of one contrast stand."""

    contrast: str
    base: int
    """Number of the trial that was trained again; -1 when no trial is ok and really changed."""
    done: int
    total: int
    skipped: str
    """Why there is no final; empty when there is one."""


class Finals(AbstractSource):
    """Trials of the final stage; those that an earlier driver finished are not run again."""

    def __init__(self, study: Study, recorder: Recorder, progress: Progress, *, retry: bool = False) -> None:
        """With `retry` none is planned."""
        self._study = study
        self._experiment = study.experiment
        self._recorder = recorder
        self._progress = progress
        self._retry = retry
        name = f"{study_name(self._experiment.name, study.generation)}/final"
        self._ledger = Ledger(study.storage, name, directions([Metric.LOSS]))
        folder = study_folder(study.storage.url, self._experiment.name) / CHECKPOINTS
        self._attempts = Attempts(folder, Stage.FINAL, self._experiment.engine, self._ledger.attempted)
        self._planned: Iterator[Entry] | None = None
        self._left: deque[int] = deque()
        self._active: dict[int, Shown] = {}
        self._skipped: dict[str, str] = {}
        self.deadline = float("inf")

    def next(self) -> Job | None:
        if self._planned is None:
            self._catch_up()
            self._attempts.tidy(self._ledger.entries())
            # A contest that was cut off keeps its trainings in the same ledger; they are its own to go on with.
            self._left.extend(
                entry.number
                for entry in self._ledger.entries()
                if entry.result is None and entry.marks["contrast"] != CONTEST
            )
            self._planned = iter(()) if self._retry else self._plan()
        while (entry := self._next_entry()) is not None:
            twin = self._twin(entry)
            shown = final_trial(entry, twin)
            if twin is None:
                return self._start(entry, shown)
            assert twin.result is not None
            self._recorder.begin(dataclasses.replace(shown, anew=True))
            self._end(entry.number, shown, twin.result)
        return None

    def _start(self, entry: Entry, shown: Shown) -> Job:
        """Train a final, or go on with it."""
        start = self._attempts.start(entry, weights=None, test=True)
        shown = dataclasses.replace(shown, anew=not start.began)
        self._active[entry.number] = shown
        self._recorder.begin(shown)
        for reading in start.curve:
            self._recorder.reading(shown, reading)
        self.show()
        return start.job

    def _next_entry(self) -> Entry | None:
        if self._left:
            return self._ledger[self._left.popleft()]
        assert self._planned is not None
        entry = next(self._planned, None)
        if entry is None:
            return None
        self._ledger.add(entry, {})
        return self._ledger[entry.number]

    def _twin(self, entry: Entry) -> Entry | None:
        """A finished final of another contrast with the same spec: equal numbers are not trained twice."""
        same = (other for other in self._ledger.entries() if other.spec.id == entry.spec.id)
        return next((other for other in same if other.result is not None and other.result.status is Status.OK), None)

    def report(self, key: int, reading: Reading) -> bool:
        return True

    def follow(self, key: int, reading: Reading) -> None:
        self._recorder.reading(self._active[key], reading)

    def finish(self, key: int, result: TrialResult) -> None:
        shown = self._active.pop(key)
        ended = self._attempts.end(self._ledger[key], result)
        if ended is not None:
            self._end(key, shown, ended)
            return
        self._progress.note(f"final {key} is run again: {result.status}: {result.reason}")
        self._recorder.preempt(shown, f"{result.reason}; it is run again")
        self._left.appendleft(key)

    def _end(self, key: int, shown: Shown, result: TrialResult) -> None:
        self._ledger.record(key, result)
        self._recorder.finish(shown, result)
        self.show()

    def tick(self) -> bool:
        self._study.crew.beat()
        self.settle_shown()
        return time.monotonic() <= self.deadline

    def cut_off(self, why: str) -> None:
        """Mark what still runs as preempted; it stays in the study to be run again."""
        for shown in self._active.values():
            self._recorder.preempt(shown, f"cut off by {why}; the same command runs it again")

    def outcomes(self) -> tuple[FinalOutcome, ...]:
        """How each contrast stands."""
        ended = Counter(str(e.marks["contrast"]) for e in self._ledger.entries() if e.result is not None)
        return tuple(
            FinalOutcome(
                contrast=contrast.name,
                base=self._ledger.noted(_base_key(contrast), -1),
                done=ended[contrast.name],
                total=2 * self._experiment.final.seeds,
                skipped=self._skipped.get(contrast.name, ""),
            )
            for contrast in self._experiment.final.contrasts
        )

    def _catch_up(self) -> None:
        for entry in self._ledger.unfinished():
            if entry.result is not None:
                self._recorder.finish(final_trial(entry), entry.result)

    def settle_shown(self) -> None:
        """Close in the study what the tracking store shows by now."""
        entries = [self._ledger[shown.number] for shown in self._recorder.ended(Stage.FINAL)]
        self._ledger.settle({e.number: objective_values([Metric.LOSS], e) for e in entries if not e.settled})

    def _plan(self) -> Iterator[Entry]:
        """The finals that are not stored yet, replica by replica, both sides in turn."""
        stored = {part_of(entry) for entry in self._ledger.entries()}
        for contrast in self._experiment.final.contrasts:
            sides = self._sides(contrast)
            for replica in range(self._experiment.final.seeds):
                for side, resolved in sides.items():
                    if (contrast.name, side, replica) not in stored:
                        yield self._entry(contrast, side, replica, resolved)

    def _sides(self, contrast: "Contrast") -> dict[str, Resolved]:
        """Both candidates of a contrast; nothing when no trial that is ok would really change."""
        chosen = self._ledger.noted(_base_key(contrast), -1)
        ended = ((entry, entry.result) for entry in self._study.trials() if entry.result is not None)
        finished = [e for e, result in ended if result.status is Status.OK and Metric.LOSS in result.metrics]
        for base in sorted(finished, key=_loss):
            if chosen in (-1, base.number):
                changed = self._changed(base, contrast)
                if changed is not None:
                    self._ledger.note(_base_key(contrast), base.number)
                    return {BASE: as_resolved(base), CHANGED: changed}
        self._skipped[contrast.name] = (
            f"no trial that is ok becomes another trainable candidate by {dict(contrast.change)}"
            if finished
            else "no trial is ok"
        )
        self._progress.note(f"final {contrast.name!r} left out: {self._skipped[contrast.name]}")
        return {}

    def _changed(self, base: Entry, contrast: "Contrast") -> Resolved | None:
        if not contrast.change:
            return as_resolved(base)
        point = self._experiment.changed(base.point, contrast)
        if point == dict(base.point):
            return None
        try:
            self._study.guard.check(point, self._study.shape)
            changed = resolve(point, self._experiment, self._study.shape)
        except InfeasibleArchitecture:
            return None
        plain = make_spec(changed, self._experiment, fingerprint="", seeds=base.spec.seeds).candidate
        return None if digest(plain) == digest(base.spec.candidate) else changed

    def _entry(self, contrast: "Contrast", side: str, replica: int, resolved: Resolved) -> Entry:
        """A final; a contrast without a change differs in its seeds of init and dropout alone."""
        seed = self._experiment.search.seed
        stream = "other" if side == CHANGED and not contrast.change else "final"
        seeds = Seeds(
            init=seed_from(seed, stream, "init", replica),
            data=seed_from(seed, "final", "data", replica),
            dropout=seed_from(seed, stream, "dropout", replica),
        )
        return Entry(
            number=len(self._ledger),
            generation=self._study.generation,
            spec=make_spec(resolved, self._experiment, fingerprint=self._study.fingerprint, seeds=seeds),
            point=resolved.flat,
            arch_id=resolved.arch_id,
            cost=dataclasses.asdict(resolved.cost),
            marks={"contrast": contrast.name, "side": side, "replica": replica, "drawn": False},
        )

    def show(self, *, now: bool = False) -> None:
        """Show how the finals stand; nothing when the experiment asks for none."""
        if not self._experiment.final.contrasts:
            return
        results = [entry.result for entry in self._ledger.entries() if entry.result is not None]
        contrasts = len(self._experiment.final.contrasts) - len(self._skipped)
        snapshot = Snapshot(
            what="finals",
            total=2 * self._experiment.final.seeds * contrasts,
            counts=Counter(result.status for result in results),
            running=len(self._active),
            best="",
            eta_seconds=None,
        )
        self._progress.show(snapshot, now=now)


def _base_key(contrast: "Contrast") -> str:
    return f"assay.base.{contrast.name}"


def _loss(entry: Entry) -> tuple[float, int]:
    assert entry.result is not None
    return entry.result.metrics[Metric.LOSS], entry.number
