"""Runs straight from the tables of a SQLite tracking store: no tracking client to import, no write, a few queries."""

import math
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from search_space.errors import UserError
from search_space.places import database_file
from search_space.records import Stage, Status, Tag

RUNNING = "running"
"""The status of a trial that has not ended."""
_UNTAGGED = {"FINISHED": Status.OK, "FAILED": Status.FAILED, "KILLED": Status.PREEMPTED}
"""What the store's own status stands for when a run ended without telling how."""

_NEEDED = {
    "experiments": {"experiment_id", "name", "lifecycle_stage"},
    "runs": {
        "run_uuid",
        "name",
        "status",
        "start_time",
        "end_time",
        "lifecycle_stage",
        "artifact_uri",
        "experiment_id",
    },
    "tags": {"key", "value", "run_uuid"},
    "params": {"key", "value", "run_uuid"},
    "latest_metrics": {"key", "value", "step", "is_nan", "run_uuid"},
    "metrics": {"key", "value", "step", "is_nan", "run_uuid", "timestamp"},
}
_FEW = 400
"""How many runs one statement names."""


class StoreError(UserError):
    """The tracking store cannot give what was asked for; the message holds the remedy."""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run as the store holds it, whichever way it was read."""

    run_id: str
    name: str
    state: str
    """The store's own status: RUNNING, FINISHED, FAILED, KILLED, SCHEDULED."""
    start: float
    """Seconds since 1970; 0 when unknown."""
    end: float
    """Seconds since 1970; 0 while it runs."""
    artifact_uri: str
    experiment_id: str
    search: str
    params: dict[str, str]
    metrics: dict[str, float]
    """Last value of each finite metric."""
    tags: dict[str, str]

    @property
    def is_trial(self) -> bool:
        """True for a child run that trained one candidate."""
        return self.tags.get(Tag.KIND) == "trial"

    @property
    def number(self) -> int:
        """The trial's number within its stage; -1 for a parent."""
        return int(self.tags.get(Tag.NUMBER, "-1"))

    @property
    def stage(self) -> str:
        """Why the run was trained."""
        return self.tags.get(Tag.STAGE, str(Stage.SEARCH))

    @property
    def generation(self) -> int:
        """The generation of the search it was proposed in."""
        return int(self.tags.get(Tag.GENERATION, "0"))

    @property
    def status(self) -> str:
        """How the trial ended, or 'running'."""
        if self.state not in _UNTAGGED:
            return RUNNING
        return self.tags.get(Tag.STATUS) or str(_UNTAGGED[self.state])


def connect(path: Path) -> sqlite3.Connection | None:
    """A read-only connection, or None when the tables are not those this module knows (ask the client then)."""
    if not path.is_file():
        raise StoreError(
            f"tracking store {path}: there is no such file; run a search first, "
            f"or name the store with --tracking-uri sqlite:///PATH/mlflow.db"
        )
    connection = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, timeout=30)
    try:
        for table, columns in _NEEDED.items():
            held = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
            if not columns <= held:
                connection.close()
                return None
    except sqlite3.DatabaseError as error:
        connection.close()
        raise StoreError(
            f"tracking store {path}: is not a readable SQLite file ({error}); name another store"
        ) from error
    return connection


def reads(uri: str) -> bool:
    """True for a SQLite store whose tables this module knows."""
    store = database_file(uri)
    connection = connect(store) if store is not None else None
    if connection is not None:
        connection.close()
    return connection is not None


def experiments(uri: str) -> dict[str, str]:
    """Name to id of every live experiment."""
    with _opened(uri) as connection:
        rows = connection.execute("SELECT name, experiment_id FROM experiments WHERE lifecycle_stage = 'active'")
        return {name: str(key) for name, key in rows}


def runs(uri: str, experiment_ids: Sequence[str]) -> list[RunRow]:
    """Every live run of the experiments, oldest first."""
    marks = ",".join("?" * len(experiment_ids))
    where = f"r.lifecycle_stage = 'active' AND r.experiment_id IN ({marks})"
    with _opened(uri) as connection:
        return _read(connection, where, list(map(int, experiment_ids)))


def runs_by_id(uri: str, run_ids: Sequence[str]) -> list[RunRow]:
    """The live runs with these ids."""
    parts = [run_ids[first : first + _FEW] for first in range(0, len(run_ids), _FEW)]
    with _opened(uri) as connection:
        return [
            row
            for part in parts
            for row in _read(
                connection,
                f"r.lifecycle_stage = 'active' AND r.run_uuid IN ({','.join('?' * len(part))})",
                list(part),
            )
        ]


def runs_by_prefix(uri: str, prefix: str) -> list[RunRow]:
    """Every live run whose id starts with the prefix."""
    where = "r.lifecycle_stage = 'active' AND substr(r.run_uuid, 1, ?) = ?"
    with _opened(uri) as connection:
        return _read(connection, where, [len(prefix), prefix])


def _opened(uri: str) -> "closing[sqlite3.Connection]":
    store = database_file(uri)
    connection = connect(store) if store is not None else None
    assert connection is not None, f"{uri} is asked only after reads() knew its tables"
    return closing(connection)


def _read(connection: sqlite3.Connection, where: str, values: Sequence[int | str]) -> list[RunRow]:
    heads = connection.execute(
        "SELECT r.run_uuid, r.name, r.status, r.start_time, r.end_time, r.artifact_uri, r.experiment_id, e.name"
        f" FROM runs r JOIN experiments e ON e.experiment_id = r.experiment_id WHERE {where}"
        " ORDER BY r.start_time, r.run_uuid",
        values,
    ).fetchall()
    chosen = f"SELECT r.run_uuid FROM runs r WHERE {where}"
    params = _grouped(
        connection.execute(f"SELECT run_uuid, key, value FROM params WHERE run_uuid IN ({chosen})", values)
    )
    tags = _grouped(connection.execute(f"SELECT run_uuid, key, value FROM tags WHERE run_uuid IN ({chosen})", values))
    metrics: dict[str, dict[str, float]] = defaultdict(dict)
    for run_id, key, value in connection.execute(
        f"SELECT run_uuid, key, value FROM latest_metrics WHERE NOT is_nan AND run_uuid IN ({chosen})", values
    ):
        if math.isfinite(value):
            metrics[run_id][key] = float(value)
    return [
        RunRow(
            run_id=run_id,
            name=name or "",
            state=state,
            start=(start or 0) / 1000,
            end=(end or 0) / 1000,
            artifact_uri=artifact_uri or "",
            experiment_id=str(experiment_id),
            search=search,
            params=params.get(run_id, {}),
            metrics=metrics.get(run_id, {}),
            tags=tags.get(run_id, {}),
        )
        for run_id, name, state, start, end, artifact_uri, experiment_id, search in heads
    ]


def _grouped(rows: Iterable[tuple[str, str, str]]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for run_id, key, value in rows:
        found[run_id][key] = value or ""
    return found


def histories(uri: str, run_ids: Sequence[str], keys: Sequence[str]) -> list[tuple[str, str, int, float]]:
    """(run id, metric, step, value) of whole metric histories, steps increasing within a run and metric."""
    found: list[tuple[str, str, int, float]] = []
    with _opened(uri) as connection:
        for start in range(0, len(run_ids), _FEW):
            part = list(run_ids[start : start + _FEW])
            found += connection.execute(
                "SELECT run_uuid, key, step, value FROM metrics WHERE NOT is_nan"
                f" AND run_uuid IN ({','.join('?' * len(part))}) AND key IN ({','.join('?' * len(keys))})"
                " ORDER BY run_uuid, key, step, timestamp",
                part + list(keys),
            ).fetchall()
    return found
