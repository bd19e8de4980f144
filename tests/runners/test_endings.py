import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from runners.divergence import TrialEnd, Watch
from runners.train import run_trial
from search_space.records import Metric, Reading, Status, TrialResult, result_from_plain
from tests.runners.specs import keep_going, prepare, run


def test_a_pruned_trial_stops_at_the_reading_that_condemned_it() -> None:
    result = run(prepare(), lambda reading: reading.tokens < 1280)
    assert result.status is Status.PRUNED
    assert result.tokens == 1280 == result.curve[-1].tokens
    assert Metric.LOSS not in result.metrics
    assert "1280 tokens" in result.reason


def test_the_last_reading_prunes_nobody() -> None:
    result = run(prepare(), lambda reading: reading.tokens < 2560)
    assert result.status is Status.OK


class Clock:
    """Goes on by so many seconds each time it is looked at; it stands still at first."""

    now = pace = 0.0

    def __call__(self) -> float:
        self.now += self.pace
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of this process."""
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


def test_a_trial_over_its_seconds_is_timed_out(clock: Clock) -> None:
    def slower(reading: Reading) -> bool:
        clock.pace = 10.0
        return True

    result = run(prepare("budget.max_seconds=60"), slower)
    assert result.status is Status.TIMED_OUT
    assert 640 <= result.tokens < 2560
    assert "budget.max_seconds=60" in result.reason


def test_the_limit_holds_before_the_first_step_too() -> None:
    result = run(prepare("budget.max_seconds=0.001"))
    assert result.status is Status.TIMED_OUT
    assert result.tokens == 0
    assert result.reason == "budget.max_seconds=0.001 passed while the model was built"


def test_waiting_for_the_answer_to_a_reading_is_not_the_trials_time(clock: Clock) -> None:
    def slow(reading: Reading) -> bool:
        clock.now += 3600.0
        return True

    result = run(prepare("budget.max_seconds=60"), slow)
    assert result.status is Status.OK
    assert clock.now == 4 * 3600.0
    assert result.seconds == result.curve[-1].seconds == 0.0


@pytest.fixture(scope="module")
def faults() -> dict[str, TrialResult]:
    """One trial per fault of a user's own block, in a process of its own, so that no other test sees that block."""
    code = "from tests.runners import faulty_blocks; faulty_blocks.main()"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    return {fault: result_from_plain(plain) for fault, plain in json.loads(done.stdout).items()}


def test_users_own_blocks_train(faults: dict[str, TrialResult]) -> None:
    assert faults["none"].status is Status.OK, faults["none"].last_lines


def test_a_nan_is_a_divergence_at_the_tokens_where_it_came(faults: dict[str, TrialResult]) -> None:
    result = faults["nan"]
    assert result.status is Status.DIVERGED
    assert result.first_nonfinite_step == 4 * 128
    assert "the training loss is nan at 512 tokens" in result.reason
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert [reading.tokens for reading in result.curve] == [0]


def test_a_nan_in_evaluation_alone_is_told_with_its_tokens(faults: dict[str, TrialResult]) -> None:
    result = faults["evaluation"]
    assert result.status is Status.DIVERGED
    assert "validation loss is nan" in result.reason
    assert result.first_nonfinite_step == result.tokens > 0


def test_a_failed_allocation_is_out_of_memory(faults: dict[str, TrialResult]) -> None:
    result = faults["memory"]
    assert result.status is Status.OUT_OF_MEMORY
    assert "allocate memory" in result.reason
    assert result.tokens == 3 * 128


def test_any_other_error_fails_the_trial_and_keeps_the_end_of_its_traceback(faults: dict[str, TrialResult]) -> None:
    result = faults["error"]
    assert result.status is Status.FAILED
    assert result.reason == "KeyError: 'the fourth pass always fails'"
    assert "faulty_blocks.py" in result.last_lines
    assert result.last_lines.endswith("KeyError: 'the fourth pass always fails'")


def watched(losses: list[float], norm: float = 1.0) -> Watch:
    watch = Watch(100)
    for loss in losses:
        watch.add(torch.tensor(loss), torch.tensor(norm))
    return watch


def test_a_loss_that_stays_far_above_its_start_is_a_divergence() -> None:
    with pytest.raises(TrialEnd, match=r"above 9\.000 for 20 steps, up to 2400 tokens; it began at 6\.000") as caught:
        watched([6.0] * 4 + [9.1] * 25).check()
    assert caught.value.status is Status.DIVERGED
    assert caught.value.first_nonfinite == 0


@pytest.mark.parametrize("losses", [[6.0] + ([9.1] * 19 + [8.9]) * 3, [6.0] + [8.9] * 60, [2.0] + [3.9] * 60])
def test_excursions_and_moderate_rises_are_no_divergence(losses: list[float]) -> None:
    watch = watched(losses)
    watch.check()
    assert watch.mean_since_reading() == pytest.approx(sum(losses) / len(losses))


def test_an_infinite_gradient_norm_is_a_divergence_at_its_step() -> None:
    watch = watched([3.0, 3.0])
    watch.add(torch.tensor(3.0), torch.tensor(math.inf))
    with pytest.raises(TrialEnd, match="the gradient norm is inf at 300 tokens") as caught:
        watch.check()
    assert caught.value.first_nonfinite == 300


def test_other_data_than_the_specs_fail_the_trial() -> None:
    made = prepare()
    other = prepare("task.mqar.seed=1").data
    result = run_trial(made.spec, other, keep_going)
    assert result.status is Status.FAILED
    assert "fingerprint" in result.reason


def test_an_interrupt_is_not_swallowed() -> None:
    def interrupt(reading: Reading) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(prepare(), interrupt)
