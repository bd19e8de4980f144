import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from servers import postgres
from tracked import check_written, children, free_port, result, searched, store_uri, write_search

from runners.connecting import StoreError, connect
from runners.dashboard import start, stop
from runners.store import Store
from runners.tracking import Tracker
from search_space.errors import UserError
from search_space.places import locate
from search_space.records import Artifact, Stage, Tag


def test_runs_are_found_by_number_best_and_id(tmp_path: Path) -> None:
    uri, search, tracker = store_uri(tmp_path), searched(), Tracker(store_uri(tmp_path))
    search.start(tracker)
    runs = [search.start_trial(tracker, number) for number in range(3)]
    for run, count in zip(runs, (3, 5, 4), strict=True):
        tracker.finish_trial(run, result(count=count))
    tracker.finish_search("FINISHED")
    store = Store(locate(uri))
    assert store.find_run("tiny/2").info.run_id == runs[2]
    assert store.find_run("tiny/best").info.run_id == runs[1]
    assert store.find_run(runs[0][:12]).info.run_id == runs[0]
    for name, words in {"tiny/9": "trials there: 0 to 2", "tinny/1": "'tiny'", "zz": "SEARCH/NUMBER"}.items():
        with pytest.raises(StoreError, match=words):
            store.find_run(name)


def test_a_moved_store_still_finds_and_takes_artifacts(tmp_path: Path) -> None:
    write_search(store_uri(tmp_path / "old"))
    shutil.move(tmp_path / "old", tmp_path / "new")
    uri = store_uri(tmp_path / "new")
    store = Store(locate(uri))
    assert store.result(store.find_run("tiny/0")) == result()

    tracker = Tracker(uri)
    search = searched()
    parent = search.start(tracker)
    run = search.start_trial(tracker, 2)
    tracker.finish_trial(run, result())
    tracker.finish_search("FINISHED")
    assert not (tmp_path / "old").exists()
    plain = MlflowClient(tracking_uri=uri)
    assert {entry.path for entry in plain.list_artifacts(run)} == {Artifact.SPEC, Artifact.RESULT}
    assert Artifact.SPACE in {entry.path for entry in plain.list_artifacts(parent)}


def test_a_copied_store_never_reads_its_original(tmp_path: Path) -> None:
    write_search(store_uri(tmp_path / "old"))
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    for file in (tmp_path / "old").rglob(Artifact.RESULT):
        file.write_text("spoiled")
    store = Store(locate(store_uri(tmp_path / "new")))
    assert store.result(store.find_run("tiny/0")) == result()


def test_a_store_that_is_not_there_is_refused_and_not_created(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no such file"):
        Store(locate(f"sqlite:///{tmp_path}/mlruns/mlflow.db"))
    assert not list(tmp_path.iterdir())


def test_a_server_that_does_not_answer_is_named_at_once() -> None:
    uri = f"http://127.0.0.1:{free_port()}"
    began = time.monotonic()
    with pytest.raises(StoreError, match="does not answer"):
        Tracker(uri)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("uri", ["mlruns", "file:///tmp/mlruns", "sqlite:///", "mysql://host/db", "sqlite:///a?x=1"])
def test_uris_that_cannot_work_are_refused_with_one_that_can(uri: str) -> None:
    with pytest.raises(UserError, match=r"sqlite:///.*mlruns/mlflow\.db"):
        locate(uri)


def test_the_environment_and_the_argument_choose_the_store(tmp_path: Path) -> None:
    variable = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:5000"}
    assert locate("", environment={}, folder=tmp_path).uri == f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    assert locate("", environment=variable, folder=tmp_path).uri == "http://127.0.0.1:5000"
    chosen = locate("sqlite:///a/b.db", environment=variable, folder=tmp_path)
    assert chosen.uri == f"sqlite:///{tmp_path}/a/b.db"
    assert (chosen.artifacts, chosen.studies) == (tmp_path / "a/artifacts", tmp_path / "a/studies")


@pytest.mark.slow
def test_a_search_is_written_whole_through_a_server(tmp_path: Path) -> None:
    write_search(store_uri(tmp_path), name="other")
    port = free_port()
    server = start(locate(store_uri(tmp_path)), port)
    try:
        uri = f"http://127.0.0.1:{port}"
        check_written(uri, write_search(uri))
        write_search(uri)
        assert len(children(uri)) == 2
    finally:
        stop(server)


@pytest.mark.slow
@pytest.mark.postgres
def test_a_search_is_written_whole_to_postgresql(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with postgres() as uri:
        check_written(uri, write_search(uri))
        write_search(uri)
        assert len(children(uri)) == 2


def test_a_folder_with_spaces_holds_a_store(tmp_path: Path) -> None:
    folder = tmp_path / "my work, 100%"
    folder.mkdir()
    check_written(store_uri(folder), write_search(store_uri(folder)))


def test_every_run_says_its_generation_and_a_final_is_the_newest_ones(tmp_path: Path) -> None:
    uri, search, tracker = store_uri(tmp_path), searched(), Tracker(store_uri(tmp_path))
    search.start(tracker)
    spec, resolved = search.trial(0)
    runs = {}
    for generation in (10, 9):
        runs[generation] = tracker.start_trial(0, Stage.FINAL, generation, spec, resolved, "final", {})
        tracker.finish_trial(runs[generation], result())
    tracker.finish_search("FINISHED")
    found = Store(locate(uri)).find_run("tiny/final/0")
    assert found.info.run_id == runs[10]
    assert found.data.tags[Tag.GENERATION] == "10"


def test_a_store_whose_making_was_cut_off_is_made_again(tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        connection.execute("INSERT INTO alembic_version VALUES ('acf3f17fdcc7')")
        connection.execute("CREATE TABLE trace_info (request_id VARCHAR(50))")
        connection.execute("CREATE TABLE experiments (experiment_id INTEGER)")
    assert connect(locate(f"sqlite:///{database}")).search_experiments()


def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(bytes(range(256)) * 64)
    with pytest.raises(StoreError, match="cannot be opened"):
        connect(locate(f"sqlite:///{tmp_path}/mlflow.db"))
