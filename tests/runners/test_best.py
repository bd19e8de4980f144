"""The best loss so far stands on the search's own run while the search goes on, and its steps only ever grow."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from processes import wait_for
from studied import SHAPE, broken, experiment, ok, uri
from tracked import searched, store_uri

from runners import recorder
from runners.progress import Progress
from runners.recorder import Recorder
from runners.search import SearchSource
from runners.study import Study
from runners.tracking import Tracker
from search_space.records import Metric, TrialResult


def curve(store: str, parent: str) -> list[tuple[int, float]]:
    """The points on the search's own run, by step."""
    history = MlflowClient(store).get_metric_history(parent, Metric.BEST_SO_FAR)
    return [(point.step, point.value) for point in sorted(history, key=lambda point: point.step)]


def session(folder: Path, results: Sequence[TrialResult], *, expected: list[int], join: bool = False) -> str:
    """One driver's work: it ends so many trials, and the curve has come to the expected steps before it leaves."""
    store, made = store_uri(folder), searched("small")
    tracker = Tracker(store)
    with Study.open(uri(folder), experiment("search.trials=30"), join=join) as study:
        study.bind(SHAPE, "made up")
        asked = study.experiment
        shown = Recorder(
            tracker,
            lambda: tracker.start_search(asked, asked.space.id, made.data, made.environment, joined=join),
            print,
        )
        shown.open(needed=True)
        (folder / "small").mkdir(exist_ok=True)
        source = SearchSource(study, shown, folder / "small", Progress())
        source.catch_up()
        for result in results:
            job = source.next()
            assert job is not None
            source.finish(job.key, result)
        wait_for("the curve", lambda: [step for step, _ in curve(store, shown.parent)] == expected)
        shown.close(lambda: tracker.finish_search("FINISHED", source.metrics()))
    assert [step for step, _ in curve(store, shown.parent)] == expected
    return shown.parent


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "FLUSH_SECONDS", 0.05)


def test_the_best_loss_is_shown_while_the_search_goes_on_and_after_it_is_taken_up(tmp_path: Path) -> None:
    parent = session(tmp_path, [ok(2.5), broken(), ok(2.7), ok(2.4)], expected=[1, 2, 3])
    assert curve(store_uri(tmp_path), parent) == [(1, 2.5), (2, 2.5), (3, 2.4)]
    session(tmp_path, [], expected=[1, 2, 3])
    session(tmp_path, [ok(2.6), ok(2.3)], expected=[1, 2, 3, 4, 5])
    assert curve(store_uri(tmp_path), parent)[3:] == [(4, 2.4), (5, 2.3)]


def test_drivers_side_by_side_write_one_curve_whose_steps_only_grow(tmp_path: Path) -> None:
    session(tmp_path, [ok(2.5), ok(2.6)], expected=[1, 2])
    session(tmp_path, [ok(2.2), ok(2.9)], expected=[1, 2], join=True)
    parent = session(tmp_path, [ok(2.8)], expected=[1, 2, 4, 5])
    assert curve(store_uri(tmp_path), parent) == [(1, 2.5), (2, 2.5), (4, 2.2), (5, 2.2)]
