"""The trainings of a contest: sweeps and replicas as a judge asks for them, kept in the study, shown as they run.

Sweeps and finals lie in ledgers of their own. What is trained next depends on what has ended alone, so a contest that
was killed goes on to the same verdicts.
"""

import dataclasses
import math
import time
from collections import Counter, deque
from dataclasses import dataclass

from runners.attempts import CHECKPOINTS, Attempts
from runners.candidate import make_spec
from runners.contestants import Lineup
from runners.engine import AbstractSource, Job
from runners.generations import study_name
from runners.ledger import Entry, Ledger
from runners.progress import Progress, Snapshot
from runners.recorder import Recorder
from runners.showing import Shown, final_trial, sweep_trial
from runners.study import Study, study_folder
from runners.telling import directions, objective_values
from search_space.canon import seed_from
from search_space.contest import CONTEST, Bout, Judge
from search_space.records import Metric, Reading, Seeds, Stage, Status, TrialResult

STAGES = (Stage.SWEEP, Stage.FINAL)
_SHOW = {Stage.SWEEP: sweep_trial, Stage.FINAL: final_trial}


@dataclass(frozen=True, kw_only=True)
class _Running:
    bout: Bout
    number: int
    shown: Shown


def ledger_of(study: Study, stage: Stage) -> Ledger:
    """Where the study keeps the trainings of a stage."""
    name = f"{study_name(study.experiment.name, study.generation)}/{stage}"
    return Ledger(study.storage, name, directions([Metric.LOSS]))


class ContestSource(AbstractSource):
    """The trainings that a contest still needs."""

    def __init__(
        self,
        study: Study,
        ledgers: dict[Stage, Ledger],
        lineup: Lineup,
        judge: Judge,
        recorder: Recorder,
        show: Progress,
    ) -> None:
        self._study, self._ledgers, self._lineup, self._judge = study, ledgers, lineup, judge
        self._recorder, self._progress = recorder, show
        folder = study_folder(study.storage.url, study.experiment.name) / CHECKPOINTS
        engine = study.experiment.engine
        self._attempts = {stage: Attempts(folder, stage, engine, ledgers[stage].attempted) for stage in STAGES}
        self._left: deque[Entry] = deque()
        self._running: dict[int, _Running] = {}
        self._ended: dict[Bout, float] = {}
        self._counts: Counter[Status] = Counter()
        self.deadline = math.inf
        """On the monotonic clock; what runs then is cut off."""

    def catch_up(self) -> None:
        """Show what an earlier driver did not live to show, and run again what it left running."""
        for stage, ledger in self._ledgers.items():
            self._attempts[stage].tidy(ledger.entries())
            for entry in filter(_takes_part, ledger.entries()):
                if entry.result is None:
                    self._left.append(entry)
                    continue
                self._take(entry)
                if not entry.settled:
                    self._recorder.finish(_SHOW[stage](entry), entry.result)

    def next(self) -> Job | None:
        entry = self._left.popleft() if self._left else self._planned()
        if entry is None:
            return None
        bout = bout_of(entry)
        start = self._attempts[bout.stage].start(entry, weights=None, test=bout.stage is Stage.FINAL)
        shown = dataclasses.replace(_SHOW[bout.stage](entry), anew=not start.began)
        key = len(STAGES) * entry.number + STAGES.index(bout.stage)
        self._running[key] = _Running(bout=bout, number=entry.number, shown=shown)
        self._recorder.begin(shown)
        for reading in start.curve:
            self._recorder.reading(shown, reading)
        self.show()
        return dataclasses.replace(start.job, key=key)

    def _planned(self) -> Entry | None:
        """What the judge asks for, stored."""
        bout = self._judge.next_bout(
            self._lineup.contest, self._ended, [running.bout for running in self._running.values()]
        )
        if bout is None:
            return None
        entry = self._entry(bout)
        self._ledgers[bout.stage].add(entry, {})
        return self._ledgers[bout.stage][entry.number]

    def _entry(self, bout: Bout) -> Entry:
        tuned = self._judge.tuned(self._lineup.contest, self._ended, bout.contestant)
        place = bout.place if bout.stage is Stage.SWEEP else tuned.place
        resolved = self._lineup.contestants[bout.contestant].at(place)
        doubt = {"untuned": tuned.doubt} if bout.stage is Stage.FINAL and tuned.doubt else {}
        return Entry(
            number=len(self._ledgers[bout.stage]),
            generation=self._study.generation,
            spec=make_spec(
                resolved, self._study.experiment, fingerprint=self._study.fingerprint, seeds=self._seeds(bout)
            ),
            point=resolved.flat,
            arch_id=resolved.arch_id,
            cost=dataclasses.asdict(resolved.cost),
            marks={
                "stage": str(bout.stage),
                "contrast": CONTEST,
                "side": str(bout.contestant),
                "replica": bout.place,
                "drawn": False,
                **doubt,
            },
        )

    def _seeds(self, bout: Bout) -> Seeds:
        """The same for all contestants; those of sweeps, of replicas, and of the search differ."""
        seed = self._study.experiment.search.seed
        replica = str(bout.place) if bout.stage is Stage.FINAL else ""
        parts = ("contest", str(bout.stage), replica)
        streams = {stream: seed_from(seed, *parts, stream) for stream in ("init", "data", "dropout")}
        return Seeds(**streams)

    def report(self, key: int, reading: Reading) -> bool:
        return True

    def follow(self, key: int, reading: Reading) -> None:
        self._recorder.reading(self._running[key].shown, reading)

    def finish(self, key: int, result: TrialResult) -> None:
        running = self._running.pop(key)
        stage, ledger = running.bout.stage, self._ledgers[running.bout.stage]
        ended = self._attempts[stage].end(ledger[running.number], result)
        if ended is None:
            self._progress.note(f"{running.shown.name} is run again: {result.status}: {result.reason}")
            self._recorder.preempt(running.shown, f"{result.reason}; it is run again")
            self._left.appendleft(ledger[running.number])
            return
        ledger.record(running.number, ended)
        self._recorder.finish(running.shown, ended)
        self._take(ledger[running.number])
        self.show()

    def _take(self, entry: Entry) -> None:
        """Know the loss of a training that has ended; NaN where it ended badly."""
        assert entry.result is not None
        bout = bout_of(entry)
        at_length = self._lineup.contest.spec.at_length
        metric: str = Metric.LOSS if bout.stage is Stage.SWEEP else metric_of(at_length)
        ok = entry.result.status is Status.OK
        self._ended[bout] = entry.result.metrics.get(metric, math.nan) if ok else math.nan
        self._counts[entry.result.status] += 1

    def tick(self) -> bool:
        self._study.crew.beat()
        self.settle_shown()
        return time.monotonic() <= self.deadline

    def settle_shown(self) -> None:
        """Close in the study what the tracking store shows by now."""
        for stage, ledger in self._ledgers.items():
            entries = [ledger[shown.number] for shown in self._recorder.ended(stage)]
            ledger.settle({e.number: objective_values([Metric.LOSS], e) for e in entries if not e.settled})

    def cut_off(self, why: str) -> None:
        """Mark what still runs as preempted; it stays in the study to be run again."""
        for running in self._running.values():
            self._recorder.preempt(running.shown, f"cut off by {why}; the same command runs it again")

    def done(self) -> int:
        """How many trainings have ended."""
        return self._counts.total()

    def is_over(self) -> bool:
        """True when nothing is left to be trained."""
        idle = not (self._left or self._running)
        return idle and self._judge.next_bout(self._lineup.contest, self._ended, ()) is None

    def show(self, *, now: bool = False) -> None:
        """Show how far it has got; the total is what it takes at most without extended sweeps."""
        contest = self._lineup.contest
        tried = len(contest.candidates) - contest.places
        most = (1 + contest.places) * (contest.spec.sweep + contest.spec.max_seeds) + tried
        snapshot = Snapshot(
            what="sweeps and finals",
            total=max(most, self.done() + len(self._running)),
            counts=self._counts,
            running=len(self._running),
            best="",
            eta_seconds=None,
        )
        self._progress.show(snapshot, now=now)


def metric_of(at_length: int) -> str:
    """The metric that verdicts are given on."""
    return f"{Metric.TEST_LOSS_AT}{at_length}" if at_length else Metric.TEST_LOSS


def bout_of(entry: Entry) -> Bout:
    """Which training of the contest an entry of its ledgers is."""
    stage = Stage(entry.marks["stage"])
    return Bout(stage, int(entry.marks["side"]), int(entry.marks["replica"]))


def _takes_part(entry: Entry) -> bool:
    """False for the paired finals of contrasts, which share a ledger with those of a contest."""
    return entry.marks.get("contrast") == CONTEST
