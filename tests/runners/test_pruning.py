"""What pruners promise: decisions from losses at equal tokens, and from nothing else."""

import itertools
import math

import pytest
from studied import curve, experiment

from runners.pruning import AbstractPruner, Asha, Median, NoPruner, make_pruner, observe_all
from search_space.records import Status, TrialResult


def report(pruner: AbstractPruner, number: int, tokens: int, loss: float) -> bool:
    assert pruner.wants(number, tokens)
    pruner.observe(number, tokens, loss)
    return pruner.goes_on(number, tokens)


def asha() -> Asha:
    return Asha(grace_tokens=100, factor=2, budget_tokens=800)


def test_asha_keeps_the_best_half_at_each_rung() -> None:
    pruner = asha()
    assert report(pruner, 0, 100, 3.0)
    assert not report(pruner, 1, 100, 4.0)
    assert report(pruner, 2, 100, 2.0)
    assert report(pruner, 3, 100, 2.5)
    assert not report(pruner, 4, 100, 2.7)
    assert report(pruner, 0, 200, 3.0)
    assert not report(pruner, 2, 200, 3.5)


def test_asha_decides_at_rungs_only() -> None:
    pruner = asha()
    assert [tokens for tokens in range(25, 825, 25) if pruner.wants(0, tokens)] == [*range(100, 825, 25)]
    pruner.observe(0, 100, 1.0)
    assert [tokens for tokens in range(25, 225, 25) if pruner.wants(0, tokens)] == [100, 200]


def test_asha_takes_the_first_reading_past_a_rung() -> None:
    pruner = asha()
    assert report(pruner, 0, 130, 3.0)
    assert not pruner.wants(0, 160)
    assert not report(pruner, 1, 120, 3.1)


def test_asha_counts_a_diverged_trial_as_worst_at_every_later_rung() -> None:
    alone, beside = asha(), asha()
    beside.end(7, 50)
    assert report(alone, 0, 100, 9.0)
    assert report(beside, 0, 100, 9.0)
    assert report(beside, 1, 100, 9.5) is report(beside, 1, 100, 9.5) is False
    beside.end(8, 50)
    assert report(beside, 2, 100, 9.2), "two of four are kept; two broke"


def test_a_loss_that_is_not_finite_is_pruned() -> None:
    assert not report(asha(), 0, 100, math.nan)
    assert not report(asha(), 0, 100, math.inf)


@pytest.mark.parametrize("make", [asha, lambda: Median(grace_tokens=100, budget_tokens=800)])
def test_repeating_a_trial_after_a_kill_gives_the_same_decision(make: type) -> None:
    pruner = make()
    for number, loss in enumerate((3.0, 4.0, 2.0, 5.0, 2.5)):
        report(pruner, number, 100, loss)
    for loss in (2.2, 4.4):
        first = report(pruner, 9, 100, loss)
        assert report(pruner, 9, 100, loss) is first


def test_median_needs_others_and_compares_at_equal_tokens() -> None:
    pruner = Median(grace_tokens=100, budget_tokens=800)
    for number, loss in enumerate((1.0, 2.0, 3.0)):
        assert report(pruner, number, 100, loss)
    assert report(pruner, 9, 100, 9.0), "three others are too few"
    assert not report(pruner, 8, 100, 8.0)
    assert report(pruner, 7, 100, 2.0)
    assert report(pruner, 7, 200, 99.0), "nobody else was read at 200"


def test_median_judges_the_best_loss_so_far_and_spares_the_grace() -> None:
    pruner = Median(grace_tokens=100, budget_tokens=800)
    for number, tokens in itertools.product(range(5), (50, 100)):
        report(pruner, number, tokens, 2.0)
    assert report(pruner, 9, 50, 99.0)
    assert not report(pruner, 9, 100, 99.0)
    report(pruner, 8, 50, 1.0)
    assert report(pruner, 8, 100, 99.0)


def test_what_is_stored_rebuilds_the_pruner() -> None:
    lived, rebuilt = asha(), asha()
    results = {
        0: TrialResult(status=Status.OK, curve=curve(1.0)),
        1: TrialResult(status=Status.DIVERGED, curve=curve(1.0, until=0)),
    }
    stored = {0: {100: 3.0, 200: 2.0}, 1: {}}
    for number, result in results.items():
        observe_all(lived, number, stored[number], result)
    for number in reversed(results):
        observe_all(rebuilt, number, stored[number], results[number])
    for number, tokens, loss in ((2, 100, 3.5), (2, 200, 2.5), (3, 100, 2.0)):
        assert report(lived, number, tokens, loss) is report(rebuilt, number, tokens, loss)


def test_the_experiment_picks_the_pruner() -> None:
    assert isinstance(make_pruner(experiment()), NoPruner)
    assert isinstance(make_pruner(experiment("search.pruner={asha: {grace_tokens: 256, factor: 2}}")), Asha)
    assert isinstance(make_pruner(experiment("search.pruner={median: {grace_tokens: 256}}")), Median)
