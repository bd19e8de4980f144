"""A search's one source of truth: what was proposed, what came of it, and what to try next, all in a database.

One class answers for all of it, so the file is longer than others.
"""

import dataclasses
import math
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy.exc import SQLAlchemyError

from blocks.families import InfeasibleArchitecture
from runners.candidate import Resolved
from runners.crew import Crew
from runners.generations import StudyMismatch, generation_of, study_name
from runners.guard import Guard
from runners.history import Fate, Told, rank
from runners.ledger import SQLITE, Entry, Ledger, open_storage
from runners.locks import StudyBusy, lock_joined, lock_study, turns_of
from runners.mutations import mutated
from runners.population import Population
from runners.proposing import Proposed, Proposer
from runners.pruners import make_pruner
from runners.pruning import observe_all
from runners.samplers import make_sampler
from runners.telling import (
    as_told,
    completed,
    directions,
    objective_values,
    others_at,
    speed_of,
)
from runners.warm import FINGERPRINT, take_over
from search_space.domains import Scalar
from search_space.errors import UserError
from search_space.places import file_name
from search_space.records import Reading, TrialResult, TrialSpec
from search_space.space import searched

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from runners.tasks.data import TaskShape
    from search_space.experiment import Experiment

__all__ = ["Proposed", "Study", "StudyBusy", "StudyMismatch", "study_folder"]


def study_folder(uri: str, name: str) -> Path:
    """Where the search keeps its files (data, logs, weights, lock): beside a SQLite study, else under mlruns/."""
    beside = Path(uri.removeprefix(SQLITE)).parent if uri.startswith(SQLITE) else Path("mlruns/studies")
    return beside.absolute() / file_name(name)


class Study:
    """Proposes trials, takes their readings and results; open it with `Study.open`.

    One driver leads a study; others may join it. Each writes the trials it owns and mirrors those of the others.
    """

    def __init__(
        self,
        storage: RDBStorage,
        experiment: "Experiment",
        generation: int,
        release: Callable[[], None],
        *,
        joined: bool = False,
    ):
        self.storage = storage
        self.experiment = experiment
        self.generation = generation
        self.joined = joined
        """True for a driver that works beside the one that leads the search."""
        self.ended = ""
        """Why there is nothing more to propose; empty while there is."""
        self._release = release
        self._ledger = Ledger(storage, study_name(experiment.name, generation), directions(experiment.objectives))
        self._pruner = make_pruner(experiment)
        self._searched = searched(experiment.space)
        self._told: list[Told] = []
        self._best: list[Told] = []
        """The best of them, as far as a sampler is shown them."""
        self._untold: set[int] = set()
        self._ends_told: set[int] = set()
        self._points: dict[int, dict[str, Scalar] | None] = {}
        """Of trials whose end was not told: the point in the space that is searched now, None where it is not in it."""
        self._folder = study_folder(storage.url, experiment.name)
        self.proposer = Proposer(experiment, self._folder)
        self._news: list[Entry] = []
        for entry in self._ledger.entries():
            self._mirror(entry)
        self.copied = sum(entry.generation != generation for entry in self._ledger.entries())
        """Trials that came from earlier generations."""
        self.crew = Crew(self._ledger, turns_of(storage, experiment.name, self._folder))

    @classmethod
    def open(cls, uri: str, experiment: "Experiment", *, extend: bool = False, join: bool = False) -> Self:
        """The study of this name and experiment, begun or gone on with; with `join`, beside the driver that leads it.

        StudyBusy when another process leads it; StudyMismatch when the name was begun with another experiment and
        `extend` is off, or is on but the results could not be compared.
        """
        make_sampler(experiment)
        make_pruner(experiment)
        folder = study_folder(uri, experiment.name)
        folder.mkdir(parents=True, exist_ok=True)
        storage = open_storage(uri)
        release = lock_joined(storage, folder) if join else lock_study(storage, experiment.name, folder)
        try:
            with turns_of(storage, experiment.name, folder).hold():
                generation = generation_of(storage, experiment, extend=extend)
                return cls(storage, experiment, generation, release, joined=join)
        except BaseException:
            release()
            raise

    def close(self) -> None:
        """Let the study go; another driver may open it."""
        self.proposer.guard.close()
        with suppress(SQLAlchemyError, StorageInternalError):  # Whoever comes next finds out by itself.
            self.crew.leave()
        self._release()
        self.storage.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def bind(self, shape: "TaskShape", fingerprint: str) -> None:
        """Say which data trials are trained on; StudyMismatch when earlier trials saw other data."""
        stored = self._ledger.noted(FINGERPRINT, fingerprint)
        if stored != fingerprint:
            raise StudyMismatch(
                f"search {self.experiment.name!r} was begun on data with fingerprint {stored[:12]}, this is "
                f"{fingerprint[:12]}; its results would not compare: restore the data (--data) or give another --name"
            )
        if not self._ledger.noted(FINGERPRINT, ""):
            self._ledger.note(FINGERPRINT, fingerprint)
        self.proposer.bind(shape, fingerprint, take_over(self._ledger, self.storage, self.experiment, fingerprint))

    def fresh_proposer(self) -> Proposer:
        """A proposer bound like this study's that knows no trial yet."""
        return Proposer(self.experiment, self._folder).bind(self.shape, self.fingerprint, self.proposer.earlier)

    @property
    def guard(self) -> Guard:
        """To be asked before a point is resolved."""
        return self.proposer.guard

    @property
    def shape(self) -> "TaskShape":
        """What a model must fit."""
        return self.proposer.shape

    @property
    def fingerprint(self) -> str:
        """Of the data trials are trained on."""
        return self.proposer.fingerprint

    def trials(self) -> Sequence[Entry]:
        """Every trial of this generation, those copied from earlier ones included, by number."""
        return self._ledger.entries()

    def running(self) -> list[Proposed]:
        """Trials of this driver that were stored but have no result."""
        return [Proposed.of(entry) for entry in self._ledger.unfinished() if entry.result is None and self._owns(entry)]

    def unshown(self) -> list[Entry]:
        """Trials of this driver that ended, of which the tracking store may not know."""
        return [entry for entry in self._ledger.unfinished() if entry.result is not None and self._owns(entry)]

    def refresh(self) -> None:
        """Mirror what other drivers have stored since."""
        changed = self._ledger.refresh(self.crew.me)
        for entry in changed:
            self._mirror(entry)
        self._news += changed

    def news(self) -> list[Entry]:
        """The trials of other drivers that changed since this was last asked, as far as they are mirrored."""
        told, self._news = self._news, []
        return told

    @contextmanager
    def up_to_date(self) -> "Iterator[Connection | None]":
        """Alone among all drivers, with everything mirrored that they have stored; as `Crew.turn`."""
        with self.crew.turn() as turn:
            self.refresh()
            yield turn

    def adopt(self) -> list[Entry]:
        """Take over the trials whose driver is gone: those that run, and those whose end was not shown."""
        with self.up_to_date():
            living = self.crew.others()
            free = [entry for entry in self._ledger.unfinished() if entry.owner not in (*living, self.crew.me)]
            for entry in free:
                self._ledger.claim(entry.number, self.crew.me)
        return [self._ledger[entry.number] for entry in free]

    def elsewhere(self) -> int:
        """How many trials other drivers run."""
        return sum(entry.result is None and not self._owns(entry) for entry in self._ledger.unfinished())

    def _owns(self, entry: Entry) -> bool:
        return entry.owner == self.crew.me

    def _mirror(self, entry: Entry) -> None:
        """Know the point as tried, and show the pruner what is stored of the trial."""
        self._observe(entry)
        if entry.number not in self._ends_told:
            self._untold.add(entry.number)
        self.proposer.know(entry)

    def propose(self, most: float = math.inf) -> Proposed | None:
        """The next trial, stored as running; None when there is none, and `ended` says why.

        `most` bounds the trials of this generation over all drivers.
        """
        with self.up_to_date() as turn:
            if len(self._ledger) - self.copied >= most:
                self.ended = f"all {most:g} trials were run"
                return None
            return self._propose(turn)

    def _propose(self, turn: "Connection | None") -> Proposed | None:
        number = len(self._ledger)
        if number == 0 and self.experiment.baseline:
            return self._store(*self._baseline(), {"redraws": {}, "drawn": False, "baseline": True}, turn)
        found, marks = self.proposer.find(number, self.told(), self._best)
        if found is None:
            self.ended = self.proposer.ended
            return None
        return self._store(*found, marks, turn)

    @property
    def population(self) -> Population | None:
        """Who decides which trials go on from another one's state; None where none do."""
        return self._pruner if isinstance(self._pruner, Population) else None

    def report(self, number: int, reading: Reading, curve: Sequence[Reading] = ()) -> bool:
        """Take a reading, the last of the trial's `curve`; False when its training is to stop.

        The trial then has ended as pruned, or its entry says from which other trial's state it goes on, or it is not
        held any more.
        """
        if not self._pruner.wants(number, reading.tokens):
            return self.holds(number)
        if self.population is None:
            return self._decide(number, reading, curve)
        # Whom a trial copies depends on what the trials of all drivers have read.
        with self.up_to_date():
            return self._decide(number, reading, curve)

    def _decide(self, number: int, reading: Reading, curve: Sequence[Reading]) -> bool:
        """Store a reading that is wanted, and what follows from it."""
        donor = self._pruner.donor(number, reading.tokens, reading.loss)
        if donor is not None and self.population is not None:
            if not self.holds(number):
                return False
            # Stored before the reading: a reading that is stored has been decided on.
            entry = self._ledger[number]
            self._ledger.mutated(number, mutated(self.population, entry, self._ledger[donor], reading, curve))
        objectives = self.experiment.objectives
        if not self._ledger.read(number, reading.tokens, reading.loss, speed_of(objectives, reading)):
            return False
        others = others_at(objectives, self._ledger[number], reading.tokens)
        self._pruner.observe(number, reading.tokens, reading.loss, *others)
        return donor is None and self._pruner.goes_on(number, reading.tokens)

    def holds(self, number: int) -> bool:
        """False when another driver took the trial over, as it may when this one was silent for too long."""
        return self._ledger.owner_now(number) == self.crew.me

    def record(self, number: int, result: TrialResult) -> bool:
        """Store how a trial ended, unsettled until `settle`; False, with nothing stored, when it is not held."""
        with self.crew.turn() as turn:
            if not self._owns(self._ledger[number]) or not self._ledger.record(number, result, turn):
                return False
        self._observe(self._ledger[number])
        return True

    def attempted(self, number: int, attempts: Sequence[Mapping[str, Any]]) -> None:
        """Store how all earlier attempts at a trial that is to be run again ended."""
        self._ledger.attempted(number, attempts)

    def settle(self, *numbers: int) -> None:
        """Close recorded trials, unless another driver took them over and closes them."""
        if not numbers:
            return
        objectives = self.experiment.objectives
        with self.crew.turn() as turn:
            self._ledger.settle({n: objective_values(objectives, self._ledger[n]) for n in numbers}, self.crew.me, turn)

    def tell(self, number: int, result: TrialResult) -> None:
        """Record and settle."""
        self.record(number, result)
        self.settle(number)

    def note(self, key: str, value: Any) -> None:
        """Store a plain value about the search."""
        self._ledger.note(key, value)

    def noted(self, key: str, default: Any) -> Any:
        """The plain value stored about the search."""
        return self._ledger.noted(key, default)

    def _observe(self, entry: Entry) -> None:
        others = partial(others_at, self.experiment.objectives, entry)
        if self.population is not None and entry.generation != self.generation:
            return
        decided = {int(each["tokens"]): float(each["loss"]) for each in entry.mutations}
        observe_all(self._pruner, entry.number, {**decided, **entry.readings}, entry.result, others)

    def told(self) -> list[Told]:
        """Every trial as a sampler sees it, by number; those outside the space that is searched now are left out."""
        running = []
        for number in sorted(self._untold):
            told = self._as_told(self._ledger[number])
            if told is not None and told.fate is Fate.RUNNING:
                running.append(told)
                continue
            self._untold.remove(number)
            self._ends_told.add(number)
            del self._points[number]
            if told is not None:
                insort(self._told, told, key=attrgetter("number"))
                rank(self._best, told)
        everything = list(self._told)
        for told in running:
            insort(everything, told, key=attrgetter("number"))
        return everything

    def _as_told(self, entry: Entry) -> Told | None:
        if entry.number not in self._points:
            self._points[entry.number] = completed(self.experiment.space, entry.point)
        point = self._points[entry.number]
        return None if point is None else as_told(entry, point, self.experiment.objectives, self.generation)

    def _baseline(self) -> tuple[Resolved, TrialSpec]:
        try:
            return self.proposer.resolved(self.experiment.baseline)
        except InfeasibleArchitecture as error:
            raise UserError(f"baseline: cannot be trained under this experiment: {error}") from error

    def _store(
        self, resolved: Resolved, spec: TrialSpec, marks: Mapping[str, Any], turn: "Connection | None"
    ) -> Proposed:
        entry = Entry(
            number=len(self._ledger),
            generation=self.generation,
            spec=spec,
            point=resolved.flat,
            arch_id=resolved.arch_id,
            cost=dataclasses.asdict(resolved.cost),
            marks={**marks, **self._pruner.marks(len(self._ledger)), **self.proposer.stopwatch.marks(spec)},
            owner=self.crew.me,
        )
        inside = self._points[entry.number] = completed(self.experiment.space, resolved.flat)
        live = {path: domain for path, domain in self._searched.items() if path in resolved.flat}
        self._ledger.add(entry, {} if inside is None else live, turn)
        self._untold.add(entry.number)
        self.proposer.know(entry)
        return Proposed(number=entry.number, generation=self.generation, resolved=resolved, spec=spec)
