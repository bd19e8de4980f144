"""A worker that is killed costs one attempt: its trial is run once more, wherever the study is kept."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import sqlalchemy
from drivers import Driver
from made_up import environment
from processes import descendants, wait_for
from servers import postgres
from studied import experiment, uri

from runners.attempts import attempts_of
from runners.ledger import open_storage
from runners.store import Store
from runners.study import Study
from search_space.places import locate
from search_space.records import Status, Tag

ASKED = ("search.trials=2", "search.sampler=random", "search.pruner={asha: {grace_tokens: 256, factor: 2}}")


@contextmanager
def sqlite(folder: Path) -> Iterator[str]:
    yield uri(folder)


@contextmanager
def database(folder: Path) -> Iterator[str]:
    with postgres() as server:
        yield server


@pytest.mark.fault
@pytest.mark.parametrize("place", [sqlite, pytest.param(database, marks=pytest.mark.postgres)])
def test_the_trial_of_a_killed_worker_is_taken_for_preempted_and_run_once_more(
    tmp_path: Path, place: Callable[[Path], AbstractContextManager[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with place(tmp_path) as study_uri:
        engine = open_storage(study_uri).engine
        driver = Driver(tmp_path, *ASKED, given=environment(seconds=2.0, ASSAY_STUDY=study_uri))
        wait_for("a reading", lambda: readings(engine) > 0 or driver.ended)
        (worker,) = [pid for pid in descendants(driver.pid) if b"runners.worker" in command_of(pid)]
        os.kill(worker, signal.SIGKILL)
        driver.finish()
        with Study.open(study_uri, experiment(*ASKED)) as study:
            entries = study.trials()
        engine.dispose()
    assert all(entry.settled for entry in entries)
    assert len(entries) == 2
    attempts = {entry.number: [each.status for each in attempts_of(entry)] for entry in entries}
    assert attempts == {0: [Status.PREEMPTED], 1: []}
    (attempt,) = attempts_of(entries[0])
    assert attempt.reason == "the worker process was ended by signal SIGKILL in mid-trial"
    store = Store(locate(f"sqlite:///{tmp_path}/mlflow.db"))
    runs = {run.data.tags[Tag.NUMBER]: run for run in store.children(store.parent("small"))}
    assert len(runs) == 2
    assert runs["0"].info.status == "FINISHED"
    assert "1: preempted" in runs["0"].data.tags[Tag.ATTEMPTS]


def readings(engine: sqlalchemy.Engine) -> int:
    """How many the study holds."""
    with engine.connect() as connection:
        return int(connection.execute(sqlalchemy.text("SELECT count(*) FROM trial_intermediate_values")).scalar_one())


def command_of(pid: int) -> bytes:
    """A process's command line; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""
