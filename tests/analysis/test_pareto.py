"""Tests of analysis/pareto.py."""

import numpy as np
import pandas as pd
import pytest

from analysis.pareto import front
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
