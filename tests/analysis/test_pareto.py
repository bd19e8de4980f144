"""Tests of analysis/pareto.py."""

import numpy as np
import pandas as pd
import pytest

from analysis.pareto import front, hypervolume, sure_front
from search_space.errors import UserError


def test_the_front_holds_exactly_what_nothing_dominates() -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.integers(0, 12, (150, 3)), columns=["loss", "params", "speed"]).astype(float)
    measures = {"loss": "min", "params": "min", "speed": "max"}
    kept = front(frame, measures)
    costs = frame.assign(speed=-frame["speed"]).to_numpy()
    expected = [
        row
        for row in range(len(costs))
        if not ((costs <= costs[row]).all(axis=1) & (costs < costs[row]).any(axis=1)).any()
    ]
    assert sorted(kept.index) == expected
    assert 1 < len(expected) < 150
    assert kept["loss"].is_monotonic_increasing


def test_equal_rows_stay_and_rows_without_a_measure_go() -> None:
    frame = pd.DataFrame({"loss": [1.0, 1.0, np.nan, 0.5], "params": [2.0, 2.0, 1.0, 3.0]})
    assert sorted(front(frame, {"loss": "min", "params": "min"}).index) == [0, 1, 3]
    assert list(front(frame, {"loss": "max"}).index) == [0, 1]


@pytest.mark.parametrize(
    ("measures", "part"),
    [({}, "names no measure"), ({"los": "min"}, "did you mean 'loss'"), ({"loss": "down"}, "takes 'min' or 'max'")],
)
def test_wrong_measures_are_refused(measures: dict[str, str], part: str) -> None:
    with pytest.raises(UserError, match=part):
        front(pd.DataFrame({"loss": [1.0]}), measures)


def test_hypervolume_counts_what_random_points_count() -> None:
    rng = np.random.default_rng(1)
    for measures in (2, 3, 4):
        names = [f"m{place}" for place in range(measures)]
        frame = pd.DataFrame(rng.uniform(0, 1, (25, measures)), columns=names)
        found = hypervolume(frame, dict.fromkeys(names, "min"), dict.fromkeys(names, 1.0))
        points = rng.uniform(0, 1, (40_000, measures))
        dominated = (frame.to_numpy()[None] <= points[:, None]).all(axis=2).any(axis=1)
        assert found == pytest.approx(dominated.mean(), abs=0.01)


def test_hypervolume_minds_directions_and_ignores_what_is_beyond_the_reference() -> None:
    frame = pd.DataFrame({"loss": [1.0, 2.0, 5.0], "speed": [10.0, 30.0, 99.0]})
    measures = {"loss": "min", "speed": "max"}
    assert hypervolume(frame, measures, {"loss": 3.0, "speed": 0.0}) == pytest.approx(2 * 10 + 1 * 20)
    assert hypervolume(frame, {"loss": "min"}, {"loss": 3.0}) == pytest.approx(2)
    with pytest.raises(UserError, match="without a reference speed"):
        hypervolume(frame, measures, {"loss": 3.0})


def test_a_front_says_how_sure_it_is() -> None:
    rng = np.random.default_rng(2)
    frame = pd.DataFrame(
        {"loss": [1.0, 1.001, 2.0, *rng.uniform(2, 3, 40)], "params": [3.0, 2.9, 1.0, *rng.uniform(2, 4, 40)]}
    )
    measures = {"loss": "min", "params": "min"}
    drawn = sure_front(frame, measures, seed=1)
    assert drawn.low <= drawn.volume <= drawn.high <= 1
    assert 0 < drawn.rows["kept"].min() <= drawn.rows["kept"].max() <= 1
    noisy = sure_front(frame, measures, noise={"loss": 0.01}, seed=1)
    assert noisy.low <= noisy.volume <= noisy.high
    kept = noisy.rows.set_index("loss")["kept"]
    assert kept[2.0] == 1.0
    assert 0.2 < kept[1.0] < 0.9
    assert noisy.high - noisy.low < drawn.high - drawn.low


def test_the_volume_interval_covers_the_true_volume() -> None:
    rng = np.random.default_rng(3)
    params = np.linspace(1, 2, 12)
    true = pd.DataFrame({"loss": 3 - params, "params": params})
    measures, corner = {"loss": "min", "params": "min"}, {"loss": 2.2, "params": 2.2}
    truth = hypervolume(true, measures, corner)
    covered = []
    for seed in range(60):
        frame = true.assign(loss=true["loss"] + 0.05 * rng.standard_normal(12))
        found = sure_front(frame, measures, noise={"loss": 0.05}, reference=corner, draws=200, seed=seed)
        box = (corner["loss"] - frame["loss"].min()) * (corner["params"] - frame["params"].min())
        covered.append(found.low * box <= truth <= found.high * box)
    assert np.mean(covered) >= 0.9
