"""Opening a tracking store: a database file, made where there is none, or a server that answers."""

import fcntl
import logging
import os
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from search_space.errors import UserError
from search_space.places import Place, driver_uri

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""Environment under which MLflow neither calls home, draws, nor waits for minutes; set unless the user set it."""


class StoreError(UserError):
    """The tracking store cannot be reached, or does not hold what was asked for."""


class StoreDown(StoreError):
    """A server does not answer, for now."""


def connect(place: Place) -> "MlflowClient":
    """A quiet client; a SQLite store is created where there is none, by one process at a time."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if place.is_server:
        _knock(place.uri)
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient
    from sqlalchemy.exc import SQLAlchemyError

    logging.getLogger("mlflow").setLevel(logging.ERROR)
    try:
        with _schema_lock(place):
            if place.database is not None and _is_half_made(place.database):
                place.database.unlink()
            client = MlflowClient(tracking_uri=driver_uri(place.uri))
            client.search_experiments(max_results=1)
            if place.database is not None:
                _log_ahead(client)
    except (MlflowException, OSError, sqlite3.Error, SQLAlchemyError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        kind = StoreDown if place.database is None else StoreError
        raise kind(
            f"tracking store {place.uri}: cannot be opened ({lines[0]}); check the address and the rights to it"
        ) from error
    return client


def _log_ahead(client: "MlflowClient") -> None:
    """Give the SQLite store a write-ahead log: it stays whole whatever is killed, and a commit waits for no disk.

    Without it a trial waits about nine times for the disk, and readers hold up the writer.
    """
    from sqlalchemy import event

    engine = client._tracking_client.store.engine
    if not event.contains(engine, "connect", _on_connect):
        event.listen(engine, "connect", _on_connect)
        engine.dispose()


def _on_connect(connection: Any, record: Any) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")


def _is_half_made(database: Path) -> bool:
    """True for tables whose making was cut off: MLflow ends it by storing its default experiment."""
    if not database.is_file():
        return False
    with closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True, timeout=30)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}

        def rows(table: str) -> int:
            return connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] if table in tables else 0

        return bool(tables) and not rows("experiments") and not rows("runs")


def _knock(uri: str) -> None:
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=10):
            return
    except urllib.error.HTTPError:
        return
    except OSError as error:
        raise StoreDown(
            f"tracking server {uri}: does not answer ({error}); start it, or correct --tracking-uri "
            "or MLFLOW_TRACKING_URI"
        ) from error


@contextmanager
def _schema_lock(place: Place) -> Iterator[None]:
    if place.database is None:
        yield
        return
    place.database.parent.mkdir(parents=True, exist_ok=True)
    with open(place.database.with_name(f".{place.database.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
