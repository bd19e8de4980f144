import os
import shutil
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from studied import experiment
from tracked import free_port, result, searched, store_uri

from runners.connecting import StoreError
from runners.dashboard import start, stop
from runners.housekeeping import HousekeepingError, carry_out, plan_collect, plan_remove
from runners.owners import database_files, mark_owner, searches_in
from runners.search import run_search
from runners.store import Store
from runners.study import Study
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
    studies.mkdir(parents=True, exist_ok=True)
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


def age(*paths: Path) -> None:
    """Make files look old enough to be cleared."""
    old = time.time() - LATER
    for path in paths:
        os.utime(path, (old, old))


def lone(uri: str, name: str, serves: str = "") -> tuple[Path, Path]:
    """An old study beside the store whose search is nowhere held, and its folder; it serves the URI when given one."""
    study = locate(uri).studies / f"{name}.db"
    folder = study.with_suffix("")
    folder.mkdir(parents=True)
    study.write_bytes(b"study")
    if serves:
        mark_owner(folder, locate(serves))
    age(study)
    return study, folder


def test_collecting_leaves_what_another_store_beside_it_uses(tmp_path: Path) -> None:
    uri = store_uri(tmp_path)
    write(uri, "kept")
    own = lone(uri, "own", uri)
    for name, other in (
        ("served", "http://127.0.0.1:5000"),
        ("held_in_postgres", "postgresql://me:secret@127.0.0.1/runs"),
        ("neighbour", f"sqlite:///{tmp_path}/mlruns/other.db"),
    ):
        _, folder = lone(uri, name, other)
        assert "secret" not in "".join(file.read_text() for file in folder.iterdir())
        (locate(uri).artifacts / name).mkdir()
        age(locate(uri).artifacts / name)
    assert set(plan_collect(uri).paths) == set(own)


def test_what_a_store_owns_moves_with_it(tmp_path: Path) -> None:
    uri = store_uri(tmp_path / "here")
    write(uri, "kept")
    lone(uri, "own", uri)
    shutil.move(tmp_path / "here", tmp_path / "there")
    there = store_uri(tmp_path / "there")
    assert set(plan_collect(there).paths) == {locate(there).studies / "own.db", locate(there).studies / "own"}


def test_collecting_leaves_a_study_that_is_held_or_was_just_written(tmp_path: Path) -> None:
    uri = store_uri(tmp_path)
    write(uri, "kept")
    study, _ = lone(uri, "small", uri)
    study.unlink()
    with Study.open(f"sqlite:///{study}", experiment()) as opened:
        opened.note("x", 1)
        age(*database_files(study))
        assert not plan_collect(uri)
    age(*database_files(study))
    plan = plan_collect(uri)
    assert study in plan.paths
    with Study.open(f"sqlite:///{study}", experiment()):
        carry_out(plan, uri)
        assert study.exists()
    age(*database_files(study))
    assert plan_collect(uri)
    assert plan_collect(uri), "looking makes nothing younger"
    log = study.with_name(f"{study.name}-wal")
    log.write_bytes(b"written just now")
    assert not plan_collect(uri)


def test_a_study_file_of_several_searches_stays_while_one_is_held(tmp_path: Path) -> None:
    uri = store_uri(tmp_path)
    write(uri, "small")
    study = locate(uri).studies / "all.db"
    Study.open(f"sqlite:///{study}", experiment()).close()
    mark_owner(study.parent / "small", locate(uri))
    age(*database_files(study))
    assert not plan_collect(uri)


@pytest.mark.parametrize("neighbour", [False, True])
def test_removing_a_search_removes_the_study_it_was_given(tmp_path: Path, neighbour: bool) -> None:
    uri, study = store_uri(tmp_path), tmp_path / "elsewhere" / "study.db"
    study.parent.mkdir()
    given = f"sqlite:///{study}"
    run_search(experiment("search.trials=1"), tracker=Tracker(uri), study_uri=given)
    if neighbour:
        Study.open(given, replace(experiment(), name="other")).close()
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "mlruns", copy / "mlruns")
    of_copy = plan_remove("small", f"sqlite:///{copy}/mlruns/mlflow.db")
    assert study not in of_copy.paths
    assert any("serves another store" in line for line in of_copy.lines)

    plan = plan_remove("small", uri)
    with Study.open(given, experiment("search.trials=1")), pytest.raises(HousekeepingError, match="a driver holds"):
        plan_remove("small", uri)
    carry_out(plan, uri)
    assert not (study.parent / "small").exists()
    assert study.exists() is neighbour
    if neighbour:
        assert any("holds other searches too" in line for line in plan.lines)
        assert searches_in(study) == {"other"}


def test_removing_a_search_says_that_a_study_on_a_server_is_left(tmp_path: Path) -> None:
    uri, search = store_uri(tmp_path), searched()
    tracker = Tracker(uri)
    given = "postgresql://me:secret@127.0.0.1/studies"
    tracker.start_search(search.experiment, search.experiment.space.id, search.data, search.environment, given)
    tracker.finish_search("FINISHED")
    (line,) = [line for line in plan_remove("tiny", uri).lines if line.startswith("left:")]
    assert "postgresql://127.0.0.1/studies" in line
    assert "optuna delete-study" in line
    assert "secret" not in line
    assert "secret" not in str(Store(locate(uri)).parent("tiny").data.tags)


@pytest.mark.slow
def test_collecting_on_a_server_frees_the_names_of_deleted_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    port = free_port()
    (tmp_path / "served").mkdir()
    server = start(locate(store_uri(tmp_path / "served")), port)
    try:
        uri = f"http://127.0.0.1:{port}"
        run = write(uri, "tiny")
        client = MlflowClient(tracking_uri=uri)
        client.delete_experiment(client.get_run(run).info.experiment_id)
        client.delete_experiment(client.create_experiment("of somebody else"))
        own = lone(uri, "own", uri)
        lone(uri, "others", f"sqlite:///{tmp_path}/mlruns/mlflow.db")
        lone(uri, "unknown")
        plan = plan_collect(uri)
        assert len(plan.experiments) == 1
        assert set(plan.paths) == set(own)
        carry_out(plan, uri)
        assert not plan_collect(uri)
        write(uri, "tiny")
    finally:
        stop(server)
