"""The drivers that run one study together: who of them lives, and whose turn it is to propose.

Each driver notes a beat in the study. One of this machine is judged by its process; one elsewhere by its beats, timed
by the clock of who looks, so that clocks need not agree.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy
from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import SQLAlchemyError

from runners.driver import is_dead, is_here, this_driver
from runners.ledger import Ledger

BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0
"""A driver of another machine that was silent for so long is taken for dead."""
_PREFIX = "assay.driver/"
_LEFT = 0.0
_LOCK = sqlalchemy.text("SELECT pg_advisory_xact_lock(:key)")


class Crew:
    """This driver among the others of its study."""

    def __init__(self, ledger: Ledger, turns: "FileTurns | DatabaseTurns") -> None:
        self.me = this_driver()
        self._ledger = ledger
        self._turns = turns
        self._next_beat = 0.0
        self._heard: dict[str, tuple[float, float]] = {}
        self._last_known: set[str] = set()
        self.beat()

    @contextmanager
    def turn(self) -> Iterator[sqlalchemy.Connection | None]:
        """Alone among all drivers, for the time of one proposal; where turns are transactions, the one of this turn."""
        with self._turns.hold() as transaction:
            yield transaction

    def beat(self) -> None:
        """Say that this driver lives; costs nothing until a beat is due."""
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + BEAT_SECONDS
            self._ledger.note(f"{_PREFIX}{self.me}", time.time())
            self.others()

    def leave(self) -> None:
        """Say that this driver is gone; its trials are free for others."""
        self._ledger.note(f"{_PREFIX}{self.me}", _LEFT)

    def others(self) -> set[str]:
        """The other drivers that live, as far as can be known."""
        beats = {key.removeprefix(_PREFIX): at for key, at in self._ledger.notes().items() if key.startswith(_PREFIX)}
        self._last_known = {driver for driver, at in beats.items() if driver != self.me and self._lives(driver, at)}
        return self._last_known

    def others_as_last_known(self) -> list[str]:
        """The same in order; while the study cannot be read, those it last named that are not known to be dead."""
        try:
            return sorted(self.others())
        except (SQLAlchemyError, StorageInternalError):
            # Silence proves nothing of a driver elsewhere that could not be heard.
            return sorted(driver for driver in self._last_known if not (is_here(driver) and is_dead(driver)))

    def _lives(self, driver: str, beat: float) -> bool:
        if beat == _LEFT:
            return False
        if is_here(driver):
            return not is_dead(driver)
        now = time.monotonic()
        known, since = self._heard.get(driver, (-1.0, now))
        self._heard[driver] = (beat, now if known != beat else since)
        return known != beat or now - since < SILENT_SECONDS


class FileTurns:
    """Turns by a lock on a file, for studies in a file of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Wait for the turn and keep it; the system ends it with the process."""
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


class DatabaseTurns:
    """Turns by an advisory lock of PostgreSQL, which ends with the connection."""

    def __init__(self, engine: sqlalchemy.Engine, key: int) -> None:
        self._engine = engine
        self._key = key

    @contextmanager
    def hold(self) -> Iterator[sqlalchemy.Connection]:
        """Wait for the turn and keep it until the transaction ends, in which things may be stored."""
        with self._engine.begin() as connection:
            connection.execute(_LOCK, {"key": self._key})
            yield connection
