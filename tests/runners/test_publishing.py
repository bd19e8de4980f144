from pathlib import Path

import pytest
from tracked import result, searched, steps, store_uri

from analysis.load import load_search
from runners.best import Ended, missing_points
from runners.connecting import StoreError
from runners.publishing import publish
from runners.store import Store
from runners.tracking import Tracker
from search_space.places import locate
from search_space.records import Artifact, Metric, Reading, Status, Tag, TrialResult


def ended(loss: float) -> TrialResult:
    curve = (Reading(tokens=2048, loss=loss, train_loss=loss, seconds=0.1),)
    return result(curve=curve, metrics={Metric.LOSS: loss})


def written(folder: Path, losses: tuple[float, ...]) -> Store:
    """A store with a search whose trials ended with these losses, and one that diverged."""
    uri, search = store_uri(folder), searched()
    tracker = Tracker(uri)
    search.start(tracker)
    for number, loss in enumerate(losses):
        tracker.finish_trial(search.start_trial(tracker, number), ended(loss))
    tracker.finish_trial(search.start_trial(tracker, len(losses)), result(Status.DIVERGED, metrics={}))
    tracker.finish_search("FINISHED")
    return Store(locate(uri))


def finished(store: Store) -> list[Ended]:
    done = load_search(store.place.uri, "tiny").finished
    return list(map(Ended, done["end"], done["number"], done[Metric.LOSS]))


def report(folder: Path) -> Path:
    folder.mkdir()
    for name in ("report.html", "report.md", "curves.png"):
        (folder / name).write_text(name)
    (folder / "notes.txt").write_text("mine")
    return folder


def test_a_search_shows_its_report_what_won_and_the_best_loss_so_far(tmp_path: Path) -> None:
    store = written(tmp_path, (2.5, 2.7, 2.4, 2.6))
    own = store.parent("tiny").data.tags[Tag.NOTE]
    folder = report(tmp_path / "report")
    for answer in ("**What won?** tiny/2", "**What won?** tiny/2, again"):
        publish(store, "tiny", folder, answer, finished(store))
        parent = store.parent("tiny")
        assert parent.data.tags[Tag.NOTE].startswith(f"{answer}\n\n")
        assert parent.data.tags[Tag.NOTE].endswith(own)
        assert parent.data.tags[Tag.NOTE].count("What won?") == 1
        history = store.client.get_metric_history(parent.info.run_id, Metric.BEST_SO_FAR)
        assert [point.value for point in sorted(history, key=lambda point: point.step)] == [2.5, 2.5, 2.4, 2.4]
        assert steps(store.client, parent, Metric.BEST_SO_FAR) == [1, 2, 3, 4]
    kept = store.artifact(parent, Artifact.REPORT)
    assert kept is not None
    assert sorted(file.name for file in kept.iterdir()) == ["curves.png", "report.html", "report.md"]


def test_a_report_that_cannot_be_stored_is_an_error_that_says_where_it_lies(tmp_path: Path) -> None:
    store = written(tmp_path, (2.5,))
    place = store.artifact(store.parent("tiny"), "")
    assert place is not None
    (place / Artifact.REPORT).write_text("a file in the way")
    with pytest.raises(StoreError, match=r"report of tiny: lies in .*could not be stored .*rights"):
        publish(store, "tiny", report(tmp_path / "report"), "", finished(store))


def test_the_curve_of_the_best_loss_never_rises_whatever_it_holds_already() -> None:
    ended = [Ended(float(n), n, loss) for n, loss in enumerate((2.5, 2.7, 2.4, 2.6, 2.3))]
    assert [point.loss for point in missing_points(ended, {})] == [2.5, 2.5, 2.4, 2.4, 2.3]
    assert [point.step for point in missing_points(ended, {1: 2.5, 4: 2.4})] == [2, 3, 5]
    # A driver saw the third trial end first, and another one knew of all five before it wrote at all.
    for held in ({1: 2.4}, {2: 2.4, 3: 2.4}, {4: 2.3}, {3: 2.7}):
        whole = held | {point.step: point.loss for point in missing_points(ended, held)}
        assert list(whole) == list(held) + [step for step in range(1, 6) if step not in held]
        losses = [whole[step] for step in range(1, 6)]
        assert losses == sorted(losses, reverse=True)
    assert missing_points([], {1: 2.4}) == []
