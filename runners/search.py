"""The driver of a search: prepares data, proposes, trains, records, ends; and goes on where an earlier one stopped.

One source of trials holds what the driver of a search knows, so the file is longer than others.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runners.attempts import CHECKPOINTS, Attempts
from runners.best import Point
from runners.engine import AbstractSource, Interrupts, Job
from runners.engines import open_engine, with_jobs
from runners.environment import capture
from runners.finals import FinalOutcome, Finals
from runners.heirlooms import Heirlooms, settle_place
from runners.ledger import Entry
from runners.mutations import mutations_of
from runners.outcome import SearchOutcome
from runners.owners import mark_owner
from runners.progress import Progress, Snapshot
from runners.quota import WHY_DELETED, Quota
from runners.recorder import Recorder
from runners.shared import kept_data
from runners.showing import Shown, search_trial
from runners.study import Proposed, Study, study_folder
from runners.sync import keep_for_sync
from runners.tasks import task_from_plain
from runners.trials import TRAINED
from search_space.records import Metric, Reading, Stage, Status, TrialResult

if TYPE_CHECKING:
    from runners.tracking import Tracker
    from search_space.experiment import Experiment

SECONDS = "assay.seconds"
"""Under which a study notes how long its search has run in all."""
_NOTE_SECONDS = 10.0
LOOK_SECONDS = 2.0
"""Time between two looks at what other drivers of the search have stored."""


def run_search(
    experiment: "Experiment",
    *,
    tracker: "Tracker",
    study_uri: str,
    jobs: int = 0,
    data_path: str = "",
    address: str = "",
    extend: bool = False,
    join: bool = False,
    retry: bool = False,
    progress: Progress | None = None,
    trials: str = TRAINED,
) -> SearchOutcome:
    """Run the search to its end, or go on with it; Ctrl-C and SIGTERM end it cleanly within seconds.

    `jobs` overrides the experiment's, `data_path` names where the task's data lies, `address` a Ray cluster. With
    `join` this driver works beside the one that leads the search, and leaves the finals to it. `trials` names what
    runs a trial, as runners.trials takes it. Raises UserError for what the user can mend (StudyBusy, StudyMismatch
    among them), EngineError when no worker can start.
    """
    shown = Progress() if progress is None else progress
    began, experiment = time.monotonic(), with_jobs(experiment, jobs)
    with Study.open(study_uri, experiment, extend=extend, join=join) as study:
        folder = study_folder(study_uri, experiment.name)
        mark_owner(folder, tracker.place)
        settle_place(study, folder)
        data = task_from_plain(experiment.task).prepare(data_path)
        study.bind(data.shape, data.fingerprint)
        file = kept_data(data, folder)
        environment = capture(experiment.blocks)
        keep_for_sync(study, folder, environment)
        recorder = Recorder(
            tracker,
            lambda: tracker.start_search(experiment, experiment.space.id, data, environment, study_uri, joined=join),
            shown.note,
        )
        recorder.open(needed=not study.trials())
        source = SearchSource(study, recorder, folder, shown, retry=retry)
        finals = Finals(study, recorder, shown, retry=retry)
        status, unshown = "FAILED", 0
        try:
            with (
                Interrupts() as interrupts,
                open_engine(experiment, address=address, data=file, folder=folder, trials=trials) as engine,
            ):
                source.catch_up()
                whole = engine.drive(source, interrupts)
                source.show(now=True)
                if whole and not join:
                    finals.deadline = source.deadline
                    engine.drive(finals, interrupts)
                    finals.show(now=True)
                engine.stop()
                source.cut_off(interrupts.asked or "max_hours")
                finals.cut_off(interrupts.asked or "max_hours")
            status = "KILLED" if interrupts.asked else "FINISHED"
        finally:
            try:
                source.note_down()
            finally:
                shown.end()
                others = study.crew.others_as_last_known()

                def settle() -> None:
                    source.settle_shown()
                    finals.settle_shown()

                unshown = recorder.close(
                    lambda: tracker.finish_search(status, source.metrics(), others),
                    hurried=status != "FINISHED",
                    meanwhile=settle,
                )
                settle()
        return source.outcome(
            recorder.parent, interrupts.asked, finals.outcomes(), time.monotonic() - began, unshown=unshown
        )


class SearchSource(AbstractSource):
    """Trials of the search stage: first those an earlier driver left running, then new proposals."""

    def __init__(
        self, study: Study, recorder: Recorder, folder: Path, progress: Progress, *, retry: bool = False
    ) -> None:
        """With `retry` nothing is proposed."""
        self._study = study
        self._retry = retry
        self._experiment = study.experiment
        self._recorder = recorder
        self._progress = progress
        self._weights = folder / "weights"
        self._weights.mkdir(exist_ok=True)
        checkpoints, population = folder / CHECKPOINTS, study.population
        most = study.copied + self._experiment.search.trials
        self._heirlooms = Heirlooms(checkpoints, population, most) if population else None
        self._attempts = Attempts(checkpoints, Stage.SEARCH, self._experiment.engine, study.attempted, self._heirlooms)
        self._quota = Quota(study, checkpoints)
        self._left: deque[Proposed] = deque()
        self._taken_over: set[int] = set()
        self._next_look = 0.0
        self._active: dict[int, Shown] = {}
        self._curves: dict[int, list[Reading]] = {}
        self._began = self._noted = time.monotonic()
        self._before = float(study.noted(SECONDS, 0.0))
        self._ended_here = 0
        self.deadline = self._began + self._experiment.max_hours * 3600 - self._before
        self.ended = ""
        self._counts: Counter[Status] = Counter()
        self._tokens = 0
        self._best: tuple[float, int] = (math.inf, -1)
        self._counted: set[int] = set()
        self._finished = self._told = 0
        for entry in study.trials():
            self._count(entry)
        self._show_best(max((_ended_at(entry) for entry in study.trials() if entry.result), default=0))

    def catch_up(self) -> None:
        """Take over what an earlier driver left: trials to run again, ends that it did not live to show."""
        self._study.adopt()
        self._left.extend(self._study.running())
        with self._study.up_to_date():
            self._attempts.tidy(self._study.trials())
        self._show_ends(self._study.unshown())

    def _take_over(self, entries: Sequence[Entry]) -> None:
        self._taken_over.update(entry.number for entry in entries)
        self._left.extend(Proposed.of(entry) for entry in entries if entry.result is None)
        self._show_ends(entry for entry in entries if entry.result is not None)

    def _show_ends(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            assert entry.result is not None, f"trial {entry.number} has no end to show"
            self._recorder.finish(self._shown(entry), entry.result)

    def settle_shown(self) -> None:
        """Close in the study what the tracking store shows by now."""
        trials = self._study.trials()
        ended = {shown.number for shown in self._recorder.ended(Stage.SEARCH)}
        self._study.settle(*(number for number in sorted(ended) if not trials[number].settled))

    def _look_around(self) -> None:
        """See what other drivers did, and take over what those that died have left."""
        self._study.crew.beat()
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._study.refresh()
        self._take_note()
        if self._study.elsewhere():
            self._take_over(self._study.adopt())

    def _take_note(self) -> None:
        """Count what other drivers' trials came to."""
        for entry in self._study.news():
            self._count(entry)
            self._show_best(_ended_at(entry))
            self._quota.know(entry)

    def waits(self) -> bool:
        # The driver that leads goes on to the finals, for which every trial must have ended.
        return bool(self._left) or (not self._study.joined and self._study.elsewhere() > 0)

    def next(self) -> Job | None:
        proposed = self._left.popleft() if self._left else self._propose()
        if proposed is None:
            return None
        entry = self._study.trials()[proposed.number]
        shown = self._shown(entry)
        start = self._attempts.start(entry, weights=shown.weights, test=False)
        shown = replace(shown, anew=not start.began)
        self._active[proposed.number] = shown
        self._curves[proposed.number] = [reading for reading in start.curve if reading.tokens]
        self._recorder.begin(shown)
        for reading in start.curve:
            self._recorder.reading(shown, reading)
        self.show()
        return start.job

    def report(self, key: int, reading: Reading) -> bool:
        curve = self._curves[key]
        if curve and reading.tokens <= curve[-1].tokens:
            return self._study.holds(key)  # It trains the whole way again to a state that it could not take over.
        curve.append(reading)
        return self._study.report(key, reading, curve)

    def follow(self, key: int, reading: Reading) -> None:
        self._recorder.reading(self._active[key], reading)

    def finish(self, key: int, result: TrialResult) -> None:
        shown = self._active.pop(key)
        del self._curves[key]
        entry = self._study.trials()[key]
        if not self._study.holds(key):
            self._let_go(key, shown)
            return
        if self._attempts.goes_on_elsewhere(entry, result):
            self._progress.note(f"trial {key} goes on {mutations_of(entry)[-1].line}")
            self._recorder.preempt(shown, "it goes on from the state of another trial")
            self._left.appendleft(Proposed.of(entry))
            return
        ended = self._attempts.end(self._study.trials()[key], result)
        if ended is None:
            again = self._study.trials()[key]
            self._progress.note(f"trial {key} is run again: {result.status}: {result.reason}")
            self._recorder.preempt(shown, f"{result.reason}; it is run again")
            self._left.appendleft(Proposed.of(again))
            return
        if not self._study.record(key, ended):
            self._let_go(key, shown)
            return
        for entry in self._quota.admit(self._study.trials()[key], shown.weights):
            self._recorder.drop_weights(self._shown(entry), WHY_DELETED)
        self._recorder.finish(shown, ended)
        self._count(self._study.trials()[key])
        self._show_best(_ended_at(self._study.trials()[key]))
        if self._heirlooms is not None:
            with self._study.up_to_date():
                self._heirlooms.tidy(self._study.trials())
        self._ended_here += 1
        self.show()

    def _let_go(self, key: int, shown: Shown) -> None:
        """Forget an attempt at a trial that another driver took over: that driver runs, ends and shows it."""
        self._progress.note(f"trial {key} was taken over by another driver while this one was silent")
        self._attempts.forget(key)
        self._recorder.forget(shown)

    def tick(self) -> bool:
        self._look_around()
        self.settle_shown()
        self.show()
        if time.monotonic() - self._noted > _NOTE_SECONDS:
            self.note_down()
        if time.monotonic() > self.deadline:
            self.ended = f"max_hours={self._experiment.max_hours:g} passed"
            return False
        return True

    def cut_off(self, why: str) -> None:
        """Mark what still runs as preempted; it stays in the study to be run again."""
        for shown in self._active.values():
            self._recorder.preempt(shown, f"cut off by {why}; the same command runs it again")

    def note_down(self) -> None:
        """Store how long the search has run in all."""
        self._noted = time.monotonic()
        self._study.note(SECONDS, self._before + self._noted - self._began)

    def metrics(self) -> dict[str, float]:
        """What the parent run is closed with."""
        found = {f"trials/{status}": float(count) for status, count in self._counts.items()}
        if self._best[1] >= 0:
            found[Metric.BEST_LOSS] = self._best[0]
        return {**found, Metric.TOKENS: float(self._tokens)}

    def outcome(
        self, parent: str, interrupted: str, finals: tuple[FinalOutcome, ...], seconds: float, *, unshown: int = 0
    ) -> SearchOutcome:
        """How the search stands now."""
        return SearchOutcome(
            name=self._experiment.name,
            parent=parent,
            interrupted=interrupted,
            ended=self.ended or ("" if not interrupted else f"stopped by {interrupted}"),
            counts=dict(self._counts),
            running=len(self._study.running()),
            best_number=self._best[1],
            best_loss=self._best[0],
            finals=finals,
            seconds=seconds,
            unshown=unshown,
        )

    def _propose(self) -> Proposed | None:
        planned = self._tokens + (len(self._active) + self._study.elsewhere() + 1) * self._experiment.budget.tokens
        if self._retry:
            self.ended = "the trials that were asked for were run again"
        if self._study.ended or self._retry:
            return None
        if planned > self._experiment.max_tokens:
            self.ended = f"one more trial could pass max_tokens={self._experiment.max_tokens:g}"
            return None
        proposed = self._study.propose(self._experiment.search.trials)
        self.ended = self._study.ended
        return proposed

    def _shown(self, entry: Entry) -> Shown:
        return search_trial(entry, self._weights, taken_over=entry.number in self._taken_over)

    def _count(self, entry: Entry) -> None:
        result = entry.result
        if result is None or entry.number in self._counted:
            return
        self._counted.add(entry.number)
        self._counts[result.status] += 1
        self._tokens += result.tokens
        if result.status is Status.OK:
            self._best = min(self._best, (result.metrics[Metric.LOSS], entry.number))
            self._finished += 1

    def _show_best(self, milliseconds: int) -> None:
        """The next point of the curve of the best loss: by the driver that leads alone, which counts all trials."""
        if self._finished > self._told and not self._study.joined:
            self._told = self._finished
            self._recorder.best(Point(self._finished, self._best[0], milliseconds))

    def show(self, *, now: bool = False) -> None:
        """Show where the search stands."""
        self._take_note()
        total = self._experiment.search.trials + self._study.copied
        left = total - self._counts.total()
        elapsed = time.monotonic() - self._began
        snapshot = Snapshot(
            what="trials",
            total=total,
            counts=self._counts,
            running=len(self._active),
            best="" if self._best[1] < 0 else f"{self._best[0]:.4f} (trial {self._best[1]})",
            eta_seconds=elapsed / self._ended_here * left if self._ended_here else None,
        )
        self._progress.show(snapshot, now=now)


def _ended_at(entry: Entry) -> int:
    """Milliseconds since the epoch at which a trial ended; where it has not, at which it began."""
    return int((entry.started + (entry.result.seconds if entry.result else 0.0)) * 1000)
