"""What the veto promises: few failures once a cause is known, and never a space that is closed."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import mean

import pytest
from studied import FINITE, broken, made_up, opened, points

from runners.feasibility import MOST_VETOES, Foresight, Vetted
from runners.history import AbstractSampler, Fate, Told, select
from runners.samplers import RandomSampler, sampler_of
from search_space.domains import Choice, FloatRange, IntRange, Scalar
from search_space.space import OneOf, Space

SEEDS = int(os.environ.get("ASSAY_FEASIBILITY_SEEDS", "1"))
"""Searches of each kind; the claim is about 20."""


def choice(*options: Scalar) -> Choice:
    return Choice(options=options, default=options[0])


SPACE = Space(
    fields={
        "rate": FloatRange(low=1e-4, high=1e-1, default=1e-3, log=True),
        "depth": IntRange(low=1, high=16, default=2),
        "mixer": OneOf(
            variants={
                kind: Space(fields={"heads": IntRange(low=1, high=8, default=1), "window": choice(8, 16, 32)})
                for kind in ("a", "b", "c", "d")
            },
            default="a",
        ),
        "position": choice("none", "rotary"),
        "norm": choice("pre", "post"),
        "decay": FloatRange(low=0.0, high=0.3, default=0.1),
    }
)


def number(point: Mapping[str, Scalar], path: str) -> float:
    value = point[path]
    assert isinstance(value, int | float)
    return float(value)


FAILING: dict[str, Callable[[Mapping[str, Scalar]], bool]] = {
    "rates above a threshold": lambda point: math.log10(number(point, "rate")) > -2.5,
    "half of the mixers": lambda point: point["mixer.kind"] in ("a", "b"),
    "rates too high for the depth": lambda point: (
        math.log10(number(point, "rate")) > -1 - number(point, "depth") * 0.19
    ),
    "one of two choices alone": lambda point: (point["position"] == "rotary") != (point["norm"] == "post"),
}
"""Each holds for half of the space; the best points by loss lie there."""


def loss(point: Mapping[str, Scalar]) -> float:
    away = abs(math.log10(number(point, "rate")) + 1.5) + 0.05 * abs(number(point, "depth") - 12)
    return away + 0.2 * (point["mixer.kind"] != "a") + number(point, "decay") + 0.1 * (point["position"] == "none")


def play(
    sampler: AbstractSampler, seed: int, count: int, fails: Callable[[Mapping[str, Scalar]], bool], objectives: int = 1
) -> list[Told]:
    foresight, history = Foresight(SPACE, seed), list[Told]()
    for at in range(count):
        seen = select(history)
        point = next(Vetted(sampler.draws(at, seen), foresight.veto(at, seen)))
        values = (loss(point), number(point, "depth"))[:objectives]
        fate = Fate.BROKEN if fails(point) else Fate.OK
        history.append(Told(number=at, point=point, fate=fate, drawn=True, values=values if fate is Fate.OK else ()))
    return history


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "tpe", "nsga2", "evolution"])
def test_few_of_the_last_suggestions_fail_when_half_of_the_space_does(kind: str) -> None:
    objectives = 2 if kind == "nsga2" else 1
    shares = {}
    for name, fails in FAILING.items():
        ends = [play(sampler_of(kind, SPACE, seed, objectives), seed, 100, fails, objectives) for seed in range(SEEDS)]
        shares[name] = mean(told.fate is Fate.BROKEN for end in ends for told in end[-20:])
    print(kind, shares)
    assert mean(shares.values()) < 0.1, shares


def test_random_draws_keep_off_a_failing_half() -> None:
    history = play(RandomSampler(space=SPACE, seed=1), 1, 60, FAILING["half of the mixers"])
    assert mean(told.fate is Fate.BROKEN for told in history[-20:]) <= 0.1


def ended(count: int, fails: Callable[[Mapping[str, Scalar]], bool]) -> list[Told]:
    sampler = RandomSampler(space=SPACE, seed=0)
    drawn = (next(sampler.draws(at, [])) for at in range(count))
    return [
        Told(number=at, point=point, fate=Fate.BROKEN if fails(point) else Fate.OK, drawn=True, values=())
        for at, point in enumerate(drawn)
    ]


@pytest.mark.parametrize("count", [1, 5, 60])
def test_a_space_in_which_all_fails_stays_open(count: int) -> None:
    history = ended(count, lambda point: True)
    for at in range(count, count + 12):
        vetted = Vetted(RandomSampler(space=SPACE, seed=2).draws(at, history), Foresight(SPACE, 0).veto(at, history))
        next(vetted)
        assert vetted.vetoed < MOST_VETOES


def test_one_trial_in_ten_looks_again_where_a_failure_was_bad_luck() -> None:
    unlucky = ended(40, lambda point: False)
    history = [*unlucky[:-1], Told(number=39, point=unlucky[-1].point, fate=Fate.BROKEN, drawn=True)]
    vetoes = [Foresight(SPACE, 0).veto(at, history)(unlucky[-1].point) for at in range(40, 70)]
    assert not all(vetoes)


def test_causes_that_act_each_on_their_own_are_all_found() -> None:
    def fails(point: Mapping[str, Scalar]) -> bool:
        causes = (point["mixer.kind"] == "a", point["norm"] == "post", number(point, "rate") > 0.03)
        return any(causes) or number(point, "depth") > 14

    veto = Foresight(SPACE, 0).veto(251, ended(120, fails))
    fresh = RandomSampler(space=SPACE, seed=7)
    drawn = [next(fresh.draws(at, [])) for at in range(400)]
    assert mean(fails(point) for point in drawn if not veto(point)) < 0.1, "of all points 0.7 fail"
    assert mean(veto(point) for point in drawn if not fails(point)) < 0.25


def test_a_veto_depends_on_its_arguments_alone() -> None:
    history = ended(60, FAILING["rates too high for the depth"])
    others = [told.point for told in ended(100, lambda point: False)]
    veto = Foresight(SPACE, 0).veto(70, history)
    first = [veto(point) for point in others]
    used = Foresight(SPACE, 0)
    used.veto(71, history[:30])(others[0])
    again = used.veto(70, history)
    assert [again(point) for point in others] == first
    assert 20 < sum(first) < 80


def test_vetoed_draws_end_after_a_bound() -> None:
    def ones() -> Iterator[dict[str, Scalar]]:
        while True:
            yield {"one": 1}

    vetted = Vetted(ones(), lambda point: True)
    assert next(vetted) == {"one": 1}
    assert vetted.counted() == {"vetoed": MOST_VETOES}


def test_a_study_records_its_vetoes_and_leaves_the_failing_variant(tmp_path: Path) -> None:
    with opened(tmp_path, "search.sampler=random") as study:
        for _ in range(24):
            proposed = study.propose()
            assert proposed is not None
            bad = proposed.resolved.flat["model.mixer.kind"] == "softmax"
            study.tell(proposed.number, broken() if bad else made_up(proposed))
        kinds = [point["model.mixer.kind"] for point in points(study)]
        vetoed = [entry.marks["redraws"].get("vetoed", 0) for entry in study.trials()]
    assert "softmax" in kinds
    assert kinds[-12:].count("softmax") <= 2
    assert sum(vetoed) >= 5


def test_what_is_vetoed_is_tried_last_when_the_space_is_finite(tmp_path: Path) -> None:
    with opened(tmp_path, "search.sampler=random", *FINITE) as study:
        while (proposed := study.propose()) is not None:
            bad = proposed.resolved.flat["model.mixer.kind"] == "softmax"
            study.tell(proposed.number, broken() if bad else made_up(proposed))
        assert len(study.trials()) == 8


def test_every_point_of_a_grid_is_tried_whatever_fails(tmp_path: Path) -> None:
    with opened(tmp_path, "search.sampler=grid", *FINITE) as study:
        while (proposed := study.propose()) is not None:
            study.tell(proposed.number, broken())
        assert len(study.trials()) == 8


def test_the_small_experiment_is_vetoed_alike_after_a_restart(tmp_path: Path) -> None:
    found = []
    for folder, stops in ((tmp_path / "whole", 0), (tmp_path / "stopped", 3)):
        folder.mkdir()
        study = opened(folder, "search.sampler=random")
        for at in range(12):
            if stops and at % stops == 0:
                study.close()
                study = opened(folder, "search.sampler=random")
            proposed = study.propose()
            assert proposed is not None
            bad = proposed.resolved.flat["model.position.kind"] == "none"
            study.tell(proposed.number, broken() if bad else made_up(proposed))
        found.append((points(study), [entry.marks["redraws"] for entry in study.trials()]))
        study.close()
    assert found[0] == found[1]
