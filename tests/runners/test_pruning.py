"""What pruners promise: decisions from losses at equal tokens, and from nothing else."""

import itertools
import math
import random
from statistics import median

import pytest
from studied import curve, experiment

from runners.pruners import make_pruner
from runners.pruning import AbstractPruner, Asha, Hyperband, Median, NoPruner, observe_all, rungs
from search_space.records import Status, TrialResult


def report(pruner: AbstractPruner, number: int, tokens: int, loss: float, *others: float) -> bool:
    assert pruner.wants(number, tokens)
    pruner.observe(number, tokens, loss, *others)
    return pruner.goes_on(number, tokens)


def asha() -> Asha:
    return Asha(grace_tokens=100, factor=2, budget_tokens=800)


def hyperband() -> Hyperband:
    return Hyperband(grace_tokens=100, factor=2, budget_tokens=800)


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
    assert isinstance(make_pruner(experiment("search.pruner={hyperband: {grace_tokens: 256}}")), Hyperband)
    assert isinstance(make_pruner(experiment("search.pruner={median: {grace_tokens: 256}}")), Median)


def test_rungs_lie_below_the_budget() -> None:
    assert rungs(100, 2, 800) == [100, 200, 400]
    assert rungs(100, 3, 901) == [100, 300, 900]
    assert rungs(100, 2, 100) == []


def test_fronts_at_a_rung_keep_what_no_trial_beats() -> None:
    pruner = asha()
    assert report(pruner, 0, 100, 3.0, 5.0)
    assert report(pruner, 1, 100, 4.0, 4.0), "cheaper"
    assert not report(pruner, 2, 100, 4.5, 4.5), "beaten by trial 1"
    assert report(pruner, 3, 100, 9.0, 1.0), "the cheapest of all"
    assert not report(pruner, 4, 100, 9.5, 5.5), "beaten by all, and half are kept"
    assert report(pruner, 5, 100, 3.1, 5.1) is False, "beaten by trial 0; the first front fills the half that is kept"


def test_fronts_at_a_rung_keep_the_best_half_where_the_first_front_is_small() -> None:
    pruner = asha()
    for number in range(8):
        report(pruner, number, 100, 1.0 + number, 1.0 + number)
    assert report(pruner, 8, 100, 3.5, 3.5)
    assert not report(pruner, 9, 100, 7.5, 7.5)


def test_a_broken_trial_stands_in_no_front_however_cheap() -> None:
    pruner = asha()
    pruner.end(0, 50)
    assert not report(pruner, 1, 100, math.nan, 0.1)
    assert report(pruner, 2, 100, 9.0, 9.0)


def test_brackets_of_hyperband_start_later_and_hold_fewer_trials() -> None:
    pruner = hyperband()
    counts = [sum(pruner.bracket(number) == at for number in range(260)) for at in range(4)]
    assert counts == pytest.approx([260 * size / 22 for size in (8, 6, 4, 4)], abs=2)
    first = [next((t for t in range(25, 800, 25) if pruner.wants(n, t)), 0) for n in range(60)]
    assert {(pruner.bracket(number), tokens) for number, tokens in enumerate(first)} == {
        (0, 100),
        (1, 200),
        (2, 400),
        (3, 0),
    }


def test_a_bracket_halves_on_its_own() -> None:
    pruner = hyperband()
    by_bracket = {at: [number for number in range(60) if pruner.bracket(number) == at] for at in range(4)}
    assert report(pruner, by_bracket[0][0], 200, 1.0)
    assert report(pruner, by_bracket[1][0], 200, 9.0), "alone in its bracket"
    assert not report(pruner, by_bracket[1][1], 200, 9.5)
    assert pruner.goes_on(by_bracket[3][0], 200)
    assert pruner.marks(by_bracket[1][0]) == {"bracket": 1}


@pytest.mark.parametrize("make", [asha, lambda: Median(grace_tokens=100, budget_tokens=800)])
def test_decisions_are_those_of_a_look_at_all_losses(make: type) -> None:
    dice, pruner = random.Random(1), make()
    losses: dict[int, float] = {}
    for step in range(400):
        number = dice.randrange(300)
        if dice.random() < 0.1 and number not in losses:
            pruner.end(number, 50)
            losses[number] = math.inf
            continue
        losses[number] = dice.choice([math.inf, 1.0, dice.random()])
        decided = report(pruner, number, 100, losses[number])
        others = [loss for other, loss in losses.items() if other != number]
        if make is asha:
            kept = sorted(losses.values())[max(1, len(losses) // 2) - 1]
            assert decided is (math.isfinite(losses[number]) and losses[number] <= kept), step
        else:
            assert decided is (len(others) < 4 or losses[number] <= median(others)), step
