"""Tests of analysis/load.py, analysis/fastread.py and analysis/frame.py."""

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest
import synthetic
from conftest import store_uri
from mlflow.tracking import MlflowClient
from served import served

from analysis import cache, clientread, fastread, load
from analysis.fastread import StoreError
from analysis.frame import PARAM, Search, typed
from search_space.records import Artifact, Metric, Stage, Status, Tag

ROOT = Path(__file__).parents[2]


def test_tables_and_client_give_equal_rows(uri: str) -> None:
    names = clientread.experiments(uri)
    assert fastread.experiments(uri) == names
    direct = fastread.runs(uri, list(names.values()))
    assert direct == clientread.runs(uri, list(names.values()))
    assert len(direct) == 1 + 30 + 16
    some = [row.run_id for row in direct[::5]]
    assert fastread.runs_by_id(uri, some) == clientread.runs_by_id(uri, some) == direct[::5]


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE latest_metrics RENAME COLUMN is_nan TO was_nan",
        "ALTER TABLE experiments RENAME COLUMN lifecycle_stage TO stage",
        "DROP TABLE params",
    ],
)
def test_unknown_tables_are_left_to_the_client(empty_store: Path, tmp_path: Path, change: str) -> None:
    shutil.copy(empty_store / "mlflow.db", tmp_path)
    connection = fastread.connect(tmp_path / "mlflow.db")
    assert connection is not None
    connection.close()
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute(change)
    database.close()
    assert fastread.connect(tmp_path / "mlflow.db") is None


@pytest.mark.slow
def test_a_server_gives_the_same_search_as_its_database(
    store: Path, search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(store, tmp_path / "mlruns")
    with closing(sqlite3.connect(tmp_path / "mlruns" / "mlflow.db")) as database, database:
        moved = [store.as_uri(), (tmp_path / "mlruns").as_uri()]
        database.execute("UPDATE runs SET artifact_uri = replace(artifact_uri, ?, ?)", moved)
    # Neither curves nor anything else needs the tracking client.
    monkeypatch.setattr(clientread, "_client", lambda uri: pytest.fail("the tracking client was asked"))
    for shards in (True, False):
        with served(store_uri(tmp_path / "mlruns"), tmp_path) as server:
            found = load.load_search(server.uri, "quickstart")
            columns = [column for column in search.frame if column != "artifact_uri"]
            pd.testing.assert_frame_equal(found.frame[columns], search.frame[columns])
            numbers = ["run_id", "tokens", "loss", "train_loss"]
            pd.testing.assert_frame_equal(found.curves[numbers], search.curves[numbers])
            assert found.curves["seconds"].notna().all() == shards
            assert found.parent.experiment == search.parent.experiment
            assert found.parent.bigram_loss == search.parent.bigram_loss
            best = search.finished
            assert load.find_run(server.uri, best["run_id"].iloc[0][:12]).number == best["number"].iloc[0]
            some = list(best["run_id"])[:3]
            assert [row.run_id for row in load.runs_by_id(server.uri, some)] == some
            assert server.asked.count("/ajax-api/2.0/mlflow/metrics/get-history-bulk") == (0 if shards else 2)
        for folder in (tmp_path / "mlruns").glob(f"artifacts/*/*/artifacts/{Artifact.CURVES}"):
            shutil.rmtree(folder)


def test_a_search_holds_one_row_a_child_with_typed_params(search: Search) -> None:
    assert len(search.frame) == 46
    assert list(search.trials["number"]) == list(range(30))
    assert set(search.trials["status"]) == {"ok", "pruned", "diverged", "out_of_memory"}
    first = search.trials.iloc[0]
    assert first["is_baseline"]
    assert {path: first[PARAM + path] for path in synthetic.BASELINE} == synthetic.BASELINE
    assert isinstance(first[f"{PARAM}model.layers"], int)
    assert first[f"{PARAM}model.tied"] is True
    assert first[f"{PARAM}{synthetic.WINDOW}"] is None
    assert first[Metric.LOSS] == pytest.approx(
        search.curves.query("stage == 'search' and number == 0")["loss"].iloc[-1]
    )
    assert search.unit == "nats/byte"
    assert search.parent.bigram_loss == pytest.approx(2.61)
    assert search.parent.experiment["budget"]["tokens"] == synthetic.BUDGET
    assert search.parent.environment["python"] == "3.11.7"


def test_typed_reads_what_the_tracker_wrote() -> None:
    for value in (True, False, 3, 0.003, 1e-05, "none", "swiglu"):
        assert typed(str(value)) == value
        assert type(typed(str(value))) is type(value)


def test_a_running_trial_and_one_that_ended_untold_keep_their_rows(empty_store: Path, tmp_path: Path) -> None:
    root = tmp_path / "mlruns"
    shutil.copytree(empty_store, root)
    writer = synthetic.Writer(store_uri(root), root, "live")
    writer.trial(0, synthetic.BASELINE, [(1024, 3.0)], running=True)
    lost = writer.trial(1, synthetic.BASELINE, [(1024, 3.0), (2048, 2.5)], running=True)
    writer.client.set_terminated(lost, "FAILED")
    found = load.load_search(store_uri(root), "live")
    assert list(found.trials["status"]) == ["running", "failed"]
    assert list(found.curves["tokens"]) == [1024, 1024, 2048]


def test_a_resumed_trial_that_was_preempted_is_running(empty_store: Path, tmp_path: Path) -> None:
    root = tmp_path / "mlruns"
    shutil.copytree(empty_store, root)
    writer = synthetic.Writer(store_uri(root), root, "live")
    run = writer.trial(0, synthetic.BASELINE, [], status=Status.PREEMPTED)
    writer.client.update_run(run, status="RUNNING")
    assert load.list_runs(store_uri(root), "live")[0].status == "running"


def test_curves_from_histories_equal_curves_from_shards(store: Path, search: Search, tmp_path: Path) -> None:
    root = tmp_path / "mlruns"
    shutil.copytree(store, root)
    folder = next(root.glob(f"artifacts/quickstart/*/artifacts/{Artifact.CURVES}"))
    shards = sorted(folder.glob("*.parquet"))
    assert len(shards) == 2
    columns = ["run_id", "number", "stage", "tokens", "loss", "train_loss"]
    shards[1].unlink()
    part = load.load_search(store_uri(root), "quickstart").curves
    shards[0].unlink()
    none = load.load_search(store_uri(root), "quickstart").curves
    pd.testing.assert_frame_equal(part[columns], search.curves[columns])
    pd.testing.assert_frame_equal(none[columns], search.curves[columns])
    assert search.curves["seconds"].notna().all()


def test_a_moved_store_finds_its_own_artifacts(store: Path, tmp_path: Path) -> None:
    first, moved = tmp_path / "first", tmp_path / "other place" / "results"
    shutil.copytree(store, first)
    shutil.copytree(first, moved)
    shutil.rmtree(first)
    found = load.load_search(store_uri(moved), "quickstart")
    assert found.parent.experiment["name"] == "quickstart"
    assert found.curves["seconds"].notna().all()
    place = load.artifact(store_uri(moved), found.parent.run, Artifact.ENVIRONMENT)
    assert place is not None
    assert place.is_relative_to(moved)


def test_listing_counts_states_and_names_the_best(uri: str, search: Search) -> None:
    (row,) = load.list_searches(uri)
    assert row.name == "quickstart"
    assert row.trials == search.trials["status"].value_counts().to_dict()
    assert row.finals == 16
    assert row.best_loss == pytest.approx(search.finished[Metric.LOSS].min())
    assert row.best == f"quickstart/{search.finished['number'].iloc[0]}"
    runs = load.list_runs(uri, "quickstart")
    assert [run.stage for run in runs] == ["search"] * 30 + ["final"] * 16
    assert [run.number for run in runs] == [*range(30), *range(16)]


def test_runs_are_found_by_every_name(uri: str, search: Search) -> None:
    seven = load.find_run(uri, "quickstart/7")
    assert (seven.number, seven.stage) == (7, Stage.SEARCH)
    assert load.find_run(uri, "quickstart/final/3").tags[Tag.CANDIDATE] == "position/changed"
    assert load.find_run(uri, "quickstart/best").run_id == search.finished["run_id"].iloc[0]
    assert load.find_run(uri, seven.run_id) == seven
    assert load.find_run(uri, seven.run_id[:12]) == seven


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("quickstart/99", ["no search run number '99'", "0 to 29"]),
        ("quickstart/final/99", ["no final run number '99'", "0 to 15"]),
        ("quikstart/1", ["did you mean 'quickstart'"]),
        ("zzzz", ["no run id starts so", "NAME/NUMBER"]),
        ("", ["more of the id"]),
    ],
)
def test_a_wrong_run_name_says_what_there_is(uri: str, name: str, parts: list[str]) -> None:
    with pytest.raises(StoreError) as raised:
        load.find_run(uri, name)
    assert all(part in str(raised.value) for part in parts), str(raised.value)


def test_missing_empty_and_broken_stores_are_told_apart(empty_store: Path, tmp_path: Path) -> None:
    missing = tmp_path / "mlflow.db"
    with pytest.raises(StoreError, match=r"there is no such file; run a search first"):
        load.list_searches(f"sqlite:///{missing}")
    assert not missing.exists()
    assert load.list_searches(store_uri(empty_store)) == []
    with pytest.raises(StoreError, match=r"holds no search yet"):
        load.load_search(store_uri(empty_store), "quickstart")
    missing.write_bytes(b"not a database, but long enough to have a header" * 40)
    with pytest.raises(StoreError, match=r"not a readable SQLite file"):
        load.list_searches(f"sqlite:///{missing}")
    with pytest.raises(StoreError, match=r"nothing answers there"):
        load.list_searches("http://127.0.0.1:9")


def test_a_search_without_trials_says_so(empty_store: Path, tmp_path: Path) -> None:
    root = tmp_path / "mlruns"
    shutil.copytree(empty_store, root)
    synthetic.Writer(store_uri(root), root, "fresh")
    with pytest.raises(StoreError, match=r"has no trial yet"):
        load.load_search(store_uri(root), "fresh")


def test_listing_imports_neither_pandas_nor_the_client_and_is_quick(uri: str) -> None:
    code = (
        "import sys, time; start = time.process_time(); from analysis import load;"
        f"assert load.list_searches({uri!r}); assert load.find_run({uri!r}, 'quickstart/3');"
        "print(time.process_time() - start);"
        "assert not {'pandas', 'numpy', 'mlflow', 'matplotlib'} & set(sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert float(out.stdout) < 0.5


def test_a_kept_search_equals_the_one_read_anew_and_a_change_is_seen(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "mlruns"
    shutil.copytree(store, root)
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "FEWEST", 10)
    for file in root.glob("mlflow.db*"):
        os.utime(file, (1, 1))
    fresh = load.load_search(store_uri(root), "quickstart")
    (kept,) = (tmp_path / "cache" / "searches").iterdir()
    assert {file.suffix for file in kept.iterdir()} == {".json", ".parquet"}
    monkeypatch.setattr(load, "_runs", lambda *_: pytest.fail("read although it was kept"))
    again = load.load_search(store_uri(root), "quickstart")
    pd.testing.assert_frame_equal(again.frame, fresh.frame)
    pd.testing.assert_frame_equal(again.curves, fresh.curves)
    assert again.parent == fresh.parent
    for column in again.frame:
        assert [type(value) for value in again.frame[column]] == [type(value) for value in fresh.frame[column]]
    monkeypatch.undo()
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    run = fresh.trials["run_id"].iloc[3]
    MlflowClient(store_uri(root)).set_tag(run, Tag.REASON, "seen")
    assert load.load_search(store_uri(root), "quickstart").trials["reason"].iloc[3] == "seen"


def test_small_searches_and_stores_just_written_are_not_kept(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "mlruns"
    shutil.copytree(store, root)
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    for file in root.glob("mlflow.db*"):
        os.utime(file, (1, 1))
    load.load_search(store_uri(root), "quickstart")
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(cache, "FEWEST", 10)
    (root / "mlflow.db").touch()
    load.load_search(store_uri(root), "quickstart")
    assert not (tmp_path / "cache").exists()
    os.utime(root / "mlflow.db", (1, 1))
    monkeypatch.setenv("ASSAY_CACHE", "off")
    load.load_search(store_uri(root), "quickstart")
    assert not (tmp_path / "cache").exists()


def test_trials_are_one_typed_row_each_from_python(uri: str, search: Search) -> None:
    pd.testing.assert_frame_equal(load.trials("quickstart", uri), search.trials)
    assert load.search("quickstart", uri).parent == search.parent


@pytest.mark.slow
def test_the_benchmark_loads_and_reports_on_a_search_that_is_kept(tmp_path: Path) -> None:
    """How long that takes is for a quiet machine to say."""
    command = [sys.executable, ROOT / "benchmarks" / "loading.py", "--trials", "1000", "--no-server"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    for part in ("cold, SQLite", "warm, SQLite", "report"):
        assert re.search(rf"(pass|MISS)  {part}: \d+\.\d s of \d+ s \(\d+\.\d s of CPU\)", done.stdout), done.stdout
    assert "pass  the page:" in done.stdout
