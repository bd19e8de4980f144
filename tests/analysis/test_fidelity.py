"""Tests of analysis/fidelity.py on curves whose end is known."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import synthetic

from analysis.fidelity import extrapolate, extrapolations, fidelity, rank_agreements, spearman_interval
from analysis.frame import Search
from search_space.errors import UserError
from search_space.records import Metric


def crossing(search: Search, keeps_from: int, trials: int = 60) -> Search:
    """A search whose order is noise before a token count and final from it on."""
    rng = np.random.default_rng(0)
    steps = range(synthetic.EVERY, synthetic.BUDGET + 1, synthetic.EVERY)
    final = rng.standard_normal(trials)
    rows = [
        {"run_id": str(place), "tokens": tokens, "loss": 0.02 * rng.standard_normal() + value}
        for place, loss in enumerate(final)
        for tokens in steps
        for value in [loss if tokens >= keeps_from else rng.standard_normal()]
    ]
    frame = pd.DataFrame(
        {
            "run_id": [str(place) for place in range(trials)],
            "number": range(trials),
            "stage": "search",
            "status": "ok",
            Metric.LOSS: final,
        }
    )
    return dataclasses.replace(search, frame=frame, curves=pd.DataFrame(rows))


@pytest.mark.parametrize("part", [2, 4, 6])
def test_the_order_is_trusted_from_where_it_stays(search: Search, part: int) -> None:
    found = fidelity(crossing(search, part * synthetic.EVERY))
    assert found.tokens == part * synthetic.EVERY
    assert f"from {found.tokens:,} tokens on ({100 * part / 8:.0f} % of the budget)" in found.text
    assert list(found.agreement.columns) == ["tokens", "share", "correlation", "low", "high", "n"]


def test_an_order_that_never_settles_is_not_trusted(search: Search) -> None:
    found = fidelity(crossing(search, synthetic.BUDGET))
    assert found.tokens == 0
    assert "cannot be trusted before the whole budget" in found.text
    few = crossing(search, synthetic.EVERY, trials=4)
    assert "is not known" in fidelity(few).text
    assert rank_agreements(few).empty


@pytest.mark.parametrize("rho", [0.0, 0.6, 0.9])
def test_intervals_of_rank_correlations_cover(rho: float) -> None:
    rng = np.random.default_rng(1)
    truth = 6 / np.pi * np.arcsin(rho / 2)
    covered = []
    for _ in range(400):
        pair = rng.multivariate_normal([0, 0], [[1, rho], [rho, 1]], 30)
        ranks = pair.argsort(axis=0).argsort(axis=0)
        low, high = spearman_interval(float(np.corrcoef(ranks.T)[0, 1]), 30, 0.05)
        covered.append(low <= truth <= high)
    assert np.mean(covered) >= 0.93
    assert spearman_interval(1.0, 3, 0.05) == (-1.0, 1.0)


@pytest.mark.parametrize(("seen", "noise"), [(6, 0.002), (10, 0.01), (16, 0.005)])
def test_extrapolations_of_power_laws_are_calibrated(seen: int, noise: float) -> None:
    rng = np.random.default_rng(seen)
    tokens = 1000 * np.arange(1, 33)
    covered, widths = [], []
    for _ in range(300):
        exponent, drop = rng.uniform(0.05, 1.5), rng.uniform(0.2, 2.0)
        shape = tokens**-exponent
        curve = 2 + drop * (shape - shape[-1]) / (shape[0] - shape[-1])
        readings = curve + noise * rng.standard_normal(len(tokens))
        found = extrapolate(tokens[:seen].tolist(), readings[:seen].tolist(), int(tokens[-1]), alpha=0.1)
        covered.append(found.low <= readings[-1] <= found.high)
        widths.append(found.high - found.low)
        assert found.low <= found.estimate <= found.high
    assert 0.87 <= np.mean(covered) <= 0.97
    assert np.median(widths) < 1.0


def test_what_cannot_be_extrapolated_is_refused() -> None:
    with pytest.raises(UserError, match="at least 5 finite readings"):
        extrapolate([1, 2, 3], [3.0, 2.0, 1.0], 10)
    with pytest.raises(UserError, match="is not beyond the last reading at 5"):
        extrapolate([1, 2, 3, 4, 5], [5.0, 4.0, 3.5, 3.2, 3.0], 5)


def test_trials_stopped_early_are_extrapolated_to_the_budget(search: Search) -> None:
    steps = np.arange(1, 7) * synthetic.EVERY
    stopped = search.trials[search.trials["status"] == "pruned"].iloc[0]
    rows = pd.DataFrame({"run_id": stopped["run_id"], "tokens": steps, "loss": 2 + 1.4 * (steps / steps[0]) ** -0.6})
    found = extrapolations(dataclasses.replace(search, curves=rows))
    assert list(found["number"]) == [stopped["number"]]
    assert found["tokens"].iloc[0] == steps[-1]
    assert found["estimate"].iloc[0] == pytest.approx(2 + 1.4 * 8**-0.6, abs=0.01)
    assert found["low"].iloc[0] <= found["estimate"].iloc[0] <= found["high"].iloc[0]
