"""What a study promises: exact proposals, whole trials, one driver, and no silent change of the experiment."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from optuna.trial import TrialState
from studied import FINITE, SHAPE, broken, experiment, made_up, ok, opened, points, uri

from runners.history import Fate, from_ranges
from runners.study import Study, StudyBusy, StudyMismatch
from search_space.canon import canonical_json
from search_space.errors import UserError
from search_space.records import Status, to_plain
from search_space.space import enumerate_all, holds

TRIALS = 14


def run(study: Study, count: int) -> None:
    for _ in range(count):
        proposed = study.propose()
        assert proposed is not None
        study.tell(proposed.number, made_up(proposed))


def test_the_same_seed_gives_the_same_suggestions_across_interruptions(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    with opened(tmp_path / "whole") as study:
        run(study, TRIALS)
        whole = points(study)
    while True:
        with opened(tmp_path / "broken") as study:
            for left in study.running():
                study.tell(left.number, made_up(left))
            if len(study.trials()) >= TRIALS:
                interrupted = points(study)
                break
            run(study, 3)
            study.propose()
    assert interrupted[:TRIALS] == whole
    assert len({canonical_json(point) for point in whole}) == TRIALS


def test_another_seed_gives_other_suggestions(tmp_path: Path) -> None:
    found = []
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        with opened(tmp_path / str(seed), f"search.seed={seed}", "search.sampler=random") as study:
            run(study, 3)
            found.append(points(study))
    assert found[0] != found[1]


def test_a_stored_trial_is_whole_and_is_adopted_with_its_own_spec(tmp_path: Path) -> None:
    with opened(tmp_path) as study:
        first = study.propose()
        assert first is not None
    with opened(tmp_path) as study:
        (adopted,) = study.running()
        entry = study.trials()[0]
    assert to_plain(adopted.spec) == to_plain(first.spec)
    assert adopted.resolved == first.resolved
    assert entry.cost["params"] == first.resolved.cost.params
    assert entry.marks["history"] == {"finished": "", "running": ""}


def test_a_proposal_records_the_history_it_was_made_from(tmp_path: Path) -> None:
    with opened(tmp_path) as study:
        run(study, 2)
        study.propose()
        study.propose()
        history = study.trials()[3].marks["history"]
    assert from_ranges(history["finished"]) == [0, 1]
    assert from_ranges(history["running"]) == [2]


def test_a_second_driver_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from pathlib import Path; "
        f"from studied import opened; s = opened(Path({str(tmp_path)!r})); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StudyBusy, match=rf"'small' is being run by another driver \(process {holder.pid} "):
            opened(tmp_path)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        opened(tmp_path).close()


def test_the_baseline_is_trial_0_even_outside_the_searched_space(tmp_path: Path) -> None:
    model = "{d_model: 16, layers: 1, mixer: {softmax: {kv_heads: 2, queries_per_kv: 1, head_dim: 8}}, position: none}"
    with opened(tmp_path, f"baseline={{model: {model}}}") as study:
        baseline = study.propose()
        second = study.propose()
    assert baseline is not None
    assert second is not None
    assert baseline.resolved.flat["model.mixer.softmax.kv_heads"] == 2
    assert not holds(study.experiment.space, baseline.resolved.flat)
    assert holds(study.experiment.space, second.resolved.flat)


@pytest.mark.parametrize("sampler", ["grid", "random", "tpe"])
def test_a_finite_space_is_used_up_exactly_once(tmp_path: Path, sampler: str) -> None:
    with opened(tmp_path, f"search.sampler={sampler}", *FINITE) as study:
        while (proposed := study.propose()) is not None:
            study.tell(proposed.number, made_up(proposed))
        assert len(study.trials()) == 8
        assert "every distinct legal point of the space was tried (8 points" in study.ended
        assert len({canonical_json(point) for point in points(study)}) == 8


def test_grid_goes_on_where_it_stopped(tmp_path: Path) -> None:
    found = []
    for _ in range(8):
        with opened(tmp_path, "search.sampler=grid", *FINITE) as study:
            run(study, 1)
            found = points(study)
    with opened(tmp_path, "search.sampler=grid", *FINITE) as study:
        assert study.propose() is None
        declared = list(enumerate_all(study.experiment.space))
    assert found == declared


def test_refused_points_are_counted_and_never_stored(tmp_path: Path) -> None:
    with opened(tmp_path, "limits.max_params=2200", "search.sampler=random") as study:
        run(study, 10)
        redraws = [entry.marks["redraws"].get("infeasible", 0) for entry in study.trials()]
        params = [entry.cost["params"] for entry in study.trials()]
    assert sum(redraws) > 0
    assert max(params) <= 2200


def test_a_space_without_a_legal_point_ends_the_search_with_the_reason(tmp_path: Path) -> None:
    with opened(tmp_path, "limits.max_params=10", *FINITE) as study:
        assert study.propose() is None
        assert study.ended.startswith("none of the points of the space can be trained (8 points in all); the last")
        assert "limits.max_params=10: the model needs 2096" in study.ended
        assert study.trials() == ()


def test_an_edited_experiment_is_refused_with_the_difference_and_the_remedy(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with pytest.raises(StudyMismatch) as refused:
        opened(tmp_path, "model.norm=layernorm")
    message = str(refused.value)
    assert "model.norm" in message
    assert "rmsnorm" in message
    assert "--name NEW" in message
    assert "--extend" in message
    opened(tmp_path, "search.trials=99", "engine.jobs=2").close()


def test_extend_carries_old_trials_into_the_wider_space(tmp_path: Path) -> None:
    with opened(tmp_path) as study:
        run(study, 12)
        study.propose()
        before = points(study)
    wider = ("model.position=[none, rotary, alibi]",)
    with opened(tmp_path, *wider, extend=True) as study:
        assert study.generation == 1
        assert points(study) == before
        assert [left.number for left in study.running()] == [12]
        proposed = study.propose()
        assert proposed is not None
        assert proposed.number == 13
        history = study.trials()[13].marks["history"]
        assert from_ranges(history["finished"]) == list(range(12))
    with opened(tmp_path, *wider) as study:
        assert study.generation == 1
        assert len(study.trials()) == 14


def test_extend_refuses_what_would_make_losses_incomparable(tmp_path: Path) -> None:
    opened(tmp_path).close()
    for override in ("budget.tokens=2048", "search.seed=7"):
        with pytest.raises(StudyMismatch, match="would not compare"):
            opened(tmp_path, override, extend=True)


def test_other_data_under_the_same_name_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with Study.open(uri(tmp_path), experiment()) as study, pytest.raises(StudyMismatch, match="fingerprint"):
        study.bind(SHAPE, "other data")


def test_results_come_back_as_they_were_told(tmp_path: Path) -> None:
    with opened(tmp_path) as study:
        for result in (ok(1.5), broken(Status.OUT_OF_MEMORY), broken(Status.FAILED)):
            proposed = study.propose()
            assert proposed is not None
            study.tell(proposed.number, result)
    with opened(tmp_path) as study:
        assert [entry.result for entry in study.trials()] == [
            ok(1.5),
            broken(Status.OUT_OF_MEMORY),
            broken(Status.FAILED),
        ]
        assert study.running() == []


def test_a_recorded_result_survives_a_death_before_it_is_settled(tmp_path: Path) -> None:
    with opened(tmp_path) as study:
        proposed = study.propose()
        assert proposed is not None
        study.record(proposed.number, ok(1.0))
    with opened(tmp_path) as study:
        assert study.running() == []
        assert [entry.number for entry in study.trials() if not entry.settled] == [0]
        study.settle(0)
    with opened(tmp_path) as study:
        assert study.trials()[0].settled


def test_a_storage_that_is_no_database_uri_is_refused() -> None:
    with pytest.raises(UserError, match="takes sqlite:///FILE or postgresql://"):
        Study.open("redis://somewhere", experiment())


def test_a_trial_without_one_of_its_objectives_is_settled_as_broken(tmp_path: Path) -> None:
    two = ("objectives=[loss, tokens_per_second]", "search.sampler=nsga2", "search.population=4")
    with opened(tmp_path, *two) as study:
        proposed = study.propose()
        assert proposed is not None
        study.record(0, replace(ok(1.0), metrics={"loss": 1.0}))
    with opened(tmp_path, *two) as study:
        study.settle(0)
        run(study, 2)
    with opened(tmp_path, *two) as study:
        assert all(entry.settled for entry in study.trials())
        assert [told.fate for told in study.told()] == [Fate.BROKEN, Fate.OK, Fate.OK]
        (kept,) = study.storage.get_all_studies()
        states = [trial.state for trial in study.storage.get_all_trials(kept._study_id)]
        assert states == [TrialState.FAIL, TrialState.COMPLETE, TrialState.COMPLETE]
