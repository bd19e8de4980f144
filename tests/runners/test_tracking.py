import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from tracked import experiment_text, free_port, readings, result, searched, store_uri

from runners.dashboard import start, stop
from runners.stale import close_stale
from runners.store import Store, StoreError
from runners.tracking import Tracker
from search_space.errors import UserError
from search_space.places import locate
from search_space.records import Artifact, Metric, Reading, Stage, Status, Tag

HERE = Path(__file__).parent


def children(uri: str, name: str = "tiny") -> list[Run]:
    store = Store(locate(uri))
    return store.children(store.parent(name))


def write_search(uri: str, trials: int = 2, name: str = "tiny") -> str:
    search, tracker = searched(name), Tracker(uri)
    parent = search.start(tracker)
    for number in range(trials):
        run = search.start_trial(tracker, number)
        for reading in readings(3):
            tracker.log_reading(run, reading)
        tracker.finish_trial(run, result())
    tracker.finish_search("FINISHED", {"best_loss": 2.7})
    return parent


def steps(client: MlflowClient, run: Run, metric: str) -> list[int]:
    return sorted(point.step for point in client.get_metric_history(run.info.run_id, metric))


def check_written(uri: str, parent: str) -> None:
    """What any store must hold of `write_search`."""
    store = Store(locate(uri))
    run = store.client.get_run(parent)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "tiny")
    assert run.data.metrics["best_loss"] == 2.7
    assert run.data.params["task.kind"] == "mqar"
    assert "tiny" in run.data.tags[Tag.NOTE]
    assert run.inputs.dataset_inputs[0].dataset.name == "mqar"
    assert "name: tiny" in store.text(run, Artifact.EXPERIMENT)
    assert json.loads(store.text(run, Artifact.ENVIRONMENT))["packages"]["torch"]
    assert "mlflow==" in store.text(run, Artifact.LOCK)
    fingerprint = run.data.tags[Tag.FINGERPRINT]
    assert store.artifact(run, f"{Artifact.DATA}/{fingerprint}.safetensors")
    trials = store.children(run)
    assert [trial.data.tags[Tag.NUMBER] for trial in trials] == ["0", "1"]
    for number, trial in enumerate(trials):
        spec, _ = searched().trial(number)
        assert store.spec(trial) == spec
        assert store.result(trial) == result()
        assert trial.data.tags["mlflow.parentRunId"] == parent
        assert trial.data.tags[Tag.STATUS] == "ok"
        assert trial.info.status == "FINISHED"
        assert trial.data.params["model.mixer.kind"] in ("softmax", "sliding_window")
        assert trial.data.params["model.d_ff"] == str(spec.candidate["model"]["d_ff"])
        assert steps(store.client, trial, Metric.VALIDATION_CURVE) == [0, 2048, 4096, 6144]
        assert steps(store.client, trial, Metric.LOSS) == [6144]
        assert trial.inputs.dataset_inputs[0].dataset.digest == fingerprint[:12]
    import pyarrow.parquet as parquet

    folder = store.artifact(run, Artifact.CURVES)
    assert folder is not None
    rows = [row for shard in folder.glob("*.parquet") for row in parquet.read_table(shard).to_pylist()]
    assert len(rows) == 8
    assert {row["run"] for row in rows} == {trial.info.run_id for trial in trials}


def test_a_search_is_written_whole_to_sqlite(tmp_path: Path) -> None:
    parent = write_search(store_uri(tmp_path))
    check_written(store_uri(tmp_path), parent)
    assert not list(tmp_path.rglob("*.partial"))


def test_a_folder_with_spaces_holds_a_store(tmp_path: Path) -> None:
    folder = tmp_path / "my work, 100%"
    folder.mkdir()
    check_written(store_uri(folder), write_search(store_uri(folder)))


def test_a_trial_started_again_continues_its_run_and_repeats_no_step(tmp_path: Path) -> None:
    uri, search = store_uri(tmp_path), searched()
    first = Tracker(uri)
    parent = search.start(first)
    run = search.start_trial(first, 0)
    for reading in readings(3):
        first.log_reading(run, reading)
    first.flush()

    second = Tracker(uri)
    assert search.start(second) == parent
    assert search.start_trial(second, 0) == run
    for reading in readings(4):
        second.log_reading(run, reading)
    second.finish_trial(run, result())
    second.finish_search("FINISHED")

    (trial,) = children(uri)
    assert steps(second.client, trial, Metric.VALIDATION_CURVE) == [0, 2048, 4096, 6144]
    assert trial.data.params["model.mixer.kind"]


def test_a_finished_trial_run_again_doubles_no_metric(tmp_path: Path) -> None:
    uri = store_uri(tmp_path)
    write_search(uri)
    write_search(uri)
    for trial in children(uri):
        client = Store(locate(uri)).client
        for metric in trial.data.metrics:
            found = steps(client, trial, metric)
            assert len(found) == len(set(found)), metric
    assert len(children(uri)) == 2


def test_a_preempted_trial_leaves_no_result_and_ends_well_later(tmp_path: Path) -> None:
    uri, search = store_uri(tmp_path), searched()
    first = Tracker(uri)
    search.start(first)
    run = search.start_trial(first, 0)
    first.finish_trial(run, result(Status.PREEMPTED, count=2, reason="interrupted"))
    first.finish_search("KILLED")
    (trial,) = children(uri)
    assert (trial.info.status, trial.data.tags[Tag.STATUS]) == ("KILLED", "preempted")
    with pytest.raises(StoreError, match="has no result"):
        Store(locate(uri)).result(trial)

    second = Tracker(uri)
    search.start(second)
    search.start_trial(second, 0)
    (trial,) = children(uri)
    assert trial.info.status == "RUNNING"
    assert Tag.STATUS not in trial.data.tags
    second.finish_trial(run, result())
    second.finish_search("FINISHED")
    (trial,) = children(uri)
    assert (trial.info.status, trial.data.tags[Tag.STATUS]) == ("FINISHED", "ok")
    assert Tag.REASON not in trial.data.tags


@pytest.mark.parametrize("status", [status for status in Status if status != Status.OK])
def test_each_status_ends_its_run_in_the_state_it_stands_for(status: Status, tmp_path: Path) -> None:
    uri, search, tracker = store_uri(tmp_path), searched(), Tracker(store_uri(tmp_path))
    search.start(tracker)
    run = search.start_trial(tracker, 0)
    tracker.finish_trial(run, result(status, reason="because", last_lines="line one\nline two"))
    tracker.finish_search("FINISHED")
    (trial,) = children(uri)
    expected = {"pruned": "FINISHED", "diverged": "FINISHED", "preempted": "KILLED", "timed_out": "KILLED"}
    assert trial.info.status == expected.get(status, "FAILED")
    assert trial.data.tags[Tag.REASON] == "because"
    assert Store(locate(uri)).text(trial, Artifact.TRACEBACK).endswith("line two")


def test_numbers_that_are_not_finite_never_become_metrics(tmp_path: Path) -> None:
    uri, search, tracker = store_uri(tmp_path), searched(), Tracker(store_uri(tmp_path))
    search.start(tracker)
    run = search.start_trial(tracker, 0)
    bad = Reading(tokens=2048, loss=math.inf, train_loss=math.nan, seconds=1.0)
    tracker.log_reading(run, bad)
    tracker.finish_trial(run, result(Status.DIVERGED, curve=(*readings(1), bad), first_nonfinite_step=1536))
    tracker.finish_search("FINISHED")
    (trial,) = children(uri)
    assert steps(tracker.client, trial, Metric.VALIDATION_CURVE) == [0]
    assert trial.data.tags[Tag.FIRST_NONFINITE] == "1536"
    assert Store(locate(uri)).result(trial).curve == readings(1)


def test_text_longer_than_mlflow_holds_is_whole_in_an_artifact(tmp_path: Path) -> None:
    uri, search, tracker = store_uri(tmp_path), searched(), Tracker(store_uri(tmp_path))
    search.start(tracker)
    run = search.start_trial(tracker, 0)
    reason = "x" * 9000
    tracker.finish_trial(run, result(Status.FAILED, reason=reason))
    tracker.finish_search("FINISHED")
    (trial,) = children(uri)
    assert len(trial.data.tags[Tag.REASON]) == 8000
    assert trial.data.tags[Tag.REASON].endswith("(cut; the whole text is among the artifacts)")
    assert Store(locate(uri)).result(trial).reason == reason


def test_final_and_search_trials_of_one_number_are_two_runs(tmp_path: Path) -> None:
    uri, search, tracker = store_uri(tmp_path), searched(), Tracker(store_uri(tmp_path))
    search.start(tracker)
    for stage in (Stage.SEARCH, Stage.FINAL):
        run = search.start_trial(tracker, 0, stage, **{Tag.CANDIDATE: "position/base"})
        tracker.finish_trial(run, result())
    tracker.finish_search("FINISHED")
    store = Store(locate(uri))
    assert store.find_run("tiny/0").info.run_id != store.find_run("tiny/final/0").info.run_id
    assert store.find_run("tiny/final/0").data.tags[Tag.CANDIDATE] == "position/base"


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


def test_code_changed_between_two_starts_is_recorded_beside_the_first(tmp_path: Path) -> None:
    from dataclasses import replace

    uri, search = store_uri(tmp_path), searched()
    tracker = Tracker(uri)
    search.start(tracker)
    run = search.start_trial(tracker, 0)
    tracker.finish_trial(run, result())
    tracker.finish_search("FINISHED")
    changed = replace(search.environment, package_digest="other")
    tracker = Tracker(uri)
    replace(search, environment=changed).start(tracker)
    run = replace(search, environment=changed).start_trial(tracker, 1)
    tracker.finish_trial(run, result())
    tracker.finish_search("FINISHED")
    store = Store(locate(uri))
    assert store.environment(store.find_run("tiny/0"))["package_digest"] == search.environment.package_digest
    assert store.environment(store.find_run("tiny/1"))["package_digest"] == "other"


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


def test_curves_kept_out_of_a_shard_by_a_kill_are_added_later(tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    uri, search = store_uri(tmp_path), searched()
    first = Tracker(uri)
    search.start(first)
    run = search.start_trial(first, 0)
    first.finish_trial(run, result())

    second = Tracker(uri)
    search.start(second)
    second.finish_search("FINISHED")
    (shard,) = tmp_path.rglob("*.parquet")
    assert parquet.read_table(shard)["run"].to_pylist() == [run] * 4


DRIVER = """
import sys, time
sys.path.insert(0, {here!r})
from tracked import readings, result, searched
from runners.tracking import Tracker

tracker, search = Tracker({uri!r}), searched({name!r})
search.start(tracker)
for number in range({trials}):
    run = search.start_trial(tracker, number)
    for reading in readings(4):
        tracker.log_reading(run, reading)
    if {hang} and number == 1:
        tracker.flush()
        print("hanging", flush=True)
        time.sleep(600)
    tracker.finish_trial(run, result())
tracker.finish_search("FINISHED")
"""


def driver(uri: str, name: str, *, trials: int, hang: bool = False) -> "subprocess.Popen[str]":
    code = DRIVER.format(here=str(HERE), uri=uri, name=name, trials=trials, hang=hang)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_searches_create_and_fill_one_store_at_once_and_say_nothing(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    drivers = [driver(uri, name, trials=6) for name in ("left", "right")]
    for process in drivers:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert output + errors == ""
    for name in ("left", "right"):
        assert [run.info.status for run in children(uri, name)] == ["FINISHED"] * 6


def test_a_killed_driver_leaves_nothing_running_once_it_is_noticed(tmp_path: Path) -> None:
    uri = store_uri(tmp_path)
    process = driver(uri, "tiny", trials=3, hang=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hanging\n"
        assert close_stale(Store(locate(uri))) == []
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert close_stale(Store(locate(uri))) == ["tiny"]
    assert [run.info.status for run in children(uri)] == ["FINISHED", "KILLED"]
    assert Store(locate(uri)).parent("tiny").info.status == "KILLED"

    with driver(uri, "tiny", trials=3) as again:
        assert again.wait(timeout=120) == 0
    assert [run.info.status for run in children(uri)] == ["FINISHED"] * 3
    client = Store(locate(uri)).client
    assert steps(client, children(uri)[1], Metric.VALIDATION_CURVE) == [0, 2048, 4096, 6144]


def test_reports_are_kept_on_the_parent(tmp_path: Path) -> None:
    uri, tracker = store_uri(tmp_path), Tracker(store_uri(tmp_path))
    searched().start(tracker)
    report = tmp_path / "report"
    (report / "figures").mkdir(parents=True)
    (report / "report.md").write_text("# winner")
    (report / "figures/a.png").write_bytes(b"png")
    tracker.log_report(report)
    tracker.finish_search("FINISHED")
    store = Store(locate(uri))
    assert store.text(store.parent("tiny"), f"{Artifact.REPORT}/report.md") == "# winner"
    assert store.artifact(store.parent("tiny"), f"{Artifact.REPORT}/figures/a.png")


def test_names_that_are_no_file_names_are_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    search = searched()
    escaped = replace(search, experiment=replace(search.experiment, name="../up"))
    with pytest.raises(UserError, match=r"'\.\./up'"):
        escaped.start(Tracker(store_uri(tmp_path)))


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


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """A PostgreSQL server of our own on loopback; it refuses to run as root."""
    binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    found = shutil.which("initdb") or (str(binaries[-1]) if binaries else None)
    if found is None:
        pytest.skip("needs PostgreSQL's initdb; on Debian: apt-get install postgresql")
    bin_folder, port, data = Path(found).parent, free_port(), folder / "data"
    folder.chmod(0o777)
    for above in folder.parents[:3]:
        above.chmod(above.stat().st_mode | 0o011)
    prefix = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []

    def run(*command: str) -> None:
        subprocess.run([*prefix, *command], check=True, stdout=subprocess.DEVNULL, cwd=folder)

    run(str(bin_folder / "initdb"), "-D", str(data), "-A", "trust", "-U", "postgres")
    control = [str(bin_folder / "pg_ctl"), "-D", str(data)]
    run(*control, "-o", f"-p {port} -c listen_addresses=127.0.0.1 -k {data}", "-l", str(data / "log"), "-w", "start")
    try:
        yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    finally:
        run(*control, "-m", "immediate", "stop")


@pytest.mark.slow
@pytest.mark.postgres
def test_a_search_is_written_whole_to_postgresql(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server").mkdir()
    with postgres(tmp_path / "server") as uri:
        check_written(uri, write_search(uri))
        write_search(uri)
        assert len(children(uri)) == 2


def test_the_experiment_text_is_the_one_searched(tmp_path: Path) -> None:
    write_search(store_uri(tmp_path))
    store = Store(locate(store_uri(tmp_path)))
    assert store.text(store.parent("tiny"), Artifact.EXPERIMENT) == experiment_text()
