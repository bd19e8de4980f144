"""Tests of analysis/support.py, and of what estimates make of groups that are neither supported nor ruled out."""

import numpy as np
import pandas as pd
import pytest

from analysis.estimates import Model
from analysis.factors import Factor, factor
from analysis.frame import PARAM
from analysis.mixed import Contrast, cautious
from analysis.support import Groups


def groups_of(columns: list[np.ndarray], outcome: np.ndarray, price: float) -> Groups:
    ones = np.ones((len(outcome), 1))
    return Groups(free=ones, columns=columns, outcome=outcome, prices=[price] * len(columns))


def test_groups_without_support_are_left_out() -> None:
    rng = np.random.default_rng(7)
    columns = [rng.standard_normal((200, 2)) for _ in range(20)]
    outcome = columns[3] @ [1.0, -1.0] + rng.standard_normal(200)
    assert list(groups_of(columns, outcome, np.log(20)).supported()) == [3]
    assert Groups(free=columns[3], columns=[columns[3]], outcome=outcome, prices=[0.0]).supported() == {}


def test_what_explains_the_same_is_a_rival_and_what_explains_nothing_is_not() -> None:
    rng = np.random.default_rng(8)
    true, other = rng.standard_normal((2, 100, 1))
    twin = true + 0.05 * rng.standard_normal((100, 1))
    outcome = true[:, 0] + 0.5 * rng.standard_normal(100)
    groups = groups_of([true, twin, other], outcome, np.log(100))
    kept = groups.supported()
    assert len(kept) == 1
    rivals = groups.rivals(kept)
    assert [set(held) for _, held in rivals] == [{0, 1} - set(kept)]
    assert 0 < rivals[0][0] <= 1


def test_a_group_that_is_nearly_worth_its_price_is_a_rival_beside_the_kept_ones() -> None:
    rng = np.random.default_rng(9)
    basis = np.linalg.qr(np.column_stack([np.ones(100), rng.standard_normal((100, 4))]))[0]
    columns = [basis[:, [place]] for place in (1, 2, 3)]
    outcome = 30 * basis[:, 1] + 3.3 * basis[:, 2] + 96**0.5 * basis[:, 4]
    groups = groups_of(columns, outcome, np.log(100))
    kept = groups.supported()
    assert set(kept) == {0}
    ((odds, held),) = groups.rivals(kept)
    assert set(held) == {0, 1}
    worth = groups.worth(kept)[1][0]
    assert odds == pytest.approx(np.exp(worth))
    assert -3 < worth < 0


def test_groups_without_a_price_are_never_doubted() -> None:
    rng = np.random.default_rng(10)
    columns = list(rng.standard_normal((2, 60, 1)))
    outcome = 0.3 * columns[0][:, 0] + rng.standard_normal(60)
    groups = groups_of(columns, outcome, 0.0)
    assert groups.rivals(groups.supported()) == []


def test_the_mean_square_over_all_accounts_is_taken_around_the_first() -> None:
    parts = [
        Contrast(estimate=1.0, variance=0.04, degrees=30.0),
        Contrast(estimate=2.0, variance=0.25, degrees=20.0),
    ]
    found = cautious(parts, [1.0, 0.5])
    assert found.estimate == 1.0
    assert found.variance == pytest.approx((0.04 + 0.5 * (0.25 + 1.0)) / 1.5)
    assert found.degrees == 20.0
    assert cautious(parts[:1], [1.0]) == parts[0]


def rarely_bad(rng: np.random.Generator, together: float) -> tuple[list[Factor], np.ndarray]:
    """Eight choices of which the bad option is seldom tried; two matter, and do `together` as well."""
    n = 200
    drawn = rng.choice(["a", "b"], (n, 8), p=[0.88, 0.12])
    frame = pd.DataFrame({f"{PARAM}c{place}": drawn[:, place] for place in range(8)}, dtype=object)
    bad = (drawn[:, :2] == "b").astype(float)
    losses = 3 * bad.sum(axis=1) + together * bad.prod(axis=1) + rng.standard_normal(n)
    found = [factor(f"c{place}", frame, None) for place in range(8)]
    return [entry for entry in found if entry is not None], losses


@pytest.mark.parametrize(("together", "least"), [(0.0, 0.93), (2.0, 0.7)])
def test_a_main_effect_is_not_surer_than_what_is_known_of_its_interactions(together: float, least: float) -> None:
    """An interaction that only a handful of trials could show moves the average over the space; left out without a
    doubt, it leaves half of the intervals wrong.
    """
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(40):
        factors, losses = rarely_bad(rng, together)
        for one in Model(factors, [losses]).mains():
            if one.factor.path in ("c0", "c1") and one.contrast:
                low, high = one.contrast.interval(0.05)
                sign = 1 if one.level.label == "b" else -1
                covered.append(low <= sign * (3 + together / 2) <= high)
    assert np.mean(covered) >= least
