"""Runs that are written several at once are those that MLflow's client would write, or none of them."""

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from servers import postgres
from sql_deaths import COMMIT
from tracked import Searched, children, readings, result, searched, store_uri

from runners.bulkread import trials
from runners.progress import Progress
from runners.recorder import Recorder
from runners.showing import Shown
from runners.store import every_run
from runners.tracking import Tracker
from search_space.places import driver_uri
from search_space.records import Metric, Stage, Status, Tag

BEGAN = 1_700_000_000.0
OWN = ("experiments", "experiment_tags", "alembic_version")
"""Tables that say who wrote and when, not what was found."""


def write_trials(tracker: Tracker, tiny: Searched, *, at_once: bool) -> None:
    """Three trials: two that begin, are followed, and are pruned or fail; one that begins and ends at once."""

    def begin(number: int) -> str:
        spec, resolved = tiny.trial(number)
        return tracker.start_trial(
            number, Stage.SEARCH, 0, spec, resolved, f"{number:03d} tiny", started=BEGAN + number
        )

    def first() -> list[str]:
        runs = [begin(number) for number in range(2)]
        for run in runs:
            for reading in readings(2):
                tracker.log_reading(run, reading)
        tracker.flush()
        return runs

    def second(runs: Sequence[str]) -> None:
        tracker.finish_trial(runs[0], result(Status.PRUNED, reason="not among the better ones"))
        tracker.finish_trial(runs[1], result(Status.FAILED, count=3, reason="x" * 9000, last_lines="line"))
        tracker.finish_trial(begin(2), result())

    tiny.start(tracker)
    if at_once:
        second(first())
    else:
        assert tracker.writes_together, "the tables of the installed MLflow are not those that are known"
        with tracker.together():
            runs = first()
        with tracker.together():
            second(runs)
    tracker.finish_search("FINISHED", {"best_loss": 2.7})


def rows(uri: str) -> dict[str, list[Any]]:
    """Every row of a store that tells of trials, with their keys in the place of ids that are drawn."""
    engine = sqlalchemy.create_engine(driver_uri(uri))
    with engine.connect() as connection:
        names = sqlalchemy.inspect(connection).get_table_names()
        tables = {
            name: [dict(row) for row in connection.execute(sqlalchemy.text(f"SELECT * FROM {name}")).mappings()]
            for name in names
        }
    engine.dispose()
    keys = {row["run_uuid"]: row["value"] for row in tables["tags"] if row["key"] == Tag.KEY}
    trials = {run: key for run, key in keys.items() if "/" in key}
    parent = next(run for run in keys if run not in trials)
    keys |= {row["dataset_uuid"]: row["name"] for row in tables["datasets"]}
    keys |= {row["input_uuid"]: f"input of {keys[row['destination_id']]}" for row in tables["inputs"]}

    def shown(value: Any) -> Any:
        for drawn, key in keys.items():
            value = value.replace(drawn, key) if isinstance(value, str) else value
        return value

    def tells_of_the_search(row: dict[str, Any]) -> bool:
        return parent in (row.get("run_uuid"), row.get("destination_id"))

    return {
        name: sorted(
            (
                sorted((column, shown(value)) for column, value in row.items())
                for row in table
                if not tells_of_the_search(row)
            ),
            key=str,
        )
        for name, table in tables.items()
        if name not in OWN
    }


def place_blind(found: dict[str, list[Any]], folder: str) -> dict[str, list[Any]]:
    return {
        name: [
            [(column, value.replace(folder, "") if isinstance(value, str) else value) for column, value in row]
            for row in table
        ]
        for name, table in found.items()
    }


def test_runs_written_together_are_those_that_the_client_writes(tmp_path: Path) -> None:
    found, tiny = [], searched()
    for at_once in (True, False):
        folder = tmp_path / str(at_once)
        folder.mkdir()
        write_trials(Tracker(store_uri(folder)), tiny, at_once=at_once)
        found.append(place_blind(rows(store_uri(folder)), str(folder)))
    assert found[0] == found[1]
    assert {len(found[1][name]) for name in ("runs", "inputs")} == {3}
    assert len(found[1]["metrics"]) > len(found[1]["latest_metrics"]) > 20


def as_plain(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return [{**run.to_dictionary(), "inputs": {}, "outputs": {}} for run in runs]


def test_trials_read_from_the_tables_are_those_that_the_client_reads(tmp_path: Path) -> None:
    tracker = Tracker(store_uri(tmp_path))
    write_trials(tracker, searched(), at_once=False)
    tracker.client.delete_run(children(store_uri(tmp_path))[0].info.run_id)
    experiment = tracker._experiment
    known = every_run(tracker.client, [experiment], f"tags.`{Tag.KIND}` = 'trial'")
    assert len(known) == 2
    assert as_plain(trials(tracker.client, experiment)) == as_plain(known)


@pytest.mark.postgres
@pytest.mark.slow
def test_runs_written_together_to_postgres_are_those_that_the_client_writes(tmp_path: Path) -> None:
    found, tiny = [], searched()
    for at_once in (True, False):
        with postgres() as uri:
            write_trials(Tracker(uri, str(tmp_path / "artifacts")), tiny, at_once=at_once)
            found.append(rows(uri))
    assert found[0] == found[1]


def write_one(tracker: Tracker, tiny: Searched) -> str:
    """Begin and end trial 1, and send what waits of the others."""
    with tracker.together():
        run = tiny.start_trial(tracker, 1)
        tracker.finish_trial(run, result())
        tracker.flush()
    return run


def test_what_is_written_together_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    store, tiny = store_uri(tmp_path), searched()
    tracker = Tracker(store)
    tiny.start(tracker)
    gone = tiny.start_trial(tracker, 0)
    tracker.client.delete_run(gone)
    tracker.log_reading(gone, readings(2)[1])
    with pytest.raises(MlflowException, match="was deleted"):
        write_one(tracker, tiny)
    assert children(store) == []
    (intended,) = {file.parents[1].name for file in tmp_path.rglob("result.json")}
    assert write_one(tracker, tiny) == intended, "files lie there under the id that the run was to have"
    tracker.finish_search("FINISHED")
    (trial,) = children(store)
    assert (trial.info.run_id, trial.info.status) == (intended, "FINISHED")
    assert trial.data.metrics[Metric.LOSS] == result().metrics["loss"]


def shown(number: int) -> Shown:
    spec, resolved = searched().trial(number)
    return Shown(
        number=number,
        stage=Stage.SEARCH,
        generation=0,
        spec=spec,
        resolved=resolved,
        name=f"{number:03d} tiny",
        tags={},
        weights=None,
        started=BEGAN + number,
    )


class Refusing(Tracker):
    """Cannot write the end of trial 1."""

    refuses = True

    def finish_trial(self, run_id: str, *rest: Any) -> None:
        if self.refuses and self._open[run_id].number == 1:
            raise OSError("no room")
        super().finish_trial(run_id, *rest)


def test_a_trial_that_cannot_be_written_holds_up_none_of_those_written_with_it(tmp_path: Path) -> None:
    tracker, tiny = Refusing(store_uri(tmp_path)), searched()
    recorder = Recorder(tracker, lambda: tiny.start(tracker), Progress(io.StringIO()).note)
    for number in range(4):
        recorder.begin(shown(number))
        recorder.finish(shown(number), result())
    recorder.open(needed=True)
    ended, end = list[int](), time.monotonic() + 60
    while len(ended) < 3:
        assert time.monotonic() < end, f"of the others only {ended} are shown"
        ended += [trial.number for trial in recorder.ended(Stage.SEARCH)]
        time.sleep(0.01)
    assert sorted(ended) == [0, 2, 3]
    tracker.refuses = False
    assert recorder.close(lambda: tracker.finish_search("FINISHED")) == 0
    assert [run.info.status for run in children(store_uri(tmp_path))] == ["FINISHED"] * 4


@pytest.mark.fault
def test_a_kill_while_runs_are_written_together_leaves_all_of_it_or_nothing_and_no_point_twice(tmp_path: Path) -> None:
    words = [sys.executable, str(Path(__file__).parent / "bulk_deaths.py"), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    died = {death["moment"]["what"]: death["code"] for death in found["deaths"]}
    assert set(died.values()) == {-signal.SIGKILL}
    tables = ("runs", "tags", "params", "metrics", "latest_metrics", "inputs", "input_tags")
    assert died.keys() >= {*(f"INSERT INTO {table}" for table in tables), "UPDATE runs SET", COMMIT}
    assert [found["before"]["0"][0], found["before"].get("1")] == ["RUNNING", None]
    assert [run[0] for run in found["whole"].values()] == ["FINISHED", "FINISHED"]
    for death in found["deaths"]:
        has_committed = death["moment"]["what"] == COMMIT and death["moment"]["when"] == "after"
        assert death["after"] == found["whole" if has_committed else "before"], death["moment"]
        assert death["again"] == found["whole"], death["moment"]
