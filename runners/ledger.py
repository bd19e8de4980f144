"""Trials in a database, through Optuna's storage; every change is one transaction, so a kill leaves whole records.

What is stored and how it is read back is in this one file, which is therefore longer than others.
"""

import dataclasses
import datetime
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optuna
import sqlalchemy
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Connection

from runners.storing import OWNER, End, StudyTables, log_ahead
from search_space.domains import Choice, Domain, IntRange, Scalar
from search_space.errors import UserError
from search_space.places import driver_uri
from search_space.records import Status, TrialResult, TrialSpec, result_from_plain, spec_from_plain, to_plain

SQLITE = "sqlite:///"
_POSTGRES = ("postgresql://", "postgresql+psycopg2://")
_BIRTH = "assay.trial"
RESULT = "assay.result"
ATTEMPTS = "assay.attempts"
MUTATIONS = "assay.mutations"
_SPEEDS = "assay.speeds"
_BUSY_SECONDS = 60
_OPENINGS = 6
_THERE = ("already exists", "UNIQUE constraint", "unique constraint", "duplicate key")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One stored trial."""

    number: int
    generation: int
    """The generation of the study in which it was proposed."""
    spec: TrialSpec
    point: Mapping[str, Scalar]
    arch_id: str
    cost: Mapping[str, float]
    marks: Mapping[str, Any] = field(default_factory=dict)
    """What else was known when it was stored: redraws, the history its sampler saw, its part in a final."""
    readings: Mapping[int, float] = field(default_factory=dict)
    """Loss by tokens, where a pruner asked for it."""
    speeds: Mapping[int, float] = field(default_factory=dict)
    """Tokens per second up to the same readings, where they are an objective."""
    result: TrialResult | None = None
    settled: bool = False
    """False while the trial is running or its result is not yet shown to the tracking store."""
    attempts: Sequence[Mapping[str, Any]] = ()
    """How earlier attempts at it ended, as runners.attempts writes them."""
    mutations: Sequence[Mapping[str, Any]] = ()
    """When it went on from another trial's state, as runners.mutations writes it."""
    owner: str = ""
    """The driver that runs it or shows it to the tracking store."""
    started: float = 0.0
    """Seconds since the epoch at which it was stored; 0 before."""


def open_storage(uri: str) -> RDBStorage:
    """Optuna's storage at a URI; the tables are made when they are missing."""
    if not uri.startswith((SQLITE, *_POSTGRES)):
        raise UserError(
            f"study storage {uri!r}: takes sqlite:///FILE or postgresql://USER@HOST/DATABASE; give --study such a URI"
        )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return _patiently_opened(uri)
    except (sqlalchemy.exc.SQLAlchemyError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"study storage {uri}: cannot be opened ({lines[0]}); check the address, the disk and the rights to it, or "
            "bring back an intact copy"
        ) from error


def _patiently_opened(uri: str) -> RDBStorage:
    """Opened although another process makes the tables at this moment: whoever comes second finds them in its way."""
    for attempt in range(_OPENINGS):
        try:
            return _opened(uri)
        except (
            sqlalchemy.exc.IntegrityError,
            sqlalchemy.exc.OperationalError,
            sqlalchemy.exc.ProgrammingError,
        ) as error:
            # Of PostgreSQL and SQLite: a table, its type or its first row is there by now.
            if not any(word in str(error) for word in _THERE) or attempt == _OPENINGS - 1:
                raise
            time.sleep(0.1 * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


def _opened(uri: str) -> RDBStorage:
    if not uri.startswith(SQLITE):
        return RDBStorage(driver_uri(uri))
    storage = RDBStorage(uri, engine_kwargs={"connect_args": {"timeout": _BUSY_SECONDS}})
    storage.engine.dispose()
    sqlalchemy.event.listen(storage.engine, "connect", log_ahead)
    return storage


def distribution(domain: Domain) -> BaseDistribution:
    """The domain in Optuna's words; unordered options stay unordered."""
    if isinstance(domain, Choice):
        return CategoricalDistribution(domain.options)
    if isinstance(domain, IntRange):
        return IntDistribution(domain.low, domain.high, log=domain.log, step=domain.step)
    return FloatDistribution(domain.low, domain.high, log=domain.log)


def exists(storage: RDBStorage, name: str) -> bool:
    """True when the storage holds trials under this name."""
    return any(study.study_name == name for study in storage.get_all_studies())


class Ledger:
    """The trials under one name, mirrored in memory; each trial is written by the driver that owns it."""

    def __init__(self, storage: RDBStorage, name: str, directions: Sequence[StudyDirection]) -> None:
        self._storage = storage
        if not exists(storage, name):
            storage.create_new_study(list(directions), name)
        self._study = storage.get_study_id_from_name(name)
        self._tables = StudyTables(storage.engine, self._study)
        self._ids: list[int] = []
        self._entries: list[Entry] = []
        self._open: set[int] = set()
        for trial in storage.get_all_trials(self._study, deepcopy=False):
            self._take(trial)

    def _take(self, trial: FrozenTrial) -> None:
        """Mirror a stored trial."""
        entry = _entry(trial)
        if entry.number == len(self._entries):
            self._ids.append(trial._trial_id)
            self._entries.append(entry)
        self._put(entry)

    def _put(self, entry: Entry) -> None:
        self._entries[entry.number] = entry
        (self._open.discard if entry.settled else self._open.add)(entry.number)

    def refresh(self, me: str) -> list[Entry]:
        """Mirror what other drivers than `me` have written since; the entries that changed."""
        born = self._tables.since(len(self))
        theirs = [number for number in sorted(self._open) if self._entries[number].owner != me]
        before = [self._entries[number] for number in theirs]
        for trial_id in [*(self._ids[number] for number in theirs), *born]:
            self._take(self._storage.get_trial(trial_id))
        changed = [self._entries[entry.number] for entry in before if self._entries[entry.number] != entry]
        return changed + self._entries[len(self) - len(born) :] if born else changed

    def unfinished(self) -> list[Entry]:
        """Trials that run, or whose result is not yet shown to the tracking store, by number."""
        return [self._entries[number] for number in sorted(self._open)]

    def claim(self, number: int, driver: str) -> None:
        """Make a driver the trial's owner."""
        self._storage.set_trial_user_attr(self._ids[number], OWNER, driver)
        self._put(dataclasses.replace(self._entries[number], owner=driver))

    def owner_now(self, number: int) -> str:
        """The trial's owner as it is stored at this moment, whoever wrote it."""
        claimed = self._tables.claim(self._ids[number])
        return self._entries[number].owner if claimed is None else claimed

    def entries(self) -> Sequence[Entry]:
        """Every trial, by number."""
        return tuple(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, number: int) -> Entry:
        return self._entries[number]

    def add(self, entry: Entry, domains: Mapping[str, Domain], turn: Connection | None = None) -> None:
        """Store the trial whole; `domains` are the searched paths of its point.

        `turn`, here and below, is the transaction of the driver's turn, where it is one, to be stored with.
        """
        assert entry.number == len(self), f"trial {entry.number} would be stored as number {len(self)}"
        # To the bit as it will be read again: points in time that count from it are written more than once.
        started = datetime.datetime.fromtimestamp(entry.started or time.time()).timestamp()
        entry = dataclasses.replace(entry, started=started)
        distributions = {path: distribution(domain) for path, domain in domains.items()}
        self._ids.append(self._stored(entry, distributions, turn))
        self._entries.append(entry)
        self._put(entry)

    def _stored(self, entry: Entry, distributions: dict[str, BaseDistribution], turn: Connection | None) -> int:
        if entry.result is not None or entry.readings:
            return self._storage.create_new_trial(self._study, _frozen(entry, distributions))
        with self._tables.transaction(turn) as connection:
            return self._tables.begin(
                connection, entry.number, entry.started, entry.point, distributions, _attributes(entry)
            )

    def read(self, number: int, tokens: int, loss: float, speed: float = 0.0) -> bool:
        """Store one reading of a running trial, and a speed above 0; a repeated one overwrites.

        False, with nothing stored, when another driver claimed the trial.
        """
        entry = self._entries[number]
        if speed:
            entry = dataclasses.replace(entry, speeds={**entry.speeds, tokens: speed})
        more = {_SPEEDS: list(entry.speeds.items())} if speed else {}
        if not self._tables.read(self._ids[number], tokens, loss, entry.owner, more):
            return False
        self._put(dataclasses.replace(entry, readings={**entry.readings, tokens: loss}))
        return True

    def record(self, number: int, result: TrialResult, turn: Connection | None = None) -> bool:
        """Store how a trial ended, on the disk; it counts as running until it is settled.

        False, with nothing stored, when another driver claimed the trial.
        """
        entry = self._entries[number]
        with self._tables.transaction(turn, lasting=True) as connection:
            if not self._tables.attribute(connection, self._ids[number], RESULT, to_plain(result), entry.owner):
                return False
        self._put(dataclasses.replace(entry, result=result))
        return True

    def attempted(self, number: int, attempts: Sequence[Mapping[str, Any]]) -> None:
        """Store how all earlier attempts at a running trial ended."""
        self._storage.set_trial_user_attr(self._ids[number], ATTEMPTS, list(attempts))
        self._put(dataclasses.replace(self._entries[number], attempts=tuple(attempts)))

    def mutated(self, number: int, mutations: Sequence[Mapping[str, Any]]) -> None:
        """Store every going on of a running trial from another one's state."""
        self._storage.set_trial_user_attr(self._ids[number], MUTATIONS, list(mutations))
        self._put(dataclasses.replace(self._entries[number], mutations=tuple(mutations)))

    def settle(self, ended: Mapping[int, Sequence[float]], me: str = "", turn: Connection | None = None) -> None:
        """Close recorded trials, but for those that another driver than `me` claimed.

        Each comes with its objectives; one that is ok without any is closed as failed.
        """
        ends = [self._end(number, values) for number, values in ended.items()]
        if not ends:
            return
        with self._tables.transaction(turn, hasty=True) as connection:
            closed = self._tables.close(connection, ends, me)
        for number in ended:
            if self._ids[number] in closed:
                self._put(dataclasses.replace(self._entries[number], settled=True))

    def _end(self, number: int, values: Sequence[float]) -> End:
        result = self._entries[number].result
        assert result is not None, f"trial {number} is settled without a result"
        state = _state(result, values)
        return End(trial=self._ids[number], state=state, values=() if state is TrialState.FAIL else values)

    def note(self, key: str, value: Any) -> None:
        """Store a plain value about the whole study."""
        self._storage.set_study_user_attr(self._study, key, value)

    def noted(self, key: str, default: Any) -> Any:
        """The plain value stored under the key."""
        return self.notes().get(key, default)

    def notes(self) -> dict[str, Any]:
        """Everything noted about the whole study."""
        return dict(self._storage.get_study_user_attrs(self._study))


_STATES = {Status.OK: TrialState.COMPLETE, Status.PRUNED: TrialState.PRUNED}


def _state(result: TrialResult, values: Sequence[float]) -> TrialState:
    if result.status is Status.OK and not values:
        return TrialState.FAIL
    return _STATES.get(result.status, TrialState.FAIL)


def _attributes(entry: Entry) -> dict[str, Any]:
    """What a trial is stored with beside its parameters."""
    birth = {
        "generation": entry.generation,
        "spec": to_plain(entry.spec),
        "point": dict(entry.point),
        "arch_id": entry.arch_id,
        "cost": dict(entry.cost),
        "marks": dict(entry.marks),
        "owner": entry.owner,
    }
    return {
        _BIRTH: birth,
        **({} if entry.result is None else {RESULT: to_plain(entry.result)}),
        **({_SPEEDS: list(entry.speeds.items())} if entry.speeds else {}),
        **({ATTEMPTS: list(entry.attempts)} if entry.attempts else {}),
        **({MUTATIONS: list(entry.mutations)} if entry.mutations else {}),
    }


def _frozen(entry: Entry, distributions: dict[str, BaseDistribution]) -> FrozenTrial:
    now = datetime.datetime.fromtimestamp(entry.started)
    state, values = TrialState.RUNNING, None
    if entry.settled:
        assert entry.result is not None
        state = _state(entry.result, entry.marks.get("values", ()))
        values = (entry.marks.get("values") or None) if state is not TrialState.FAIL else None
    return FrozenTrial(
        number=entry.number,
        trial_id=-1,
        state=state,
        value=None,
        values=values,
        datetime_start=now,
        datetime_complete=now if entry.settled else None,
        params={path: entry.point[path] for path in distributions},
        distributions=distributions,
        user_attrs=_attributes(entry),
        system_attrs={},
        intermediate_values=dict(entry.readings),
    )


def _entry(trial: FrozenTrial) -> Entry:
    birth = dict(trial.user_attrs[_BIRTH])
    result = trial.user_attrs.get(RESULT)
    owner = trial.user_attrs.get(OWNER, birth.pop("owner", ""))
    return Entry(
        **{**birth, "spec": spec_from_plain(birth["spec"]), "owner": owner},
        number=trial.number,
        readings=dict(trial.intermediate_values),
        speeds={int(tokens): float(speed) for tokens, speed in trial.user_attrs.get(_SPEEDS, ())},
        result=None if result is None else result_from_plain(result),
        settled=trial.state.is_finished(),
        started=trial.datetime_start.timestamp() if trial.datetime_start else 0.0,
        attempts=tuple(trial.user_attrs.get(ATTEMPTS, ())),
        mutations=tuple(trial.user_attrs.get(MUTATIONS, ())),
    )
