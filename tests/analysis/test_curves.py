"""Tests of analysis/curves.py."""

import pytest
import synthetic

from analysis import curves
from analysis.frame import Search
from search_space.records import Metric


def test_nearly_all_trained_trials_reached_the_common_tokens(search: Search) -> None:
    tokens = curves.common_tokens(search)
    trained = search.trials[search.trials["status"].isin(["ok", "pruned"])]
    assert tokens > 0
    assert len(curves.loss_at(search, tokens)) >= 0.9 * len(trained)
    later = curves.loss_at(search, tokens + synthetic.EVERY)
    assert len(later) < 0.9 * len(trained)


def test_loss_at_the_whole_budget_is_the_final_loss(search: Search) -> None:
    final = search.finished.set_index("run_id")[Metric.LOSS]
    at_end = curves.loss_at(search, synthetic.BUDGET)
    assert at_end.to_dict() == pytest.approx(final.to_dict())
    assert curves.rank_agreement(search, synthetic.BUDGET) == (pytest.approx(1.0), len(final))
    assert curves.loss_at(search, 0).empty
