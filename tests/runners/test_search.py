"""What the driver promises: a whole search in the store, a clean Ctrl-C, a store that may fail, ends that are told."""

import io
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from drivers import Driver
from gated_trials import ALL, allow
from made_up import environment
from mlflow.exceptions import MlflowException
from processes import wait_for
from studied import FINITE, experiment, uri
from test_kill import stored

from runners import recorder
from runners.progress import Progress
from runners.search import SearchOutcome, run_search
from runners.store import Store
from runners.study import Study
from runners.tracking import Tracker
from search_space.places import locate
from search_space.records import Metric, Stage, Status, Tag, TrialResult

TRIALS = 8
FINALS = "final={seeds: 2, contrasts: {positions: {model.position: none}, seed_alone: {}}}"
ASKED = (f"search.trials={TRIALS}", FINALS)


def search(folder: Path, *overrides: str, tracker: Tracker | None = None) -> tuple[SearchOutcome, str]:
    stream = io.StringIO()
    outcome = run_search(
        experiment(*overrides),
        tracker=tracker or Tracker(f"sqlite:///{folder}/mlflow.db"),
        study_uri=uri(folder),
        progress=Progress(stream),
    )
    return outcome, stream.getvalue()


def children(folder: Path) -> list[Mapping[str, object]]:
    """Tags, status and metrics of each child run in the store."""
    store = Store(locate(f"sqlite:///{folder}/mlflow.db"))
    (parent,) = store.searches().values()
    found = store.client.search_runs([parent.info.experiment_id], f"tags.`{Tag.KIND}` = 'trial'", max_results=1000)
    return [{"status": run.info.status, "metrics": run.data.metrics, **run.data.tags} for run in found]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SearchOutcome, str]:
    """A whole search with finals."""
    folder = tmp_path_factory.mktemp("search")
    return (folder, *search(folder, *ASKED))


def test_every_trial_is_in_the_store_with_its_status(finished: tuple[Path, SearchOutcome, str]) -> None:
    folder, outcome, _ = finished
    assert outcome.ended == f"all {TRIALS} trials were run"
    assert sum(outcome.counts.values()) == TRIALS
    trials = [child for child in children(folder) if child[Tag.STAGE] == Stage.SEARCH]
    assert sorted(int(str(child[Tag.NUMBER])) for child in trials) == list(range(TRIALS))
    with Study.open(uri(folder), experiment(*ASKED)) as study:
        for child in trials:
            result = study.trials()[int(str(child[Tag.NUMBER]))].result
            assert result is not None
            assert child[Tag.STATUS] == result.status
            assert child["status"] == "FINISHED"


def test_finals_pair_both_sides_by_seed_and_read_the_test_split(finished: tuple[Path, SearchOutcome, str]) -> None:
    folder, outcome, _ = finished
    finals = [child for child in children(folder) if child[Tag.STAGE] == Stage.FINAL]
    assert {(child[Tag.CANDIDATE], child[Tag.REPLICA]) for child in finals} == {
        (f"{contrast}/{side}", str(replica))
        for contrast in ("positions", "seed_alone")
        for side in ("base", "changed")
        for replica in range(2)
    }
    assert all(Metric.TEST_LOSS in child["metrics"] for child in finals)  # type: ignore[operator]
    assert [(final.done, final.total, final.skipped) for final in outcome.finals] == [(4, 4, ""), (4, 4, "")]


def test_running_a_finished_search_again_changes_nothing(finished: tuple[Path, SearchOutcome, str]) -> None:
    folder, before, _ = finished
    again, _ = search(folder, *ASKED)
    assert (again.counts, again.best_loss, again.finals) == (before.counts, before.best_loss, before.finals)
    assert len(children(folder)) == TRIALS + 8


def test_progress_tells_what_is_done_and_what_is_best(finished: tuple[Path, SearchOutcome, str]) -> None:
    _, outcome, shown = finished
    assert f"trials {TRIALS}/{TRIALS}" in shown
    assert f"best {outcome.best_loss:.4f} (trial {outcome.best_number})" in shown
    assert "finals 8/8" in shown


@pytest.mark.slow
def test_a_used_up_space_and_a_token_limit_end_the_search_with_the_reason(tmp_path: Path) -> None:
    outcome, _ = search(tmp_path, "max_tokens=3000", *FINITE)
    assert outcome.ended == "one more trial could pass max_tokens=3000"
    assert sum(outcome.counts.values()) == 2
    outcome, _ = search(tmp_path, *FINITE)
    assert outcome.ended.startswith("every distinct legal point of the space was tried (8 points")
    assert sum(outcome.counts.values()) == 8


class Failing(Tracker):
    """A tracking store that fails for a while."""

    broken = True

    def finish_trial(self, run_id: str, result: TrialResult, weights: Path | None = None) -> None:
        if self.broken:
            raise MlflowException("the store is down")
        super().finish_trial(run_id, result, weights)


def test_a_failing_store_loses_nothing_and_catches_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "CLOSE_SECONDS", 4.0)
    tracker = Failing(f"sqlite:///{tmp_path}/mlflow.db")
    outcome, shown = search(tmp_path, "search.trials=3", tracker=tracker)
    assert outcome.counts == {Status.OK: 3}
    assert outcome.unshown == 3
    assert shown.count("the tracking store cannot be written") == 1
    assert [child["status"] for child in children(tmp_path)] == ["KILLED"] * 3
    search(tmp_path, "search.trials=3")
    assert [child[Tag.STATUS] for child in children(tmp_path)] == [Status.OK] * 3
    assert [child["status"] for child in children(tmp_path)] == ["FINISHED"] * 3


@pytest.mark.fault
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_cleanly_and_the_same_command_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    allow(gate := tmp_path / "gate", 2)
    asked, given = ("search.trials=5", "budget.max_seconds=3600"), environment(seconds=0.05, gate=gate)
    driver = Driver(tmp_path, *asked, given=given)
    wait_for("the third trial", lambda: stored(tmp_path) == 3)
    driver.signal(number)
    assert driver.wait(30.0) == 0, driver.err
    assert f"stopped by {number.name}; running 1; interrupted {number.name}" in driver.out
    assert [child["status"] for child in children(tmp_path)].count("KILLED") == 1
    assert "RUNNING" not in {child["status"] for child in children(tmp_path)}
    allow(gate, ALL)
    (again := Driver(tmp_path, *asked, given=given)).finish()
    assert "all 5 trials were run; running 0" in again.out
    assert sorted(str(child[Tag.NUMBER]) for child in children(tmp_path)) == list("01234")
    assert {child["status"] for child in children(tmp_path)} == {"FINISHED"}
