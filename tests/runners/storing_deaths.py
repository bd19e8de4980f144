"""Dies at every moment at which a trial is proposed and stored: `python storing_deaths.py STUDY_URI OTHER_URI`.

Each death is one of a process forked from this one, which has imported and measured what it needs for the study at the
other URI, where nobody dies. Prints as JSON what was found.
"""

import json
import multiprocessing
import sys
import time
from collections import Counter
from dataclasses import asdict
from multiprocessing.connection import Connection

import sqlalchemy
from sql_deaths import Moment, Step, Steps, moments
from studied import SHAPE, experiment, made_up

from runners.study import Study
from search_space.places import driver_uri

FORKS = multiprocessing.get_context("fork")
ASKED = ("search.sampler=random", "search.trials=1000")
UNDISTURBED = 12
Rows = dict[str, dict[str, int]]
"""How many rows of each table belong to each trial, by number; those of no trial are under 'none'."""


def ready(uri: str) -> Study:
    """The study, with every trial that was left in it ended, so that each proposal takes the same steps."""
    study = Study.open(uri, experiment(*ASKED))
    study.bind(SHAPE, "made up")
    study.adopt()
    for left in study.running():
        study.tell(left.number, made_up(left))
    return study


def propose(uri: str, dies_at: Moment | None, told: Connection) -> None:
    """Propose one trial and tell which steps that took, if it comes to that."""
    with ready(uri) as study:
        steps = Steps(study.storage.engine, dies_at)
        study.propose()
        told.send(steps.passed)


def proposed(uri: str, dies_at: Moment | None = None) -> tuple[int | None, list[Step]]:
    """The exit code of a process that proposes a trial, and the steps that it lived to tell."""
    ours, theirs = FORKS.Pipe(duplex=False)
    with ours:
        process = FORKS.Process(target=propose, args=(uri, dies_at, theirs))
        process.start()
        theirs.close()
        passed = [] if dies_at else ours.recv()
        process.join()
    return process.exitcode, passed


def rows(uri: str) -> Rows:
    """What the study's tables hold, read when no other session is left."""
    engine = sqlalchemy.create_engine(driver_uri(uri), poolclass=sqlalchemy.NullPool)
    with engine.connect() as connection:
        _await_solitude(connection)
        numbers = {
            key: str(number)
            for key, number in connection.execute(sqlalchemy.text("SELECT trial_id, number FROM trials"))
        }
        inspector = sqlalchemy.inspect(connection)
        found = {}
        for table in inspector.get_table_names():
            if "trial_id" in {column["name"] for column in inspector.get_columns(table)}:
                owners = connection.execute(sqlalchemy.text(f"SELECT trial_id FROM {table}")).scalars()
                found[table] = dict(Counter(numbers.get(owner, "none") for owner in owners))
    return found


def _await_solitude(connection: sqlalchemy.Connection) -> None:
    """PostgreSQL ends the session of a process that died when it comes to notice."""
    if connection.dialect.name != "postgresql":
        return
    others = sqlalchemy.text(
        "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid != pg_backend_pid()"
    )
    end = time.monotonic() + 60
    while connection.execute(others).scalar():
        assert time.monotonic() < end, "the session of a dead process lives on"
        time.sleep(0.01)


def points(uri: str) -> list[dict[str, object]]:
    """The points of all trials, by number."""
    with ready(uri) as study:
        return [dict(entry.point) for entry in study.trials()]


def main(uri: str, other: str) -> None:
    """Let one process live, then one die at each moment that it passed."""
    with ready(other) as study:
        for _ in range(UNDISTURBED):
            assert study.propose() is not None
    _, steps = proposed(uri)
    whole = rows(uri)
    deaths = []
    for moment in moments(steps):
        code, _ = proposed(uri, moment)
        deaths.append({"moment": asdict(moment), "code": code, "rows": rows(uri)})
    undisturbed = {"rows": rows(other), "points": points(other)}
    print(json.dumps({"deaths": deaths, "whole": whole, "points": points(uri), "undisturbed": undisturbed}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
