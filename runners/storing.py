"""What a search writes for every trial, in few statements, into the tables of Optuna's storage.

Optuna's own way asks the database about every parameter, counts all trials, which grows with the search, and waits for
the disk at every step. What it checks holds by construction, or is a condition of the statement: numbers are given
under the study's turn, choice sets are fixed within a generation, and a trial that ended or is another driver's is not
written.

Only the end of a trial is waited for until it is on the disk. Both databases log what they are told in order, so that
everything that was stored before lies there too; DECISIONS.md says why that is enough.
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
from sqlalchemy import Connection, Engine, Table, bindparam, cast, event, exists, insert, select, text, update
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
_DURABLE = "synchronous_commit"
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


def hasten(engine: Engine) -> None:
    """Let commits on connections of the engine survive the death of every process without a wait for the disk."""
    engine.dispose()
    event.listen(engine, "connect", _hasten_sqlite if engine.dialect.name == _SQLITE else _hasten_postgres)


def _hasten_sqlite(connection: Any, record: Any) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")


def _hasten_postgres(connection: Any, record: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SHOW {_DURABLE}")
        (record.info[_DURABLE],) = cursor.fetchone()
        cursor.execute(f"SET {_DURABLE} TO off")
    connection.commit()


@contextmanager
def lasting(connection: Connection) -> Iterator[None]:
    """One transaction, begun and committed here, that is on the disk when it returns, with all that came before."""
    if connection.dialect.name == _SQLITE:
        connection.exec_driver_sql("PRAGMA synchronous=FULL")
        connection.commit()
    try:
        with connection.begin():
            if _DURABLE in connection.info:
                own = {"name": _DURABLE, "own": connection.info[_DURABLE]}
                connection.execute(text("SELECT set_config(:name, :own, true)"), own)
            yield
    finally:
        if connection.dialect.name == _SQLITE:
            connection.exec_driver_sql("PRAGMA synchronous=NORMAL")
            connection.commit()


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
        # A statement of its own needs no BEGIN and no COMMIT, which would be messages of their own.
        self._single = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._read = _upsert(engine, _READINGS, "step", "intermediate_value", "intermediate_value_type")
        self._attribute = _upsert(engine, _ATTRIBUTES, "key", "value_json")
        self._value = _upsert(engine, _VALUES, "objective", "value", "value_type")

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
        number: int,
        started: float,
        point: Mapping[str, Scalar],
        distributions: Mapping[str, BaseDistribution],
        attributes: Mapping[str, Any],
    ) -> int:
        """Store a running trial, whole or not at all; its id. `started` is in seconds since the epoch."""
        trial = {
            "study_id": self._study,
            "number": number,
            "state": TrialState.RUNNING,
            "datetime_start": _utc(started),
        }
        with self._engine.begin() as connection:
            key = connection.execute(_NEW_TRIAL, trial).inserted_primary_key
            assert key is not None, "the database gave the trial no id"
            trial_id = int(key[0])
            if distributions:
                connection.execute(
                    _NEW_PARAMS,
                    [
                        {
                            "trial_id": trial_id,
                            "param_name": path,
                            "param_value": held.to_internal_repr(point[path]),
                            "distribution_json": distribution_to_json(held),
                        }
                        for path, held in distributions.items()
                    ],
                )
            given = [
                {"trial_id": trial_id, "key": name, "value_json": json.dumps(value)}
                for name, value in attributes.items()
            ]
            connection.execute(_NEW_ATTRIBUTES, given)
        return trial_id

    def read(self, trial: int, tokens: int, loss: float, me: str, more: Mapping[str, Any]) -> bool:
        """Store a reading, and `more` attributes; False when nothing was stored."""
        value, kind = TrialIntermediateValueModel.intermediate_value_to_stored_repr(loss)
        given = {"step": tokens, "intermediate_value": value, "intermediate_value_type": kind}
        with self._engine.begin() if more else self._single.connect() as connection:
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


def _upsert(engine: Engine, table: Table, key: str, *names: str) -> postgresql.Insert | sqlite.Insert:
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
    rows = new.from_select(list(given), select(*given.values()).where(runs, ~claimed))
    return rows.on_conflict_do_update(
        index_elements=["trial_id", key], set_={name: rows.excluded[name] for name in names}
    )
