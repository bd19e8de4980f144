"""What a search writes for every trial, in few statements, into the tables of Optuna's storage.

Optuna's own way asks the database about every parameter, counts all trials, which grows with the search, and waits for
the disk at every step. What it checks holds by construction, or is a condition of the statement: numbers are given
under the study's turn, choice sets are fixed within a generation, and a trial that ended or is another driver's is not
written.

An end is on the disk before it counts, and with it all that was stored before, since a database logs in order. Readings
and closes are not waited for; DECISIONS.md says why they need not be.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.storages._rdb.models import (
    TrialIntermediateValueModel,
    TrialModel,
    TrialParamModel,
    TrialUserAttributeModel,
    TrialValueModel,
)
from optuna.trial import TrialState
from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Table,
    bindparam,
    cast,
    exists,
    func,
    insert,
    select,
    text,
    true,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from search_space.domains import Scalar

OWNER = "assay.owner"
"""The attribute that names the driver which claimed a trial."""
_SQLITE = "sqlite"
_TRIALS: Table = TrialModel.__table__
_PARAMS: Table = TrialParamModel.__table__
_ATTRIBUTES: Table = TrialUserAttributeModel.__table__
_READINGS: Table = TrialIntermediateValueModel.__table__
_VALUES: Table = TrialValueModel.__table__
_HASTE = func.set_config("synchronous_commit", "off", True)
"""Lets PostgreSQL's present transaction end without a wait for the disk."""
_NEW_TRIAL, _NEW_PARAMS, _NEW_ATTRIBUTES = insert(_TRIALS), insert(_PARAMS), insert(_ATTRIBUTES)
_SINCE = text("SELECT trial_id FROM trials WHERE study_id = :study AND number >= :known ORDER BY number")
_CLAIM = text("SELECT value_json FROM trial_user_attributes WHERE trial_id = :trial AND key = :key")
_CLAIMED = select(_ATTRIBUTES.c.trial_id).where(
    _ATTRIBUTES.c.key == OWNER,
    _ATTRIBUTES.c.value_json != bindparam("me"),
    _ATTRIBUTES.c.trial_id.in_(bindparam("trials", expanding=True)),
)
_CLOSE = (
    update(_TRIALS)
    .where(_TRIALS.c.trial_id.in_(bindparam("trials", expanding=True)), _TRIALS.c.state == TrialState.RUNNING)
    .values(state=bindparam("ended"), datetime_complete=bindparam("now"))
)


def log_ahead(connection: Any, record: Any) -> None:
    """Let commits on a new connection to SQLite survive the death of every process without a wait for the disk."""
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")


@dataclass(frozen=True, kw_only=True)
class End:
    """A trial that is to be closed."""

    trial: int
    state: TrialState
    values: Sequence[float]


class StudyTables:
    """The tables of one study. What is written of a trial that has ended, or that another than `me` claimed, is not."""

    def __init__(self, engine: Engine, study_id: int) -> None:
        self._engine = engine
        self._study = study_id
        self._is_sqlite = engine.dialect.name == _SQLITE
        # To PostgreSQL, BEGIN and COMMIT are messages of their own, which a statement by itself does not need.
        self._single = engine if self._is_sqlite else engine.execution_options(isolation_level="AUTOCOMMIT")
        hasty = true() if self._is_sqlite else _HASTE == "off"
        self._read = _upsert(engine, _READINGS, "step", "intermediate_value", "intermediate_value_type", also=hasty)
        self._attribute = _upsert(engine, _ATTRIBUTES, "key", "value_json")
        self._value = _upsert(engine, _VALUES, "objective", "value", "value_type")

    @contextmanager
    def transaction(
        self, turn: Connection | None = None, *, lasting: bool = False, hasty: bool = False
    ) -> Iterator[Connection]:
        """The transaction of a turn, or one of its own that ends here.

        SQLite waits for the disk where it is `lasting`; PostgreSQL does, unless it is `hasty`.
        """
        if turn is not None:
            if hasty:
                turn.execute(select(_HASTE))
            yield turn
            return
        with self._engine.connect() as connection:
            if lasting and self._is_sqlite:
                connection.exec_driver_sql("PRAGMA synchronous=FULL")
                connection.commit()
            try:
                with connection.begin():
                    if hasty and not self._is_sqlite:
                        connection.execute(select(_HASTE))
                    yield connection
            finally:
                if lasting and self._is_sqlite:
                    connection.exec_driver_sql("PRAGMA synchronous=NORMAL")
                    connection.commit()

    def since(self, known: int) -> list[int]:
        """Ids of the trials beyond the first `known`, in order."""
        with self._single.connect() as connection:
            return [int(trial) for (trial,) in connection.execute(_SINCE, {"study": self._study, "known": known})]

    def claim(self, trial: int) -> str | None:
        """The driver that claimed a trial; None when none did."""
        with self._single.connect() as connection:
            found = connection.execute(_CLAIM, {"trial": trial, "key": OWNER}).scalar()
        return None if found is None else str(json.loads(found))

    def begin(
        self,
        connection: Connection,
        number: int,
        started: float,
        point: Mapping[str, Scalar],
        distributions: Mapping[str, BaseDistribution],
        attributes: Mapping[str, Any],
    ) -> int:
        """Store a running trial within a transaction; its id. `started` is in seconds since the epoch."""
        trial = {
            "study_id": self._study,
            "number": number,
            "state": TrialState.RUNNING,
            "datetime_start": _utc(started),
        }
        key = connection.execute(_NEW_TRIAL, trial).inserted_primary_key
        assert key is not None, "the database gave the trial no id"
        trial_id = int(key[0])
        if distributions:
            params = [
                {
                    "trial_id": trial_id,
                    "param_name": path,
                    "param_value": held.to_internal_repr(point[path]),
                    "distribution_json": distribution_to_json(held),
                }
                for path, held in distributions.items()
            ]
            connection.execute(_NEW_PARAMS, params)
        named = [
            {"trial_id": trial_id, "key": name, "value_json": json.dumps(value)} for name, value in attributes.items()
        ]
        connection.execute(_NEW_ATTRIBUTES, named)
        return trial_id

    def read(self, trial: int, tokens: int, loss: float, me: str, more: Mapping[str, Any]) -> bool:
        """Store a reading, and `more` attributes; False when nothing was stored."""
        value, kind = TrialIntermediateValueModel.intermediate_value_to_stored_repr(loss)
        given = {"step": tokens, "intermediate_value": value, "intermediate_value_type": kind}
        with self._engine.begin() if more else self._single.begin() as connection:
            for key, attribute in more.items():
                self.attribute(connection, trial, key, attribute, me)
            return connection.execute(self._read, {"trial_id": trial, "me": json.dumps(me), **given}).rowcount == 1

    def attribute(self, connection: Connection, trial: int, key: str, value: Any, me: str) -> bool:
        """Store an attribute within a transaction; False when it was not."""
        given = {"trial_id": trial, "key": key, "value_json": json.dumps(value), "me": json.dumps(me)}
        return connection.execute(self._attribute, given).rowcount == 1

    def close(self, connection: Connection, ends: Sequence[End], me: str) -> set[int]:
        """Close trials within a transaction; the ids of those that were closed."""
        asked = {"trials": [end.trial for end in ends], "me": json.dumps(me)}
        claimed = set(connection.execute(_CLAIMED, asked).scalars())
        kept = [end for end in ends if end.trial not in claimed]
        values = [
            {"trial_id": end.trial, "objective": place, **_stored(value), "me": json.dumps(me)}
            for end in kept
            for place, value in enumerate(end.values)
        ]
        if values:
            connection.execute(self._value, values)
        for state in {end.state for end in kept}:
            trials = [end.trial for end in kept if end.state is state]
            connection.execute(_CLOSE, {"trials": trials, "ended": state, "now": _utc(time.time())})
        return {end.trial for end in kept}


def _stored(value: float) -> dict[str, Any]:
    held, kind = TrialValueModel.value_to_stored_repr(value)
    return {"value": held, "value_type": kind}


def _utc(seconds: float) -> datetime:
    """A point in time as Optuna's tables hold it."""
    return datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None)


def _upsert(
    engine: Engine, table: Table, key: str, *names: str, also: ColumnElement[bool] | None = None
) -> postgresql.Insert | sqlite.Insert:
    """Stores a row of a trial, or overwrites the one with its key, while the trial runs and no other claimed it."""
    types = {name: table.c[name].type for name in ("trial_id", key, *names)}
    given = {name: cast(bindparam(name, type_=kind), kind) for name, kind in types.items()}
    runs = exists().where(_TRIALS.c.trial_id == bindparam("trial_id"), _TRIALS.c.state == TrialState.RUNNING)
    claimed = exists().where(
        _ATTRIBUTES.c.trial_id == bindparam("trial_id"),
        _ATTRIBUTES.c.key == OWNER,
        _ATTRIBUTES.c.value_json != bindparam("me"),
    )
    new = sqlite.insert(table) if engine.dialect.name == _SQLITE else postgresql.insert(table)
    rows = new.from_select(list(given), select(*given.values()).where(runs, ~claimed, true() if also is None else also))
    return rows.on_conflict_do_update(
        index_elements=["trial_id", key], set_={name: rows.excluded[name] for name in names}
    )
