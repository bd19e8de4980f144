import os
import sqlite3
import time
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from tracked import result, searched, store_uri

from runners.housekeeping import HousekeepingError, carry_out, plan_collect, plan_remove
from runners.store import Store, StoreError
from runners.tracking import Tracker
from search_space.places import locate

LATER = 7200.0


def write(uri: str, name: str, *, finish: bool = True) -> str:
    """A search of one trial with a study beside the store; the trial's run."""
    search, tracker = searched(name), Tracker(uri)
    search.start(tracker)
    run = search.start_trial(tracker, 0)
    if finish:
        tracker.finish_trial(run, result())
        tracker.finish_search("FINISHED")
    studies = locate(uri).studies
    studies.mkdir(exist_ok=True)
    (studies / f"{name}.db").write_bytes(b"study")
    return run


def test_removing_a_search_lists_first_then_deletes_it_and_nothing_else(tmp_path: Path) -> None:
    uri = store_uri(tmp_path)
    write(uri, "kept")
    write(uri, "gone")
    plan = plan_remove("gone", uri)
    place = locate(uri)
    assert set(plan.paths) == {place.studies / "gone.db", place.artifacts / "gone"}
    assert plan.size_bytes > 1000
    assert any("1 trials" in line for line in plan.lines)
    assert (place.artifacts / "gone").is_dir()

    carry_out(plan, uri)
    assert list(Store(place).searches()) == ["kept"]
    assert not any(path.exists() for path in plan.paths)
    assert (place.artifacts / "kept").is_dir()
    assert (place.studies / "kept.db").is_file()
    with sqlite3.connect(tmp_path / "mlruns/mlflow.db") as connection:
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (2,)
        assert connection.execute("SELECT count(DISTINCT run_uuid) FROM metrics").fetchone() == (1,)
    connection.close()
    carry_out(plan_remove("kept", uri), uri)


def test_a_removed_name_can_be_used_again(tmp_path: Path) -> None:
    uri = store_uri(tmp_path)
    write(uri, "again")
    carry_out(plan_remove("again", uri), uri)
    run = write(uri, "again")
    assert Store(locate(uri)).find_run("again/0").info.run_id == run


def test_a_running_search_is_not_removed(tmp_path: Path) -> None:
    uri = store_uri(tmp_path)
    write(uri, "busy", finish=False)
    with pytest.raises(HousekeepingError, match="is running"):
        plan_remove("busy", uri)


def test_an_unknown_search_is_named_with_near_matches(tmp_path: Path) -> None:
    uri = store_uri(tmp_path)
    write(uri, "positions")
    with pytest.raises(StoreError, match="did you mean 'positions'"):
        plan_remove("position", uri)


def test_collecting_finds_what_nothing_refers_to_and_leaves_the_rest(tmp_path: Path) -> None:
    uri = store_uri(tmp_path)
    place = locate(uri)
    dropped = write(uri, "dropped")
    write(uri, "kept")
    single = searched("kept")
    tracker = Tracker(uri)
    single.start(tracker)
    deleted = single.start_trial(tracker, 1)
    tracker.finish_trial(deleted, result())
    tracker.finish_search("FINISHED")
    client = MlflowClient(tracking_uri=uri)
    client.delete_run(deleted)
    client.delete_experiment(client.get_run(dropped).info.experiment_id)
    lost = place.artifacts / "kept" / "0123456789abcdef0123456789abcdef"
    lost.mkdir()
    (place.artifacts / "nobody").mkdir()
    (place.studies / "nobody.db").write_bytes(b"study")

    later = time.time() + LATER
    plan = plan_collect(uri, now=later)
    assert plan.runs == (deleted,)
    assert len(plan.experiments) == 1
    assert set(plan.paths) == {
        place.artifacts / "dropped",
        place.artifacts / "kept" / deleted,
        lost,
        place.artifacts / "nobody",
        place.studies / "nobody.db",
        place.studies / "dropped.db",
    }
    carry_out(plan, uri)
    assert not plan_collect(uri, now=later)
    assert Store(place).find_run("kept/0")
    assert (place.studies / "kept.db").exists()
    write(uri, "dropped")


def test_collecting_leaves_young_files_to_the_search_that_may_be_starting(tmp_path: Path) -> None:
    uri = store_uri(tmp_path)
    place = locate(uri)
    write(uri, "kept")
    (place.studies / "starting.db").write_bytes(b"study")
    (place.artifacts / "starting").mkdir()
    assert not plan_collect(uri)
    old = time.time() - LATER
    for path in (place.studies / "starting.db", place.artifacts / "starting"):
        os.utime(path, (old, old))
    assert len(plan_collect(uri).paths) == 2
