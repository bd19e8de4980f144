"""Deaths of a process at each moment of a database's work: before, within and after every statement and commit.

Statements are seen where SQLAlchemy hands them to the database, so whatever is written through an engine is seen.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy
from sqlalchemy import event

When = Literal["before", "within", "after"]
COMMIT = "COMMIT"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One statement or commit that passed."""

    what: str
    """Its first words, as far as they name the table that is written."""
    calls: int
    """How often the database called back while it was at it."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Where a process is to die."""

    step: int
    """Of the steps since listening began, from 0."""
    what: str
    when: When
    calls: int = 0
    """Within a step: after how many calls back."""


def moments(steps: list[Step]) -> list[Moment]:
    """Before, in the middle of, and after each step."""
    found = []
    for index, step in enumerate(steps):
        found.append(Moment(step=index, what=step.what, when="before"))
        if step.calls:
            found.append(Moment(step=index, what=step.what, when="within", calls=(step.calls + 1) // 2))
        found.append(Moment(step=index, what=step.what, when="after"))
    return found


class Steps:
    """What the connections of an engine do from now on; SIGKILL for this process at the moment that is given."""

    def __init__(self, engine: sqlalchemy.Engine, dies_at: Moment | None = None) -> None:
        self.passed: list[Step] = []
        self._what, self._calls = "", 0
        self._dies_at = dies_at
        event.listen(engine, "before_cursor_execute", self._statement)
        event.listen(engine, "after_cursor_execute", self._end)
        event.listen(engine, "commit", self._commit)
        event.listen(engine, "reset", self._end)  # The first that is heard after a commit.
        if engine.dialect.name == "sqlite":
            event.listen(engine, "checkout", self._hear_sqlite)
        else:
            _hear_psycopg2(self._call)

    def _statement(self, connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        self._begin(" ".join(statement.partition("(")[0].split()[:3]))

    def _commit(self, connection: Any) -> None:
        self._begin(COMMIT)

    def _begin(self, what: str) -> None:
        self._end()
        self._what, self._calls = what, 0
        self._moment("before")

    def _end(self, *given: Any) -> None:
        if self._what:
            self._moment("after")
            self.passed.append(Step(what=self._what, calls=self._calls))
            self._what = ""

    def _call(self) -> int:
        if self._what:
            self._calls += 1
            self._moment("within", self._calls)
        return 0

    def _moment(self, when: When, calls: int = 0) -> None:
        if Moment(step=len(self.passed), what=self._what, when=when, calls=calls) == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def _hear_sqlite(self, connection: Any, *given: Any) -> None:
        """SQLite calls back as it works through a statement's instructions."""
        connection.set_progress_handler(self._call, 1)


def _hear_psycopg2(call: Callable[[], object]) -> None:
    """Psycopg2 calls back once what it sent is under way and the server's answer has not been read."""
    from psycopg2.extensions import set_wait_callback
    from psycopg2.extras import wait_select

    def wait(connection: Any) -> None:
        call()
        wait_select(connection)

    set_wait_callback(wait)
