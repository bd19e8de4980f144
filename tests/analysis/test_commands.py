"""Tests of `assay best` and `assay compare` on a store that was written without a search."""

import argparse
import json

import pytest
import synthetic

from analysis.frame import Search
from runners.commands import best
from search_space.errors import UserError
from search_space.records import Metric


def options(uri: str, **given: object) -> argparse.Namespace:
    usual = {"tracking_uri": uri, "json": True, "as_file": False, "by": "loss", "max_params": 0, "name": "quickstart"}
    return argparse.Namespace(**{**usual, **given})


def test_runs_are_compared_at_equal_tokens(uri: str, search: Search, capsys: pytest.CaptureFixture[str]) -> None:
    last = search.curves[search.curves["stage"] == "search"].groupby("number")["tokens"].max()
    short = int(last[last < synthetic.BUDGET].index[0])
    asked = options(uri, command="compare", run="quickstart/0", other=f"quickstart/{short}")
    assert best.run(asked) == 0
    held = json.loads(capsys.readouterr().out)["at_equal_tokens"]
    assert held["tokens"] == last[short]
    readings = search.curves[(search.curves["stage"] == "search") & (search.curves["tokens"] == last[short])]
    losses = readings.set_index("number")["loss"]
    assert held["losses"] == pytest.approx([losses[0], losses[short]])
    asked.json = False
    best.run(asked)
    assert f"validation loss after {last[short]:,} tokens, the most that both read at" in capsys.readouterr().out


def test_the_best_is_the_lowest_within_the_limit(uri: str, search: Search, capsys: pytest.CaptureFixture[str]) -> None:
    limit = int(search.finished[Metric.PARAMS].median())
    best.run(options(uri, command="best", max_params=limit))
    small = search.finished[search.finished[Metric.PARAMS] <= limit]
    assert json.loads(capsys.readouterr().out)["run"] == f"quickstart/{small['number'].iloc[0]}"
    with pytest.raises(UserError, match="raise the limit"):
        best.run(options(uri, command="best", max_params=10))
