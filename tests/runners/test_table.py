"""A large search on a server is read from the tables that its drivers keep, and never otherwise than run by run."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from mlflow.tracking import MlflowClient
from served import Served, served
from tracked import result, searched, store_uri

import analysis.uptodate
from analysis import cache, load, webread
from analysis.assembling import assemble
from analysis.frame import Search
from runners import curves, table, tracking
from runners.store import Store
from runners.tracking import Tracker
from search_space.places import locate
from search_space.records import Artifact, Stage, Status, Tag

pytestmark = pytest.mark.slow

BATCH = 4
COLD, WARM = 18, 7
"""Requests for a search of any size: what is live, tables, a sample, the count, curves and files of the parent."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    root = tmp_path_factory.mktemp("server")
    with served(store_uri(root), root) as running:
        yield running, root / "mlruns" / "mlflow.db"


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done for thousands of trials is done for a dozen."""
    for module in (table, analysis.uptodate):
        monkeypatch.setattr(module, "SIZE", BATCH)
    for module in (cache, analysis.uptodate):
        monkeypatch.setattr(module, "FEWEST", BATCH)
    monkeypatch.setattr(curves, "_MOST", 2)
    monkeypatch.setattr(curves, "SHARD_TRIALS", BATCH)
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))


class Writing:
    """A driver's work on a search of made-up results."""

    def __init__(self, uri: str, name: str, *, joined: bool = False) -> None:
        self.search, self.tracker, self.uri = searched(name), Tracker(uri), uri
        made = self.search
        self.parent = self.tracker.start_search(
            made.experiment, made.experiment.space.id, made.data, made.environment, joined=joined
        )

    def begin(self, number: int) -> str:
        return self.tracker.start_trial(number, Stage.SEARCH, 0, *self.search.trial(number % 2), f"{number:03d} tiny")

    def trials(self, *numbers: int) -> None:
        for number in numbers:
            status = Status.DIVERGED if number % 5 == 3 else Status.OK
            self.tracker.finish_trial(self.begin(number), result(status, reason="x" if status != Status.OK else ""))

    def tables(self) -> list[str]:
        store = Store(locate(self.uri))
        return sorted(entry.path for entry in store.client.list_artifacts(self.parent, Artifact.TRIALS))


def every_run(uri: str, name: str) -> Search:
    """The search as it is when each run is asked for."""
    return assemble(uri, name, webread.runs(uri, [webread.experiments(uri)[name]]))[0]


def equal(found: Search, whole: Search) -> None:
    pd.testing.assert_frame_equal(found.frame[list(whole.frame)], whole.frame)
    pd.testing.assert_frame_equal(found.curves.drop(columns="seconds"), whole.curves.drop(columns="seconds"))
    assert found.parent == whole.parent
    assert set(found.frame) == set(whole.frame)


def check(uri: str, name: str) -> Search:
    """What is loaded equals what is there."""
    found = load.load_search(uri, name)
    equal(found, every_run(uri, name))
    return found


def load_by_tables(monkeypatch: pytest.MonkeyPatch, uri: str, name: str) -> Search:
    """The search, loaded without asking for each run."""
    with monkeypatch.context() as patch:
        patch.setattr(webread, "runs", lambda *_: pytest.fail("every run was read"))
        return load.load_search(uri, name)


def test_so_many_requests_read_a_search_however_many_trials_it_has(
    server: tuple[Served, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, _ = server
    for name, count in (("few", 2 * BATCH), ("many", 4 * BATCH)):
        driver = Writing(running.uri, name)
        driver.trials(*range(count))
        assert len(driver.tables()) == count // BATCH
        driver.tracker.finish_search("FINISHED")
        assert len(driver.tables()) == 1
        before = len(running.asked)
        cold = load_by_tables(monkeypatch, running.uri, name)
        assert len(running.asked) - before <= COLD
        assert not [path for path in running.asked[before:] if "metrics" in path]
        assert len(cold.trials) == count
        before = len(running.asked)
        listed = load.list_runs(running.uri, name)
        assert len(running.asked) - before <= COLD
        assert [row.number for row in listed] == list(range(count))
        before = len(running.asked)
        warm = load_by_tables(monkeypatch, running.uri, name)
        assert len(running.asked) - before <= WARM
        pd.testing.assert_frame_equal(warm.frame, cold.frame)
        check(running.uri, name)


def test_every_change_is_seen_with_and_without_what_was_kept(
    server: tuple[Served, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = server[0].uri
    driver = Writing(uri, "changing")
    driver.trials(*range(6))
    cut = driver.begin(6)
    client = MlflowClient(uri)

    def changed() -> Search:
        found, whole = load_by_tables(monkeypatch, uri, "changing"), every_run(uri, "changing")
        equal(found, whole)
        with monkeypatch.context() as patch:
            patch.setenv("ASSAY_CACHE", "off")
            equal(load_by_tables(monkeypatch, uri, "changing"), whole)
        return found

    assert changed().trials["status"].iloc[-1] == "running"
    driver.trials(7, 8, 9)
    assert len(changed().trials) == 10
    driver.tracker.finish_trial(cut, replace(result(Status.PREEMPTED, 2), reason="cut off"))
    assert changed().trials["status"].iloc[6] == "preempted"
    again = driver.begin(3)
    assert changed().trials["status"].iloc[3] == "running"
    driver.tracker.finish_trial(again, result())
    assert changed().trials["status"].iloc[3] == "ok"
    driver.tracker.drop_weights(1, Stage.SEARCH, 0, "made room")
    (dropped,) = load.runs_by_id(uri, [changed().trials["run_id"].iloc[1]])
    assert dropped.tags[Tag.WEIGHTS] == "made room"
    client.delete_run(changed().trials["run_id"].iloc[2])
    assert list(changed().trials["number"]) == [0, 1, *range(3, 10)]
    # The search is killed: nothing of it is closed, and what it began goes on under another driver.
    later = Writing(uri, "changing")
    later.trials(2, 6, *range(10, 13))
    assert len(changed().trials) == 13
    later.tracker.finish_search("FINISHED")
    assert set(changed().trials["status"]) == {"ok", "diverged"}


def test_drivers_side_by_side_are_all_read(server: tuple[Served, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    uri = server[0].uri
    leads = Writing(uri, "side")
    leads.trials(0, 2, 4)
    with monkeypatch.context() as patch:
        patch.setattr(tracking, "this_driver", lambda: "elsewhere:1:1")
        joins = Writing(uri, "side", joined=True)
    joins.trials(1, 3, 5, 7, 9)
    assert len(load_by_tables(monkeypatch, uri, "side").trials) == 8
    leads.trials(6, 8)
    joins.tracker.drop_weights(0, Stage.SEARCH, 0, "made room")
    for _ in range(2):
        assert len(load_by_tables(monkeypatch, uri, "side").trials) == 10
        check(uri, "side")
        monkeypatch.setenv("ASSAY_CACHE", "off")


def test_a_store_that_says_otherwise_than_its_tables_is_read_run_by_run(
    server: tuple[Served, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, database = server
    driver = Writing(running.uri, "restored")
    driver.trials(*range(2 * BATCH))
    driver.tracker.finish_search("FINISHED")
    ids = list(check(running.uri, "restored").trials["run_id"])
    with closing(sqlite3.connect(database)) as store, store:
        store.execute("DELETE FROM metrics WHERE run_uuid = ?", [ids[0]])
        for name in ("tags", "params", "latest_metrics", "runs"):
            store.execute(f"DELETE FROM {name} WHERE run_uuid = ?", [ids[0]])
    assert len(check(running.uri, "restored").trials) == 2 * BATCH - 1
    with closing(sqlite3.connect(database)) as store, store:
        store.execute("UPDATE latest_metrics SET value = 7 WHERE key = 'loss'")
    monkeypatch.setenv("ASSAY_CACHE", "off")
    assert set(check(running.uri, "restored").trials["loss"].dropna()) == {7.0}


def test_a_search_that_fits_into_a_batch_keeps_no_table(server: tuple[Served, Path]) -> None:
    driver = Writing(server[0].uri, "tiny")
    driver.trials(*range(BATCH - 1))
    driver.tracker.finish_search("FINISHED")
    assert driver.tables() == []
    check(driver.uri, "tiny")
