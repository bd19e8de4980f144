"""An experiment survives storing, shows what was edited, and can be written out one candidate at a time."""

import json
import random

import pytest
from toy_space import SMALL, TASKS, load, toy_space

from search_space.experiment import ContestSpec, as_file, difference, from_plain
from search_space.space import default_point, random_point, size


def test_an_experiment_comes_back_from_its_plain_form() -> None:
    experiment = load(
        SMALL
        + "model: {size: {params: 130k}, layers: {low: 2, high: 8, log: true}, pattern: [uniform, every_nth]}\n"
        + "baseline: {model: {layers: 9}}\nmax_hours: 2\nlimits: {max_params: 1M}\n"
        + "final: {contrasts: {a: {model.mixer: linear}}, top: 3, delta: 0.01, sweep: 3, alpha: 0.01}\n",
        "search.trials=7",
    )
    plain = json.loads(json.dumps(experiment.plain(), allow_nan=False))
    again = from_plain(plain, toy_space, TASKS)
    assert again.plain() == experiment.plain()
    assert again.space.id == experiment.space.id
    assert again.identity() == experiment.identity()
    assert again.final.contest == ContestSpec(top=3, delta=0.01, sweep=3, alpha=0.01)
    assert again.changed(again.baseline, again.final.contrasts[0]) == experiment.changed(
        experiment.baseline, experiment.final.contrasts[0]
    )
    with pytest.raises(ValueError, match="is no known task"):
        from_plain(plain, toy_space, {"other": TASKS["copying"]})


@pytest.mark.parametrize(
    "more",
    [
        "search: {trials: 99}",
        "final: {seeds: 9}",
        "final: {top: 0}",
        "engine: {jobs: 9}",
        "max_hours: 3",
        "max_tokens: 1B",
        "description: other words",
        "# only a comment",
        "model: {}",
    ],
)
def test_what_only_says_how_long_or_how_wide_leaves_the_identity_alone(more: str) -> None:
    assert difference(load(SMALL).identity(), load(SMALL + more).identity()) == []


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("search: {seed: 5}", "search.seed: 0 -> 5"),
        ("search: {sampler: random}", "search.sampler: tpe -> random"),
        ("engine: {threads: 2}", "engine.threads: 1 -> 2"),
        ("model: {layers: [2, 4]}", "model.layers: 1 to 64 -> 2 or 4"),
        ("model: {tied: false}", "model.tied: true or false -> false"),
        ("model: {pattern: [uniform, every_nth]}", "model.pattern: uniform -> every_nth, uniform"),
        ("limits: {max_params: 1M}", "limits.max_params: absent -> 1000000.0"),
        ("final: {contrasts: {chance: {}}}", "final.contrasts.chance: absent -> nothing"),
    ],
)
def test_every_other_edit_is_shown_with_old_and_new(more: str, line: str) -> None:
    lines = difference(load(SMALL).identity(), load(SMALL + more).identity())
    assert line in lines


def test_an_identity_is_json_and_stable_over_readings() -> None:
    first, second = load(SMALL).identity(), load(SMALL).identity()
    assert json.dumps(first, allow_nan=False) == json.dumps(second)
    assert difference(json.loads(json.dumps(first)), second) == []


@pytest.mark.parametrize("target", ["", "model: {size: {params: 130k}, pattern: [uniform, every_nth]}\n"])
def test_a_candidates_file_holds_that_point_alone(target: str) -> None:
    experiment = load(SMALL + target + "limits: {max_params: 1M}\nengine: {device: cpu}\n")
    rng = random.Random(0)
    for _ in range(20):
        point = random_point(experiment.space, rng)
        again = load(as_file(point, experiment))
        assert size(again.space) == 1
        assert default_point(again.space) == point
        assert (again.size, again.limits, again.task, again.budget) == (
            experiment.size,
            experiment.limits,
            experiment.task,
            experiment.budget,
        )
    assert load(as_file(point, experiment, name="winner")).name == "winner"
