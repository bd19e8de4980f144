"""What the tracking store shows of a search, whatever goes wrong with it: marks, order, and one training a run."""

import dataclasses
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException
from optuna.exceptions import StorageInternalError
from processes import wait_for
from studied import FINITE, SHAPE, experiment, uri
from test_search import children, search
from tracked import children as trials_of
from tracked import readings, result, searched, steps, store_uri

from analysis.leaderboard import leaderboard
from analysis.load import load_search
from runners.ledger import RESULT
from runners.progress import Progress
from runners.recorder import CLOSE_SECONDS, Recorder
from runners.search import SearchSource
from runners.store import Store
from runners.study import Study
from runners.tracking import Tracker
from search_space.places import locate
from search_space.records import Metric, Reading, Stage, Status, Tag, TrialResult

BASELINE = "{model: {d_model: 16, layers: 1, mixer: softmax, position: none}}"


def test_the_leaderboard_shows_the_difference_to_the_baseline(tmp_path: Path) -> None:
    search(tmp_path, "search.trials=3", f"baseline={BASELINE}")
    found = load_search(f"sqlite:///{tmp_path}/mlflow.db", "small")
    assert found.baseline is not None
    assert found.baseline["number"] == 0
    board = leaderboard(found)
    assert list(board.loc[board["is_baseline"], "difference"]) == [0.0]
    others = board[~board["is_baseline"]]
    assert list(others["difference"]) == pytest.approx(list(others["loss"] - found.baseline["loss"]))


def test_a_run_deleted_while_it_is_written_blocks_no_other(tmp_path: Path) -> None:
    store, tiny = store_uri(tmp_path), searched()
    tracker = Tracker(store)
    tiny.start(tracker)
    gone, kept = (tiny.start_trial(tracker, number) for number in range(2))
    for run in (gone, kept):
        for reading in readings(2):
            tracker.log_reading(run, reading)
    tracker.client.delete_run(gone)
    with pytest.raises(MlflowException):
        tracker.flush()
    assert tracker.client.get_run(kept).data.metrics[Metric.VALIDATION_CURVE] == readings(2)[-1].loss
    tracker.finish_trial(kept, result())
    with pytest.raises(MlflowException):
        tracker.finish_trial(gone, result())
    tracker.flush()
    later = tiny.start_trial(tracker, 2)
    tracker.finish_trial(later, result())
    tracker.finish_search("FINISHED", {"best_loss": 2.7})
    assert [run.info.status for run in trials_of(store)] == ["FINISHED"] * 2
    assert Store(locate(store)).parent("tiny").info.status == "FINISHED"


def test_a_run_still_open_and_deleted_leaves_no_search_running(tmp_path: Path) -> None:
    store, tiny = store_uri(tmp_path), searched()
    tracker = Tracker(store)
    tiny.start(tracker)
    gone, kept = (tiny.start_trial(tracker, number) for number in range(2))
    tracker.finish_trial(kept, result())
    tracker.log_reading(gone, readings(2)[1])
    tracker.client.delete_run(gone)
    with pytest.raises(MlflowException):
        tracker.finish_search("KILLED", {"best_loss": 2.7})
    parent = Store(locate(store)).parent("tiny")
    assert (parent.info.status, parent.data.metrics["best_loss"]) == ("KILLED", 2.7)
    assert list(tmp_path.rglob("curves/*.parquet"))


class Slow(Tracker):
    """A tracking store that takes its first reading only when the study holds the end of the trial."""

    study, waited = Path(), False

    def log_reading(self, run_id: str, reading: Reading) -> None:
        if not self.waited:
            wait_for("the end of the trial", self._is_over)
            self.waited = True
        super().log_reading(run_id, reading)

    def _is_over(self) -> bool:
        with closing(sqlite3.connect(self.study, timeout=30)) as connection:
            query = "SELECT count(*) FROM trial_user_attributes WHERE key = ?"
            return bool(connection.execute(query, (RESULT,)).fetchone()[0])


@pytest.mark.slow
def test_a_slow_store_changes_no_trial(tmp_path: Path) -> None:
    slow = Slow(f"sqlite:///{tmp_path}/mlflow.db")
    slow.study = tmp_path / "study.db"
    outcome, _ = search(tmp_path, "search.trials=1", tracker=slow)
    assert slow.waited
    assert outcome.counts == {Status.OK: 1}
    assert len(children(tmp_path)) == 1


class Dropping(Tracker):
    """Takes a table from the study while the trial trains."""

    study = Path()

    def flush(self, *run_ids: str) -> None:
        super().flush(*run_ids)
        with closing(sqlite3.connect(self.study)) as connection, connection:
            connection.execute("DROP TABLE IF EXISTS study_user_attributes")


@pytest.mark.slow
def test_a_study_that_is_gone_leaves_no_search_running(tmp_path: Path) -> None:
    tracker = Dropping(f"sqlite:///{tmp_path}/mlflow.db")
    tracker.study = tmp_path / "study.db"
    with pytest.raises(StorageInternalError):
        search(tmp_path, "search.trials=1", tracker=tracker)
    assert Store(locate(f"sqlite:///{tmp_path}/mlflow.db")).parent("small").info.status != "RUNNING"


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_run_shows_one_training_even_when_it_is_not_repeatable(tmp_path: Path, deterministic: bool) -> None:
    store, tiny = store_uri(tmp_path), searched()
    spec, resolved = tiny.trial(0)
    spec = dataclasses.replace(spec, deterministic=deterministic)
    first = Tracker(store)
    tiny.start(first)
    cut = first.start_trial(0, Stage.SEARCH, 0, spec, resolved, "000 tiny", anew=True)
    for reading in readings(3):
        first.log_reading(cut, dataclasses.replace(reading, loss=9.0))
    first.finish_trial(cut, TrialResult(status=Status.PREEMPTED, reason="cut off"))
    first.finish_search("KILLED")

    second = Tracker(store)
    tiny.start(second)
    run = second.start_trial(0, Stage.SEARCH, 0, spec, resolved, "000 tiny", anew=True)
    second.finish_trial(run, result())
    second.finish_search("FINISHED")
    (trial,) = trials_of(store)
    assert trial.info.run_id == run
    assert (run == cut) is deterministic
    assert trial.data.tags.get(Tag.REPLACES) == (None if deterministic else cut)
    shown = {p.step: p.value for p in second.client.get_metric_history(run, Metric.VALIDATION_CURVE)}
    assert steps(second.client, trial, Metric.VALIDATION_CURVE) == [0, 2048, 4096, 6144]
    if not deterministic:
        assert shown == {reading.tokens: reading.loss for reading in result().curve}


def interrupted_once_shown(source: SearchSource, key: int, reading: Reading) -> None:
    """Ends a session in mid-trial, once its first reading is stored."""
    recorder = source._recorder
    recorder.reading(source._active[key], reading)
    while any(wanted.is_due or wanted.readings for wanted in recorder._wanted.values()):
        time.sleep(0.01)
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_search_that_is_not_repeatable_replaces_a_cut_off_run_and_keeps_a_finished_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("search.trials=2", "engine.deterministic=false", *FINITE)
    store = f"sqlite:///{tmp_path}/mlflow.db"
    with monkeypatch.context() as patch:
        patch.setattr(SearchSource, "follow", interrupted_once_shown)
        with pytest.raises(KeyboardInterrupt):
            search(tmp_path, *asked)
    (cut,) = trials_of(store, "small")
    search(tmp_path, *asked)
    first, second = trials_of(store, "small")
    assert first.data.tags[Tag.REPLACES] == cut.info.run_id
    assert Tag.REPLACES not in second.data.tags
    search(tmp_path, *asked)
    assert [run.info.run_id for run in trials_of(store, "small")] == [first.info.run_id, second.info.run_id]


@pytest.mark.slow
def test_a_driver_that_breaks_down_while_trials_run_comes_to_an_end(tmp_path: Path) -> None:
    place = store_uri(tmp_path)
    tracker, made = Tracker(place), searched("small")
    with Study.open(uri(tmp_path), experiment()) as study:
        study.bind(SHAPE, "made up")
        asked = study.experiment
        recorder = Recorder(
            tracker, lambda: tracker.start_search(asked, asked.space.id, made.data, made.environment), print
        )
        recorder.open(needed=True)
        source = SearchSource(study, recorder, tmp_path / "small", Progress())
        assert source.next() is not None
        wait_for("the run of the trial", lambda: trials_of(place, "small"))
        closing = threading.Thread(target=recorder.close, args=(lambda: tracker.finish_search("FAILED"),), daemon=True)
        closing.start()
        closing.join(2 * CLOSE_SECONDS)
        assert not closing.is_alive()
    parent = Store(locate(place)).parent("small")
    assert parent.info.status == "FAILED"
    assert {run.data.tags[Tag.STATUS] for run in Store(locate(place)).children(parent)} == {Status.PREEMPTED}
