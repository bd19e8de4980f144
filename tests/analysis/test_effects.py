"""Tests of analysis/effects.py, analysis/factors.py and analysis/regression.py on planted effects."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import synthetic
from scipy import stats

from analysis import effects, regression
from analysis.factors import Factor, factor
from analysis.frame import PARAM, Search
from analysis.text import effects_text


def planted_trials(rng: np.random.Generator, n: int, noise: float) -> tuple[pd.DataFrame, np.ndarray]:
    """Random points with their losses; kv_heads is without effect here, so that each option has one true worth."""
    flats = [synthetic.draw(rng) for _ in range(n)]
    frame = pd.DataFrame([{PARAM + path: value for path, value in flat.items()} for flat in flats], dtype=object)
    losses = [synthetic.planted({**flat, synthetic.KV_HEADS: 2}) for flat in flats]
    return frame.where(frame.notna(), None), np.array(losses) + noise * rng.standard_normal(n)


def factors(frame: pd.DataFrame) -> list[Factor]:
    found = [factor(str(column).removeprefix(PARAM), frame, None) for column in frame]
    return [entry for entry in found if entry is not None]


def truth(row: effects.Effect) -> float:
    worth = {str(option): value for option, value in synthetic.WORTH[row.path].items()}
    return worth[row.option] - worth[row.reference]


def simulate(n: int, noise: float, runs: int, seed: int) -> dict[str, float]:
    """Shares over many searches: pointwise coverage, claims on true zeros, and claims on effects of 5 noises."""
    rng = np.random.default_rng(seed)
    covered, zeros, large = [], [], []
    for _ in range(runs):
        frame, losses = planted_trials(rng, n, noise)
        found = factors(frame)
        claims = sum(level.enough for entry in found for level in entry.levels)
        for entry in found:
            if entry.path not in synthetic.WORTH:
                continue
            pointwise = effects._effects(entry, found, losses, 0.05)
            together = effects._effects(entry, found, losses, 0.05 / claims)
            for one, both in zip(pointwise, together, strict=True):
                if one.claim == "too few":
                    continue
                covered.append(one.low <= truth(one) <= one.high)
                if truth(one) == 0:
                    zeros.append(both.claim != "undecided")
                elif abs(truth(one)) >= 5 * noise:
                    large.append(both.claim == ("better" if truth(one) < 0 else "worse"))
    return {"coverage": float(np.mean(covered)), "zeros": float(np.mean(zeros)), "large": float(np.mean(large))}


@pytest.mark.parametrize("n", [24, 40])
def test_intervals_cover_and_absent_effects_are_not_claimed(n: int) -> None:
    shares = simulate(n, 0.03, runs=25, seed=n)
    assert shares["coverage"] >= 0.93
    assert shares["zeros"] <= 0.02
    assert shares["large"] >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize(("n", "noise"), [(24, 0.01), (30, 0.04), (50, 0.02), (200, 0.02)])
def test_coverage_holds_over_many_searches(n: int, noise: float) -> None:
    shares = simulate(n, noise, runs=200, seed=n + 1)
    assert shares["coverage"] >= 0.93
    assert shares["zeros"] <= 0.02


def test_large_samples_give_the_planted_numbers() -> None:
    frame, losses = planted_trials(np.random.default_rng(0), 400, 0.02)
    found = factors(frame)
    for entry in found:
        if entry.path in synthetic.WORTH:
            for row in effects._effects(entry, found, losses, 0.05):
                assert row.estimate == pytest.approx(truth(row), abs=0.01)


def test_a_learning_rate_has_its_optimum_inside() -> None:
    rng = np.random.default_rng(1)
    rates = np.exp(rng.uniform(np.log(1e-4), np.log(1e-1), 60))
    losses = 0.05 * np.log2(rates / 3e-3) ** 2 + 0.01 * rng.standard_normal(60)
    frame = pd.DataFrame({f"{PARAM}rate": list(rates)}, dtype=object)
    (only,) = factors(frame)
    (row,) = effects._effects(only, [only], losses, 0.05)
    low, high = float(row.reference), float(row.option)
    expected = 0.05 * (np.log2(high / 3e-3) ** 2 - np.log2(low / 3e-3) ** 2)
    assert row.low <= expected <= row.high
    assert row.high - row.low < 0.1


def test_a_field_that_is_not_live_is_not_missing() -> None:
    rng = np.random.default_rng(2)
    n = 60
    kinds = rng.choice(["a", "b"], n)
    heads = [int(rng.choice([1, 2])) if kind == "a" else None for kind in kinds]
    losses = np.array([0.3 * (kind == "b") + 0.1 * (head == 1) for kind, head in zip(kinds, heads, strict=True)])
    losses = losses + 0.01 * rng.standard_normal(n)
    frame = pd.DataFrame({f"{PARAM}x.kind": list(kinds), f"{PARAM}x.a.heads": heads}, dtype=object)
    family, field = factors(frame)
    assert field.live.sum() == (kinds == "a").sum()
    (inner,) = effects._effects(field, [family, field], losses, 0.05)
    sign = 1 if inner.option == "1" else -1
    assert inner.low <= sign * 0.1 <= inner.high
    assert inner.n + inner.n_reference == (kinds == "a").sum()
    assert inner.adjusted_for == ("x",)
    (outer,) = effects._effects(family, [family, field], losses, 0.05)
    average = np.mean([0.1 * (head == 1) for head in heads if head is not None])
    expected = (0.3 - average) * (1 if outer.option == "b" else -1)
    assert outer.estimate == pytest.approx(expected, abs=0.01)


def test_losses_are_compared_at_equal_tokens(search: Search) -> None:
    found = effects.main_effects(search)
    trained = search.trials[search.trials["status"].isin(["ok", "pruned"])]
    assert found.tokens == synthetic.EVERY
    assert found.n == len(trained)
    assert found.unit == "nats/byte"
    assert 0 < found.agreement <= 1


def test_what_was_solved_or_never_varied_is_no_choice(search: Search) -> None:
    assert f"{PARAM}model.d_model" in search.frame
    assert f"{PARAM}{synthetic.DROPOUT}" in search.frame
    paths = {row.path for row in effects.main_effects(search).rows}
    assert not paths & {"model.d_model", "model.d_ff", synthetic.DROPOUT}
    assert {synthetic.RATE, synthetic.KV_HEADS, "model.mixer.kind"} <= paths


def test_nothing_is_claimed_on_fewer_than_three_trials(search: Search) -> None:
    for row in effects.main_effects(search).rows:
        if min(row.n, row.n_reference) < 3:
            assert row.claim == "too few"
            assert np.isnan(row.low)


def test_trials_that_ended_badly_are_a_rate(search: Search) -> None:
    found = effects.main_effects(search)
    post = next(rate for rate in found.failures if rate.option == "post")
    bad = search.trials["status"].isin(["diverged", "out_of_memory"])
    inside = search.trials[f"{PARAM}model.placement.kind"] == "post"
    assert sum(post.counts.values()) == (bad & inside).sum()
    assert post.n == inside.sum()
    assert f"of {post.n} with placement post" in post.text
    text = effects_text(search)
    assert "Ended badly: diverged" in text
    assert "undecided" in text


def test_a_cause_of_failure_is_named_when_it_is_shown() -> None:
    assert regression.fisher(9, 10, 0, 14) < 1e-4


def test_json_holds_no_nan(search: Search) -> None:
    def walk(value: Any) -> None:
        if isinstance(value, dict):
            [walk(inner) for inner in value.values()]
        elif isinstance(value, list | tuple):
            [walk(inner) for inner in value]
        else:
            assert value == value

    walk(effects.main_effects(search).to_json())


@pytest.mark.parametrize("table", [(3, 9, 0, 12), (0, 5, 5, 5), (2, 7, 3, 9), (7, 17, 1, 13)])
def test_fisher_agrees_with_scipy(table: tuple[int, int, int, int]) -> None:
    hits, n, other, rest = table
    expected = stats.fisher_exact([[hits, n - hits], [other, rest - other]]).pvalue
    assert regression.fisher(hits, n, other, rest) == pytest.approx(expected)


def test_fit_agrees_with_the_textbook() -> None:
    rng = np.random.default_rng(5)
    design = np.column_stack([np.ones(40), rng.standard_normal((40, 2))])
    outcome = design @ [1.0, 2.0, -1.0] + 0.1 * rng.standard_normal(40)
    found = regression.fit(design, outcome)
    expected, squares, *_ = np.linalg.lstsq(design, outcome, rcond=None)
    np.testing.assert_allclose(found.coefficients, expected)
    np.testing.assert_allclose(found.classical, np.linalg.inv(design.T @ design) * squares / 37)
    left_out = []
    for row in range(40):
        kept = np.arange(40) != row
        left_out.append(np.linalg.lstsq(design[kept], outcome[kept], rcond=None)[0])
    moves = np.array(left_out) - expected
    np.testing.assert_allclose(found.hc3, moves.T @ moves, rtol=1e-8)


def test_columns_that_add_nothing_are_left_out() -> None:
    rng = np.random.default_rng(6)
    own, other = rng.standard_normal((30, 1)), rng.standard_normal((30, 1))
    outcome = own[:, 0] + other[:, 0]
    design, held = regression.chosen([own], [2 * own, other, own + 3], outcome)
    assert held == [1]
    assert np.linalg.matrix_rank(design) == design.shape[1] == 3


def test_effects_are_called_descriptive_and_leave_the_decision_to_finals(search: Search) -> None:
    title = effects_text(search).split("\n")[0]
    assert "descriptive: the sampler chose the trials" in title
    assert "paired finals decide" in title
    assert "hold together" not in title
