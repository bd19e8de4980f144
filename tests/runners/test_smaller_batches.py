"""A trial that ran out of memory runs with half the micro-batch: the same loss up to rounding, and replayed so."""

from pathlib import Path

import pytest
from tracked import children, searched, store_uri

from runners.comparison import CLOCK
from runners.replay import replay
from runners.tracking import Tracker
from runners.train import run_trial
from search_space.records import Metric, Status
from tests.runners.specs import keep_going, losses, prepare


def test_half_the_micro_batch_gives_the_same_losses_up_to_rounding() -> None:
    made = prepare("budget.tokens=640")
    whole = run_trial(made.spec, made.data, keep_going)
    half = run_trial(made.spec, made.data, keep_going, micro_batch_tokens=64)
    assert half.status is Status.OK, half.last_lines
    assert half.metrics[Metric.MICRO_BATCH_TOKENS] == 64
    assert Metric.MICRO_BATCH_TOKENS not in whole.metrics
    assert losses(half) == pytest.approx(losses(whole), abs=1e-5)


@pytest.mark.slow
def test_a_replay_takes_the_micro_batch_that_was_used(tmp_path: Path) -> None:
    uri, search = store_uri(tmp_path), searched()
    tracker = Tracker(uri)
    search.start(tracker)
    run = search.start_trial(tracker, 0)
    result = run_trial(search.trial(0)[0], search.data, keep_going, micro_batch_tokens=64)
    assert result.status is Status.OK, result.last_lines
    tracker.finish_trial(run, result)
    tracker.finish_search("FINISHED")
    report = replay(children(uri)[0].info.run_id, uri)
    assert report.good, report.text()
    assert report.compared > len(result.metrics.keys() - CLOCK)
