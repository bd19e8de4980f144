import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tracked import check_written, children, experiment_text, readings, result, searched, steps, store_uri, write_search

from runners.connecting import StoreError
from runners.stale import close_stale
from runners.store import Store
from runners.tracking import Tracker
from search_space.errors import UserError
from search_space.places import locate
from search_space.records import Artifact, Metric, Reading, Stage, Status, Tag

HERE = Path(__file__).parent


def test_a_search_is_written_whole_to_sqlite(tmp_path: Path) -> None:
    parent = write_search(store_uri(tmp_path))
    check_written(store_uri(tmp_path), parent)
    assert not list(tmp_path.rglob("*.partial"))


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
from tracked import check_written, children, experiment_text, readings, result, searched, steps, store_uri, write_search
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


@pytest.mark.slow
def test_two_searches_create_and_fill_one_store_at_once_and_say_nothing(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    drivers = [driver(uri, name, trials=6) for name in ("left", "right")]
    for process in drivers:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert output + errors == ""
    for name in ("left", "right"):
        assert [run.info.status for run in children(uri, name)] == ["FINISHED"] * 6


@pytest.mark.fault
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


def test_names_that_are_no_file_names_are_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    search = searched()
    escaped = replace(search, experiment=replace(search.experiment, name="../up"))
    with pytest.raises(UserError, match=r"'\.\./up'"):
        escaped.start(Tracker(store_uri(tmp_path)))


def test_the_experiment_text_is_the_one_searched(tmp_path: Path) -> None:
    write_search(store_uri(tmp_path))
    store = Store(locate(store_uri(tmp_path)))
    assert store.text(store.parent("tiny"), Artifact.EXPERIMENT) == experiment_text()


def test_a_run_is_never_taken_up_by_another_spec(tmp_path: Path) -> None:
    uri, search = store_uri(tmp_path), searched()
    first = Tracker(uri)
    search.start(first)
    search.start_trial(first, 0)
    first.flush()
    second = Tracker(uri)
    search.start(second)
    spec, resolved = search.trial(1)
    with pytest.raises(StoreError, match="of another spec"):
        second.start_trial(0, Stage.SEARCH, 0, spec, resolved, "another")
