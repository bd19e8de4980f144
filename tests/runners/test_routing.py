"""Trials of mixtures of experts: what is recorded, and that balancing is part of a run that repeats to the bit."""

import pytest

from runners.train import run_trial
from search_space.records import Metric, Status, TrialResult
from tests.runners.specs import prepare


def run(ffn: str) -> TrialResult:
    made = prepare(f"model.ffn={ffn}")
    return run_trial(made.spec, made.data, lambda reading: True)


@pytest.mark.parametrize("ffn", ["moe_bias", "switch"])
def test_a_trial_records_load_drops_and_active_parameters_and_repeats_to_the_bit(ffn: str) -> None:
    one, same = run(ffn), run(ffn)
    assert one.status == Status.OK, one.reason
    assert one.metrics["routing/load_max_over_mean"] >= 1
    assert (one.metrics["routing/drop_rate"] > 0) == (ffn == "switch")
    assert one.metrics[Metric.ACTIVE_PARAMS] < one.metrics[Metric.PARAMS]
    assert [reading.loss for reading in one.curve] == [reading.loss for reading in same.curve]
    assert one.curve[-1].loss < one.curve[0].loss


def test_dense_networks_record_no_routing() -> None:
    assert not [name for name in run("gelu").metrics if name.startswith("routing/")]
