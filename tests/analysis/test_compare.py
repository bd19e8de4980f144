"""Tests of analysis/compare.py: the e-process against its definition, and the verdicts under continuous peeking."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy import integrate, stats

from analysis.compare import (
    AIMED_EFFECT,
    AIMED_SHARE,
    LEVELS,
    WIDE_VARIANCE,
    confidence_sequence,
    decidable,
    e_value,
    enough,
    interval_text,
    paired_verdict,
    pairs_to_settle,
)

PEEKS = 50


@pytest.fixture(scope="module")
def levels() -> ModuleType:
    """benchmarks/levels.py."""
    spec = importlib.util.spec_from_file_location("levels", Path(__file__).parents[2] / "benchmarks" / "levels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def decided(draws: np.ndarray, alpha: float, mean: float = 0.0) -> np.ndarray:
    """[runs, n]: whether the interval at each n, from the first draws of each run, leaves out the mean."""
    runs, most = draws.shape
    found = np.zeros((runs, most), dtype=bool)
    for n in range(2, most + 1):
        part = draws[:, :n]
        found[:, n - 1] = np.abs(part.mean(axis=1) - mean) > decidable(n, alpha) * part.std(axis=1, ddof=1)
    return found


def test_e_value_is_the_ratio_of_the_t_densities_under_the_mixture() -> None:
    values = [0.3, -0.1, 0.25, 0.4, 0.05]
    n = len(values)
    t = np.mean(values) / np.std(values, ddof=1) * math.sqrt(n)

    def density(effect: float) -> float:
        return float(stats.nct.pdf(t, n - 1, effect * math.sqrt(n)))

    def weighted(effect: float) -> float:
        return density(effect) * float(stats.norm.pdf(effect, scale=math.sqrt(WIDE_VARIANCE)))

    aimed = (density(AIMED_EFFECT) + density(-AIMED_EFFECT)) / 2
    marginal = (1 - AIMED_SHARE) * integrate.quad(weighted, -8, 8, limit=400)[0] + AIMED_SHARE * aimed
    assert e_value(values) == pytest.approx(marginal / stats.t.pdf(t, n - 1), rel=1e-6)


def test_interval_ends_are_where_the_evidence_is_just_enough() -> None:
    values = [0.21, 0.18, 0.26, 0.2]
    for alpha in (0.05, 0.01):
        low, high = confidence_sequence(values, alpha)
        assert e_value(values, low) == pytest.approx(enough(alpha))
        assert e_value(values, high) == pytest.approx(enough(alpha))
        assert e_value(values, (3 * low + high) / 4) < enough(alpha) < e_value(values, low - 0.1)


@pytest.mark.parametrize("alpha", [*LEVELS, 0.2, 0.186, 0.05, 0.025, 0.01, 0.0025])
def test_no_level_is_exceeded_however_long_one_looks(levels: ModuleType, alpha: float) -> None:
    assert 0.5 * alpha < levels.error(alpha) <= alpha


def test_levels_that_are_not_proved_are_decided_by_the_plain_bound() -> None:
    assert enough(LEVELS[0] / 2) == 2 / LEVELS[0]
    assert enough(0.6) == 1 / 0.6
    assert enough(0.05) < 1 / 0.05


def test_the_computed_error_is_the_simulated_one(levels: ModuleType) -> None:
    draws = np.random.default_rng(6).standard_normal((100_000, 6))
    for alpha in (0.2, 0.05):
        share = decided(draws, alpha).any(axis=1).mean()
        exact = levels.error(alpha, pairs=6, endless=False)
        assert share == pytest.approx(exact, abs=4 * math.sqrt(exact / len(draws)))


def test_scale_and_sign_do_not_matter() -> None:
    values = np.array([0.21, 0.18, 0.26, 0.2])
    low, high = confidence_sequence(values, 0.05)
    assert confidence_sequence(-1000 * values, 0.05) == pytest.approx((-1000 * high, -1000 * low))


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_a_null_is_declared_at_most_at_alpha_under_continuous_peeking(alpha: float) -> None:
    draws = np.random.default_rng(1).standard_normal((20_000, PEEKS))
    share = decided(draws, alpha).any(axis=1).mean()
    assert 0 < share <= alpha


def test_heavy_tails_and_unequal_variances_stay_below_alpha() -> None:
    rng = np.random.default_rng(2)
    heavy = rng.standard_t(3, (20_000, PEEKS))
    unequal = rng.standard_normal((20_000, PEEKS)) * rng.choice([0.3, 1.0, 3.0], (20_000, PEEKS))
    for draws in (heavy, unequal):
        assert decided(draws, 0.05).any(axis=1).mean() <= 0.05


def test_all_intervals_of_a_run_hold_the_true_mean_together() -> None:
    draws = np.random.default_rng(3).normal(0.7, 0.3, (20_000, PEEKS))
    assert decided(draws, 0.05, mean=0.7).any(axis=1).mean() <= 0.05


def test_few_seeds_decide_a_large_gap() -> None:
    rng = np.random.default_rng(4)
    draws = rng.standard_normal((20_000, 10)) + 5
    power = np.maximum.accumulate(decided(draws, 0.05), axis=1).mean(axis=0)
    assert power[3] > 0.98
    assert power[4] > 0.999
    shared = np.maximum.accumulate(decided(draws, 0.025), axis=1).mean(axis=0)
    assert shared[3] > 0.81
    assert shared[4] > 0.99
    two = np.maximum.accumulate(decided(draws - 3, 0.05 / 5), axis=1).mean(axis=0)
    assert two[9] > 0.89


@pytest.mark.parametrize(
    ("alpha", "smallest"),
    [(0.05, [math.inf, 5.91, 2.64, 1.92, 1.64, 1.4]), (0.025, [math.inf, 14.81, 3.84, 2.38, 1.9, 1.53])],
)
def test_the_smallest_decidable_gaps_are_as_documented(alpha: float, smallest: list[float]) -> None:
    assert [round(decidable(n, alpha), 2) for n in (2, 3, 4, 5, 6, 8)] == smallest


def test_a_decided_gap_reads_with_numbers_and_units() -> None:
    verdict = paired_verdict([0.21, 0.20, 0.23, 0.19], contestant="none", baseline="rotary", unit="nats/byte")
    assert verdict.kind == "worse"
    assert verdict.text == "rotary beats none by 0.21 nats/byte [0.162, 0.253], 4 paired seeds"
    mirrored = paired_verdict([-0.21, -0.20, -0.23, -0.19], contestant="rotary", baseline="none", unit="nats/byte")
    assert (mirrored.kind, mirrored.text) == ("better", verdict.text)


def test_undecided_says_how_many_seeds_would_settle_it_and_they_do() -> None:
    values = [-0.21, -0.20, 0.03, -0.19]
    verdict = paired_verdict(values, contestant="rotary", baseline="none")
    assert verdict.kind == "undecided"
    assert f"about {verdict.more_seeds} more" in verdict.text
    n = len(values) + verdict.more_seeds
    gap = abs(np.mean(values)) / np.std(values, ddof=1)
    assert decidable(n, 0.05) < gap < decidable(n - 1, 0.05)


@pytest.mark.parametrize("gap", [0.02, 0.1, 0.5])
def test_the_pairs_that_settle_a_gap_are_the_fewest_that_do(gap: float) -> None:
    n = pairs_to_settle(gap, 0.05, alpha=0.01)
    assert [gap > 0.05 * decidable(k, 0.01) for k in (n - 1, n)] == [False, True]


def test_with_a_margin_the_seeds_that_would_settle_a_gap_of_the_margin_are_told() -> None:
    values = [0.002, -0.015, 0.011, 0.001]
    verdict = paired_verdict(values, margin=0.01)
    assert verdict.kind == "undecided"
    assert verdict.more_seeds == pairs_to_settle(0.01, float(np.std(values, ddof=1)), alpha=0.05, after=4) - 4
    assert verdict.text.endswith(f"about {verdict.more_seeds} more would probably settle a gap of 0.010 nats/token")


@pytest.mark.parametrize("values", [[], [0.2], [0.2, 0.21]])
def test_too_few_seeds_decide_nothing(values: list[float]) -> None:
    verdict = paired_verdict(values)
    assert verdict.kind == "undecided"
    assert verdict.to_json()["low"] is None
    assert "no bound yet" in verdict.text or "no complete pair" in verdict.text


def test_a_margin_allows_equal_and_zero_margin_does_not() -> None:
    values = [0.001, 0.002, -0.001, 0.0005, 0.001]
    assert paired_verdict(values).kind == "undecided"
    verdict = paired_verdict(values, margin=0.01)
    assert verdict.kind == "equal"
    assert "within ±0.010" in verdict.text


def test_a_dead_change_is_equal_to_the_last_bit() -> None:
    verdict = paired_verdict([0.0, 0.0, 0.0])
    assert verdict.kind == "equal"
    assert "the change does nothing" in verdict.text


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"differences": [0.1, math.nan]}, r"differences\[1\]=nan"),
        ({"differences": [0.1], "alpha": 0.0}, "alpha=0.0"),
        ({"differences": [0.1], "margin": -1.0}, "margin=-1.0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        paired_verdict(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (0.0021, 0.11, "[0.002, 0.110]"),
        (-0.0348, 0.0211, "[−0.035, 0.021]"),
        (-3.1, -0.004, "[−3.100, −0.004]"),
        (0.0, 0.0, "[0.00, 0.00]"),
        (-math.inf, math.inf, "[no bound yet]"),
    ],
)
def test_an_interval_shows_on_which_side_of_zero_it_lies(low: float, high: float, shown: str) -> None:
    assert interval_text(low, high) == shown


def test_verdicts_follow_the_rule_that_the_simulations_use() -> None:
    draws = np.random.default_rng(5).standard_normal((150, 8)) + 1.5
    by_rule = decided(draws, 0.05)
    for run, n in ((run, n) for run in range(len(draws)) for n in range(1, 9)):
        assert (paired_verdict(draws[run, :n].tolist()).kind != "undecided") == by_rule[run, n - 1]
    assert 0 < by_rule.mean() < 1


def test_evidence_beyond_what_a_number_holds_is_infinite() -> None:
    assert e_value([1.0] * 400) == math.inf
    assert e_value([0.0] * 400) == 1.0
