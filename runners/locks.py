"""One leading driver per study, others that join it: locks that end with their process, however it dies."""

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import sqlalchemy
from optuna.storages import RDBStorage

from runners.crew import DatabaseTurns, FileTurns
from runners.ledger import SQLITE
from runners.owners import JOINED, LOCK
from search_space.canon import seed_from
from search_space.errors import UserError


class StudyBusy(UserError):
    """Another driver runs this search."""


def lock_study(storage: RDBStorage, name: str, folder: Path) -> Callable[[], None]:
    """Hold the study for this process; the returned function lets go. StudyBusy when another process holds it."""
    if storage.url.startswith(SQLITE):
        return _lock_file(folder / LOCK, name)
    return _lock_database(storage.engine, name)


def lock_joined(storage: RDBStorage, folder: Path) -> Callable[[], None]:
    """Mark the study's files as in use by a driver that joined; the returned function lets go."""
    if not storage.url.startswith(SQLITE):
        return lambda: None
    handle = os.open(folder / JOINED, os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.flock(handle, fcntl.LOCK_SH)
    return lambda: os.close(handle)


def turns_of(storage: RDBStorage, name: str, folder: Path) -> FileTurns | DatabaseTurns:
    """How the drivers of a study take turns."""
    if storage.url.startswith(SQLITE):
        return FileTurns(folder / "turn.lock")
    return DatabaseTurns(storage.engine, seed_from("assay turn", name))


def _lock_file(path: Path, name: str) -> Callable[[], None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 32).decode().strip()
        os.close(handle)
        raise _busy(name, f"process {holder} holds {path}") from None
    os.truncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return lambda: os.close(handle)


def _lock_database(engine: sqlalchemy.Engine, name: str) -> Callable[[], None]:
    connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    key = seed_from("assay study", name)
    if not connection.execute(sqlalchemy.text("SELECT pg_try_advisory_lock(:key)"), {"key": key}).scalar():
        connection.close()
        raise _busy(name, f"another session of {engine.url.render_as_string()} holds its lock")

    def release() -> None:
        with suppress(sqlalchemy.exc.SQLAlchemyError):  # A connection that broke has let go already.
            connection.execute(sqlalchemy.text("SELECT pg_advisory_unlock(:key)"), {"key": key})
        connection.close()

    return release


def _busy(name: str, holder: str) -> StudyBusy:
    return StudyBusy(
        f"search {name!r} is being run by another driver ({holder}): work beside it with --join, wait for it, stop it, "
        "or give this one another --name"
    )
