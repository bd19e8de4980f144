"""Workers run side by side, and drivers that share a study propose nothing twice."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import sqlalchemy
from drivers import Driver
from gated_trials import ALL, allow
from made_up import FOLDER, TRIALS, environment
from processes import wait_for
from servers import postgres
from studied import experiment, uri
from tracked import store_uri

from runners.audit import audit
from runners.progress import OneLine, Progress, Snapshot
from runners.search import run_search
from runners.study import Study
from runners.tasks import task_from_plain
from runners.tracking import Tracker
from runners.warm import FINGERPRINT
from search_space.canon import canonical_json
from search_space.places import driver_uri

SHARED = 60
JOINED = (f"search.trials={SHARED}", "engine.jobs=8", "search.seed=7", "budget.max_seconds=3600")


class Clock(Progress):
    """Notes when the first trial began and when the last one ended."""

    began = ended = 0.0

    def show(self, snapshot: OneLine, *, now: bool = False) -> None:
        assert isinstance(snapshot, Snapshot)
        if snapshot.running and not self.began:
            self.began = time.monotonic()
        if snapshot.done == snapshot.total and not self.ended:
            self.ended = time.monotonic()


@pytest.mark.slow
def test_four_workers_take_a_quarter_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("FAKE_TRIAL_SECONDS", "2")
    asked = experiment("search.trials=24", "engine.jobs=4")
    clock, tracker = Clock(), Tracker(store_uri(tmp_path))
    run_search(asked, tracker=tracker, study_uri=uri(tmp_path), progress=clock, trials=TRIALS)
    ideal = 24 * 2 / 4
    assert ideal <= clock.ended - clock.began < 1.3 * ideal


@contextmanager
def sqlite(folder: Path) -> Iterator[str]:
    yield uri(folder)


@contextmanager
def database(folder: Path) -> Iterator[str]:
    with postgres() as server:
        yield server


@pytest.mark.fault
@pytest.mark.parametrize("place", [sqlite, pytest.param(database, marks=pytest.mark.postgres)])
def test_two_drivers_of_eight_workers_with_one_seed_propose_nothing_twice(
    tmp_path: Path, place: Callable[[Path], AbstractContextManager[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with place(tmp_path) as study_uri:
        allow(gate := tmp_path / "gate", 0)
        given = environment(seconds=0.5, gate=gate, ASSAY_STUDY=study_uri)
        # At once, so that both find no study yet.
        drivers = [Driver(tmp_path, *JOINED, *more, given=given) for more in ((), ("--join",))]
        wait_for("a trial in every worker", lambda: _begun(study_uri) == 16 or any(each.ended for each in drivers))
        allow(gate, ALL)
        for each in drivers:
            each.finish()
        with Study.open(study_uri, experiment(*JOINED)) as study:
            study.bind(task_from_plain(study.experiment.task).shape(), study.noted(FINGERPRINT, ""))
            entries = study.trials()
            found = list(audit(study))
    assert [entry.number for entry in entries] == list(range(SHARED))
    assert len({canonical_json(dict(entry.point)) for entry in entries}) == SHARED
    assert all(entry.settled for entry in entries)
    assert len({entry.owner for entry in entries}) == 2
    assert [each for each in found if not each.holds or each.why or not each.drawn] == []


def _begun(study_uri: str) -> int:
    """How many trials are stored; 0 while there is no study."""
    engine = sqlalchemy.create_engine(driver_uri(study_uri), poolclass=sqlalchemy.NullPool)
    with engine.connect() as connection:
        if not sqlalchemy.inspect(connection).has_table("trials"):
            return 0
        return int(connection.execute(sqlalchemy.text("SELECT count(*) FROM trials")).scalar_one())


OPENS = """
import sys
from runners.ledger import open_storage
print("ready", flush=True)
sys.stdin.read()
open_storage(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", [sqlite, pytest.param(database, marks=pytest.mark.postgres)])
def test_processes_that_open_a_new_study_at_once_all_get_it(
    tmp_path: Path, place: Callable[[Path], AbstractContextManager[str]]
) -> None:
    held, starts = os.pipe()  # Its end is what all of them wait for.
    with place(tmp_path) as study_uri:
        words = [sys.executable, "-c", OPENS, study_uri]
        opening = [
            subprocess.Popen(words, stdin=held, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(6)
        ]
        os.close(held)
        for each in opening:
            assert each.stdout is not None
            assert each.stdout.readline() == "ready\n"
        os.close(starts)
        told = [each.communicate()[1] for each in opening]
    assert [each.returncode for each in opening] == [0] * 6, told
