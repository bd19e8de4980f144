"""What is done for a large search grows in numpy and in a few requests, never by a call of pandas for each trial."""

import cProfile
import json
import pstats
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
import synthetic

from analysis import curves, landscape
from analysis.assembling import assemble
from analysis.fastread import RunRow
from analysis.frame import Search
from analysis.leaderboard import leaderboard
from analysis.report import charts, estimates
from search_space.records import Metric, Stage, Status, Tag


def rows(trials: int) -> list[RunRow]:
    """A parent and so many finished trials, as a store gives them."""
    rng = np.random.default_rng(0)
    heads = {"state": "FINISHED", "start": 1.0, "end": 2.0, "artifact_uri": "/nowhere/artifacts", "experiment_id": "1"}
    found = [
        RunRow(run_id="0" * 32, name="large", search="large", params={}, metrics={}, tags={Tag.KIND: "search"}, **heads)
    ]
    for number in range(trials):
        flat = synthetic.draw(rng)
        status = Status.DIVERGED if rng.random() < 0.1 else Status.OK
        metrics = {Metric.TOKENS: 4096.0, **synthetic.cost(flat)}
        if status == Status.OK:
            metrics[Metric.LOSS] = synthetic.planted(flat) + 0.01 * rng.standard_normal()
        found.append(
            RunRow(
                run_id=f"{number + 1:032x}",
                name=f"{number:03d}",
                search="large",
                params={path: str(value) for path, value in flat.items()},
                metrics=metrics,
                tags={Tag.KIND: "trial", Tag.NUMBER: str(number), Tag.STAGE: Stage.SEARCH, Tag.STATUS: status},
                **heads,
            )
        )
    return found


def search_of(trials: int, monkeypatch: pytest.MonkeyPatch) -> Search:
    monkeypatch.setattr("analysis.load.artifact", lambda *_: None)
    found, _ = assemble("sqlite:///nowhere.db", "large", rows(trials))
    ids = found.trials["run_id"]
    table = pd.DataFrame({"run_id": np.repeat(ids, 2), "tokens": np.tile([2048, 4096], len(ids))})
    table["loss"] = found.trials.set_index("run_id")[Metric.LOSS].reindex(table["run_id"]).to_numpy()
    table = table.assign(train_loss=table["loss"], seconds=1.0, number=0, stage=str(Stage.SEARCH))
    return Search(uri=found.uri, name=found.name, frame=found.frame, curves=table, parent=found.parent)


def pandas_calls(work: Callable[[], object]) -> int:
    """How many functions of pandas a piece of work calls."""
    profile = cProfile.Profile()
    profile.runcall(work)
    counted = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    return sum(calls for (file, _, _), (_, calls, *_) in counted.items() if "/pandas/" in file)


@pytest.mark.parametrize(
    "work",
    [
        lambda search: search.described,
        lambda search: search.options,
        leaderboard,
        curves.common_tokens,
        landscape.pairs,
        charts.rates_chart,
        charts.front_chart,
        estimates.failures_chart,
    ],
    ids=["described", "options", "leaderboard", "common_tokens", "pairs", "rates_chart", "front_chart", "failures"],
)
def test_twice_the_trials_take_no_more_calls_of_pandas(
    work: Callable[[Search], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (search_of(trials, monkeypatch) for trials in (150, 300))
    assert pandas_calls(lambda: work(many)) <= 1.2 * pandas_calls(lambda: work(few)) + 20


def test_rows_become_a_frame_without_a_call_of_pandas_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("analysis.load.artifact", lambda *_: None)
    few, many = rows(150), rows(300)
    taken = [pandas_calls(lambda held=held: assemble("sqlite:///nowhere.db", "large", held)) for held in (few, many)]
    assert taken[1] <= 1.2 * taken[0] + 20


def test_a_page_of_a_large_search_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "MOST_POINTS", 100)
    monkeypatch.setattr(charts, "MOST_CURVES", 50)
    found = search_of(400, monkeypatch)
    assert len(charts.rates_chart(found)["items"]) <= 101
    assert len(charts.front_chart(found)["items"]) <= 101
    assert len(charts.curves_chart(found)["items"]) <= 51
    assert len(json.dumps(charts.curves_chart(found))) < 100_000
