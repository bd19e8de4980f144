"""Shows trials to the tracking store as they run, from a thread of its own.

The thread brings the store to what is wanted of each trial, again and again until it succeeds: a store that is down or
slow costs the view for a while, never the search. Ends that were not shown stay unsettled in the study.

One class holds what that thread and the driver tell each other, so the file is longer than others.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from runners.best import Point
from runners.connecting import StoreDown
from runners.showing import Shown
from search_space.records import Reading, Stage, Status, TrialResult

if TYPE_CHECKING:
    from runners.tracking import Tracker

LEAST_PAUSE, MOST_PAUSE = 0.5, 15.0
"""Seconds between attempts at a store that fails; doubled each time."""
FLUSH_SECONDS = 2.0
"""How long readings wait for each other; beginnings and ends are shown at once, if the last were not just shown."""
GATHER_SECONDS = 0.2
"""Least time between two rounds of writing, so that trials that come fast are written together."""
MOST_FAILURES = 3
"""Trials that fail in one round, after which the store itself is taken to be down."""
MOST_TOGETHER = 50
"""Trials that are written in one transaction, where the store is a database."""
BEAT_SECONDS = 20.0
CLOSE_SECONDS, HURRIED_SECONDS = 20.0, 8.0
"""How long the end of a search waits for a store that takes nothing; after an interrupt."""


@dataclass
class _Wanted:
    """What the store is to show of a trial."""

    trial: Shown
    anew: bool
    run: str = ""
    """Its run; empty before it is begun, and after a failure, from where it is taken up again."""
    readings: list[Reading] = field(default_factory=list)
    queued: list[Reading] = field(default_factory=list)
    """Readings handed on since the run was taken up, which the store need not have taken."""
    result: TrialResult | None = None
    is_new: bool = True
    """True until the store has shown that the trial runs."""

    def begin_again(self) -> None:
        """Take the run up from its beginning: what the store did not take is sent once more, nothing twice."""
        self.run = ""
        self.readings[:0], self.queued = self.queued, []

    @property
    def is_due(self) -> bool:
        return self.is_new or self.result is not None

    @property
    def kept(self) -> Path | None:
        """Its trained model, where it is to be stored."""
        weights = self.trial.weights
        is_good = self.result is not None and self.result.status is Status.OK
        return weights if weights is not None and is_good and weights.exists() else None


class Recorder:
    """Begins, follows and ends the runs of trials. Its methods return at once; all but `close`, which waits."""

    def __init__(self, tracker: "Tracker", open_search: Callable[[], str], warn: Callable[[str], None]) -> None:
        """`open_search` opens the search's own run; it is called again until it succeeds."""
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        self._errors = (MlflowException, OSError, SQLAlchemyError, StoreDown)
        self._tracker = tracker
        self._open_search = open_search
        self._warn = warn
        self._wanted: dict[str, _Wanted] = {}
        self._drops: dict[str, tuple[Shown, str]] = {}
        self._ended: list[Shown] = []
        self._notes: list[str] = []
        self._best: list[Point] = []
        self._state = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_open = self._is_down = False
        self._patience = float("inf")
        """Seconds without progress after which the thread gives up; infinite until the search ends."""
        self._progressed = time.monotonic()
        self._next_beat = 0.0
        self._fault: Exception | None = None
        self.parent = ""
        """Id of the search's own run; empty while it could not be opened."""

    def open(self, *, needed: bool) -> None:
        """Open the search's run: now when `needed`, and then a store that fails is an error; else in the background."""
        if needed:
            self.parent = self._open_search()
            self._is_open = True
        self._thread = threading.Thread(target=self._work, daemon=True, name="recorder")
        self._thread.start()

    def begin(self, trial: Shown) -> None:
        """Open the trial's run, or take it up again."""
        with self._state:
            self._wanted[trial.key] = _Wanted(trial=trial, anew=trial.anew)
            self._state.notify()

    def reading(self, trial: Shown, reading: Reading) -> None:
        """Add a reading to its curve."""
        with self._state:
            self._wanted[trial.key].readings.append(reading)

    def finish(self, trial: Shown, result: TrialResult) -> None:
        """Close its run; weights that are stored are deleted here."""
        with self._state:
            self._wanted.setdefault(trial.key, _Wanted(trial=trial, anew=trial.anew)).result = result
            self._state.notify()

    def preempt(self, trial: Shown, reason: str) -> None:
        """Mark a trial that did not end and will be run again."""
        self.finish(trial, TrialResult(status=Status.PREEMPTED, reason=reason))

    def forget(self, trial: Shown) -> None:
        """Write no more of a trial."""
        with self._state:
            self._wanted.pop(trial.key, None)

    def drop_weights(self, trial: Shown, why: str) -> None:
        """Delete the trained model of a trial that has ended."""
        if trial.weights is not None:
            trial.weights.unlink(missing_ok=True)  # It may not have come to the store yet.
        with self._state:
            self._drops[trial.key] = (trial, why)

    def best(self, point: Point) -> None:
        """Add a point to the curve of the best loss, on the search's own run."""
        with self._state:
            self._best.append(point)

    def ended(self, stage: Stage) -> list[Shown]:
        """Trials of a stage whose end the store shows since this was last asked; raises what broke the thread."""
        with self._state:
            found = [trial for trial in self._ended if trial.stage == stage]
            self._ended = [trial for trial in self._ended if trial.stage != stage]
            notes, self._notes = self._notes, []
        for note in notes:
            self._warn(note)
        if self._fault is not None:
            raise self._fault
        return found

    def close(
        self, finish: Callable[[], None], *, hurried: bool = False, meanwhile: Callable[[], None] = lambda: None
    ) -> int:
        """Show what is left, then `finish` the search's run; how many ends the store does not show, its own too.

        `meanwhile` is called twice a second, to note down what is shown by then: this process may be killed.
        """
        if self._thread is None:
            return 0
        with self._state:
            self._patience = HURRIED_SECONDS if hurried else CLOSE_SECONDS
            self._progressed = time.monotonic()
            self._state.notify()
        # One call that hangs may outlast the patience; it is not waited for much longer.
        while self._thread.is_alive() and not self._is_stuck(HURRIED_SECONDS):
            self._thread.join(LEAST_PAUSE)
            meanwhile()
        missing = sum(wanted.result is not None for wanted in self._wanted.values())
        if not self._thread.is_alive() and self._is_open:
            try:
                finish()
                return missing
            except self._errors as error:
                self._down(error)
        return missing + 1

    def _work(self) -> None:
        pause, ready = LEAST_PAUSE, 0.0
        while True:
            with self._state:
                self._state.wait_for(
                    lambda: self._closing or any(w.is_due for w in self._wanted.values()), FLUSH_SECONDS
                )
                self._state.wait_for(lambda: self._closing, max(0.0, ready - time.monotonic()))
                # Trials without an end were cut off; what closes the search marks them.
                left = self._drops or self._best or any(w.result for w in self._wanted.values())
                is_done = self._is_open and not left
                if self._closing and (is_done or self._is_stuck()):
                    return
                wanted = list(self._wanted.values())
            try:
                self._show(wanted)
                pause, ready = LEAST_PAUSE, time.monotonic() + GATHER_SECONDS
                if self._is_down:
                    self._is_down = False
                    self._note("the tracking store can be written again")
            except self._errors as error:
                self._down(error)
                with self._state:
                    self._state.wait_for(lambda: self._closing, pause)
                if self._closing:
                    time.sleep(LEAST_PAUSE)
                pause = min(2 * pause, MOST_PAUSE)
            except Exception as error:  # noqa: BLE001 - handed to the driver, whose next call raises it
                self._fault = error
                return

    @property
    def _closing(self) -> bool:
        return self._patience < float("inf")

    def _is_stuck(self, more: float = 0.0) -> bool:
        return time.monotonic() - self._progressed > self._patience + more

    def _show(self, wanted: list[_Wanted]) -> None:
        """Bring the store to what is wanted, in order."""
        if not self._is_open:
            self.parent = self._open_search()
            self._is_open = True
            self._progressed = time.monotonic()
        if time.monotonic() >= self._next_beat:
            self._tracker.beat()
            self._next_beat = time.monotonic() + BEAT_SECONDS
        failures: list[Exception] = []
        for group in self._groups(wanted):
            failures += self._show_together(group)
            if len(failures) >= MOST_FAILURES:
                raise failures[0]
        self._show_best()
        if failures:
            raise failures[0]
        self._drop()

    def _groups(self, wanted: list[_Wanted]) -> Iterator[list[_Wanted]]:
        """What is written together, in order. A model is on the disk twice until it is written, so it comes alone."""
        group: list[_Wanted] = []
        for each in wanted:
            alone = not self._tracker.writes_together or each.kept is not None
            if group and (alone or len(group) == MOST_TOGETHER):
                yield group
                group = []
            group.append(each)
            if alone:
                yield group
                group = []
        if group:
            yield group

    def _show_together(self, group: list[_Wanted], *, ends: bool = True) -> list[Exception]:
        """Write a group, or one by one what can be written of it; what went wrong. `ends` closes trials too."""
        failures: list[Exception] = []
        ended: list[tuple[_Wanted, TrialResult]] = []
        try:
            with self._tracker.together():
                for each in group:
                    result = self._bring(each, ends=ends)
                    if result is not None:
                        ended.append((each, result))
                self._tracker.flush(*(each.run for each in group))
        except self._errors as error:
            for each in group:
                each.begin_again()
            if len(group) == 1:
                self._put_off(group[0])
                # Of a trial whose end cannot be written it is shown at least that it runs.
                again = ends and self._tracker.writes_together and group[0].result is not None
                return [error, *(self._show_together(group, ends=False) if again else ())]
            for each in group:
                failures += self._show_together([each])
                if len(failures) >= MOST_FAILURES:
                    break
            return failures
        for each, result in ended:
            self._end(each, result)
        return []

    def _show_best(self) -> None:
        """Bring the curve of the best loss to where it is; what could not be sent is sent next time."""
        with self._state:
            points, self._best = self._best, []
        for point in points:
            self._tracker.log_best(point)
        self._tracker.flush(self.parent)

    def _drop(self) -> None:
        """Delete the models that are to go, of trials whose end the store shows."""
        for key, (trial, why) in list(self._drops.items()):
            if key not in self._wanted:
                self._tracker.drop_weights(trial.number, trial.stage, trial.generation, why)
                del self._drops[key]

    def _put_off(self, wanted: _Wanted) -> None:
        """Take a trial up after all others: one that cannot be written blocks no other."""
        with self._state:
            key = wanted.trial.key
            if self._wanted.get(key) is wanted:
                self._wanted[key] = self._wanted.pop(key)

    def _bring(self, wanted: _Wanted, *, ends: bool) -> TrialResult | None:
        """Bring a trial's run to what is wanted of it; its end, when that is brought too."""
        trial = wanted.trial
        if not wanted.run:
            wanted.run = self._tracker.start_trial(
                trial.number,
                trial.stage,
                trial.generation,
                trial.spec,
                trial.resolved,
                trial.name,
                trial.tags,
                anew=wanted.anew,
                started=trial.started,
                taken_over=trial.taken_over,
                mutations=trial.mutations,
            )
            wanted.anew = wanted.is_new = False
        with self._state:
            readings, wanted.readings, result = wanted.readings, [], wanted.result if ends else None
        wanted.queued += readings
        for reading in readings:
            self._tracker.log_reading(wanted.run, reading)
        if result is not None:
            kept = wanted.kept
            if kept is not None:
                self._drop()  # Those that make room for this one go first.
            self._tracker.finish_trial(wanted.run, result, kept)
        return result

    def _end(self, wanted: _Wanted, result: TrialResult) -> None:
        """The store shows how a trial ended."""
        trial = wanted.trial
        if trial.weights is not None:
            trial.weights.unlink(missing_ok=True)
        with self._state:
            if self._wanted.get(trial.key) is wanted:  # Else it has begun anew meanwhile.
                del self._wanted[trial.key]
            self._progressed = time.monotonic()
            if result.status is not Status.PREEMPTED:
                self._ended.append(trial)

    def _down(self, error: Exception) -> None:
        if not self._is_down:
            what = (str(error).splitlines() or [""])[0]
            self._note(
                f"the tracking store cannot be written ({type(error).__name__}: {what}); the search goes on, its "
                "results are safe in the study and are shown once the store answers"
            )
        self._is_down = True

    def _note(self, text: str) -> None:
        with self._state:
            self._notes.append(text)
