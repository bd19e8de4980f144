"""Tests of analysis/advice.py on searches that ask for something."""

import dataclasses

import numpy as np
import pandas as pd
import synthetic

from analysis.advice import next_steps
from analysis.effects import main_effects
from analysis.frame import PARAM, Search
from search_space.records import Metric


def test_a_learning_rate_whose_best_lie_at_an_end_is_to_be_widened(search: Search) -> None:
    assert not [line for line in next_steps(search, main_effects(search)) if line.startswith("Widen")]
    frame = search.frame.copy()
    rates = frame[f"{PARAM}{synthetic.RATE}"].astype(float)
    frame[f"{PARAM}{synthetic.RATE}"] = (2e-2 - rates / 1e3).astype(object)
    moved = dataclasses.replace(search, frame=frame)
    (line,) = [line for line in next_steps(moved, main_effects(moved)) if line.startswith("Widen")]
    assert line.startswith("Widen learning_rate: the best 5 trials lie at its upper end, 0.02")


def test_options_with_too_few_trials_ask_for_more(search: Search) -> None:
    found = main_effects(search)
    rare = dataclasses.replace(found.rows[0], option="rare", n=1, claim="too few")
    lines = next_steps(search, dataclasses.replace(found, rows=(*found.rows, rare)))
    assert any("rare 2 more trials: 1 so far, 3 are needed" in line for line in lines)


def test_the_best_options_that_never_met_are_named(search: Search) -> None:
    n = 120
    rng = np.random.default_rng(0)
    one, two = rng.choice(["a", "b"], n), rng.choice(["x", "y"], n)
    two = np.where(one == "b", "x", two)
    losses = 1 - 0.3 * (one == "b") - 0.3 * (two == "y") + 0.01 * rng.standard_normal(n)
    frame = pd.DataFrame(
        {
            "run_id": [str(place) for place in range(n)],
            "number": range(n),
            "stage": "search",
            "status": "ok",
            "is_baseline": False,
            Metric.LOSS: losses,
            f"{PARAM}model.one.kind": one,
            f"{PARAM}model.two.kind": two,
        }
    )
    curves = frame[["run_id", Metric.LOSS]].assign(tokens=100)
    parent = dataclasses.replace(search.parent, experiment={"budget": {"tokens": 100}})
    made = dataclasses.replace(search, frame=frame, curves=curves, parent=parent)
    lines = next_steps(made, main_effects(made))
    assert "Try one b, two y together: each is the better option, and no trial held all of them." in lines
