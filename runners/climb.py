"""The trainings of a ladder: what it still lacks, kept in its study, shown as they run.

What is trained next depends on what has ended alone, so a ladder that was killed goes on to the same numbers.
"""

import dataclasses
import math
from collections import Counter, deque
from pathlib import Path

from runners.attempts import CHECKPOINTS, Attempts, attempts_tag
from runners.candidate import Resolved, make_spec
from runners.engine import AbstractSource, Job
from runners.ladder_members import Member
from runners.ladder_plan import REPEATS, STEP, Asked, Part, at_size, budget_at, parts, seeds_at, tuned
from runners.ledger import Entry, Ledger
from runners.progress import Progress, Snapshot
from runners.recorder import Recorder
from runners.showing import Shown, short_name
from runners.tasks.data import TaskData
from runners.telling import as_resolved, objective_values
from search_space.experiment import Experiment
from search_space.records import Metric, Reading, Stage, Status, Tag, TrialResult


class Climb(AbstractSource):
    """The trainings that a ladder still needs."""

    def __init__(
        self,
        found: tuple[Member, ...],
        asked: Asked,
        experiment: Experiment,
        data: TaskData,
        ledger: Ledger,
        recorder: Recorder,
        progress: Progress,
        folder: Path,
    ) -> None:
        self._members = {one.label: one for one in found}
        self._asked, self._experiment, self._data = asked, experiment, data
        self._ledger, self._recorder, self._progress = ledger, recorder, progress
        self._attempts = Attempts(folder / CHECKPOINTS, Stage.LADDER, experiment.engine, ledger.attempted)
        self._parts = parts(list(self._members), asked)
        self._active: dict[int, Shown] = {}
        self._resolved: dict[tuple[str, int, int], Resolved] = {}
        for size in asked.sizes:  # What cannot be built at some size is refused before anything trains.
            budget_at(experiment.budget, size, asked, data.shape.train_len)
            for member in found:
                self._at(member, size, 0)
        for entry in ledger.unfinished():
            if entry.result is not None:
                recorder.finish(ladder_trial(entry), entry.result)
        self._attempts.tidy(ledger.entries())
        self._left = deque(entry.number for entry in ledger.entries() if entry.result is None)
        self._warn_of_repeats()

    def next(self) -> Job | None:
        entry = self._ledger[self._left.popleft()] if self._left else self._new()
        if entry is None:
            return None
        start = self._attempts.start(entry, weights=None, test=not _part(entry).is_swept)
        shown = dataclasses.replace(ladder_trial(entry), anew=not start.began)
        self._active[entry.number] = shown
        self._recorder.begin(shown)
        for reading in start.curve:
            self._recorder.reading(shown, reading)
        self.show()
        return start.job

    def _new(self) -> Entry | None:
        """The first training that is not stored and whose candidate knows its rate by now."""
        stored = {_part(entry): entry for entry in self._ledger.entries()}
        for part in self._parts:
            if part in stored:
                continue
            place, untuned = part.place, ""
            if not part.is_swept:
                swept = [stored.get(each) for each in self._parts if each.is_swept and each.label == part.label]
                losses = {_part(each).place: _loss(each) for each in swept if each is not None and each.result}
                if len(losses) < len(swept):
                    continue
                place, untuned = tuned(losses, self._asked.sweep)
            entry = self._entry(part, place, untuned)
            self._ledger.add(entry, {})
            return self._ledger[entry.number]
        return None

    def _entry(self, part: Part, place: int, untuned: str) -> Entry:
        member = self._members[part.label]
        resolved = self._at(member, part.rung, place)
        budget = budget_at(self._experiment.budget, part.rung, self._asked, self._data.shape.train_len)
        spec = make_spec(
            resolved,
            dataclasses.replace(self._experiment, budget=budget, blocks=member.experiment.blocks),
            fingerprint=self._data.fingerprint,
            seeds=seeds_at(self._experiment, part),
        )
        return Entry(
            number=len(self._ledger),
            generation=0,
            spec=spec,
            point=resolved.flat,
            arch_id=resolved.arch_id,
            cost=dataclasses.asdict(resolved.cost),
            marks={**dataclasses.asdict(part), **({"untuned": untuned} if untuned else {}), "drawn": False},
        )

    def _at(self, member: Member, rung: int, place: int) -> Resolved:
        key = (member.label, rung, place)
        if key not in self._resolved:
            self._resolved[key] = at_size(member, rung, self._asked, self._data.shape, place)
        return self._resolved[key]

    def report(self, key: int, reading: Reading) -> bool:
        return True

    def follow(self, key: int, reading: Reading) -> None:
        self._recorder.reading(self._active[key], reading)

    def finish(self, key: int, result: TrialResult) -> None:
        shown = self._active.pop(key)
        ended = self._attempts.end(self._ledger[key], result)
        if ended is None:
            self._progress.note(f"{shown.name} is run again: {result.status}: {result.reason}")
            self._recorder.preempt(shown, f"{result.reason}; it is run again")
            self._left.appendleft(key)
            return
        self._ledger.record(key, ended)
        self._recorder.finish(shown, ended)
        self.show()

    def tick(self) -> bool:
        self.settle_shown()
        return True

    def cut_off(self, why: str) -> None:
        """Mark what still runs as preempted; it stays in the study to be run again."""
        for shown in self._active.values():
            self._recorder.preempt(shown, f"cut off by {why}; the same command runs it again")

    def settle_shown(self) -> None:
        """Close in the study what the tracking store shows by now."""
        for stage in (Stage.SWEEP, Stage.LADDER):
            entries = [self._ledger[shown.number] for shown in self._recorder.ended(stage)]
            self._ledger.settle({e.number: objective_values([Metric.LOSS], e) for e in entries if not e.settled})

    def counts(self) -> dict[Status, int]:
        """Trainings by status."""
        return dict(Counter(entry.result.status for entry in self._ledger.entries() if entry.result is not None))

    def is_whole(self) -> bool:
        """True when nothing is left to train."""
        done = {_part(entry) for entry in self._ledger.entries() if entry.result is not None}
        return set(self._parts) <= done

    def show(self, *, now: bool = False) -> None:
        """Show how the ladder stands."""
        snapshot = Snapshot(
            what="trainings",
            total=max(len(self._parts), len(self._ledger)),
            counts=Counter(self.counts()),
            running=len(self._active),
            best="",
            eta_seconds=None,
        )
        self._progress.show(snapshot, now=now)

    def _warn_of_repeats(self) -> None:
        largest = self._asked.sizes[-1] * self._asked.tokens_per_param
        held = self._data.splits["train"].arrays()
        names = ("tokens", f"inputs.{self._data.shape.train_len}")
        passes = largest / next(held[name].size for name in names if name in held)
        if passes > REPEATS:
            self._progress.note(
                f"the largest size passes {passes:.1f} times over the training data; beyond {REPEATS:g} passes curves "
                "bend upwards (Muennighoff et al. 2023, arXiv:2305.16264): lower --tokens-per-param or give more data"
            )


def ladder_trial(entry: Entry) -> Shown:
    """A training of a ladder as the tracking store is to show it."""
    part, resolved = _part(entry), as_resolved(entry)
    what = f"rate x {STEP**part.place:g}" if part.is_swept else f"#{part.replica}"
    return Shown(
        number=entry.number,
        stage=Stage.SWEEP if part.is_swept else Stage.LADDER,
        generation=entry.generation,
        spec=entry.spec,
        resolved=resolved,
        name=f"{part.label} {part.rung:,} {what} {short_name(resolved)}",
        tags={
            Tag.CANDIDATE: part.label,
            Tag.RUNG: str(part.rung),
            **({} if part.is_swept else {Tag.REPLICA: str(part.replica)}),
            **({Tag.UNTUNED: str(entry.marks["untuned"])} if "untuned" in entry.marks else {}),
            **attempts_tag(entry),
        },
        weights=None,
        started=entry.started,
    )


def _part(entry: Entry) -> Part:
    return Part(**{field.name: entry.marks[field.name] for field in dataclasses.fields(Part)})


def _loss(entry: Entry) -> float:
    result = entry.result
    assert result is not None, f"training {entry.number} has not ended"
    return result.metrics.get(Metric.LOSS, math.inf) if result.status is Status.OK else math.inf
