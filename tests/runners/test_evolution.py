"""What regularised evolution promises: one change at a time, death by age, and good points of a structured space."""

import itertools
from collections.abc import Mapping
from statistics import mean

import pytest
from test_feasibility import SPACE, loss, number

from runners.evolution import EvolutionSampler
from runners.history import Fate, Told, select
from runners.samplers import sampler_of
from search_space.domains import Scalar
from search_space.space import holds


def planted(point: Mapping[str, Scalar]) -> float:
    """The loss of the failing spaces, with an interaction of two choices and fields that count in one variant each."""
    variant = f"mixer.{point['mixer.kind']}"
    found = loss(point) + 0.3 * ((point["position"] == "rotary") != (point["norm"] == "pre"))
    return found + 0.02 * abs(number(point, f"{variant}.heads") - 6) + 0.1 * (point[f"{variant}.window"] != 16)


def play(kind: str, seed: int, count: int, population: int = 20) -> list[Told]:
    sampler, history = sampler_of(kind, SPACE, seed, 1, population), list[Told]()
    for at in range(count):
        point = next(sampler.draws(at, select(history)))
        history.append(Told(number=at, point=point, fate=Fate.OK, drawn=True, values=(planted(point),)))
    return history


def evolution(population: int = 8) -> EvolutionSampler:
    return EvolutionSampler(space=SPACE, seed=3, population=population)


def best(history: list[Told]) -> float:
    return min(told.values[0] for told in history)


def test_evolution_beats_random_draws_on_a_structured_problem() -> None:
    evolved = mean(best(play("evolution", seed, 100)) for seed in range(5))
    assert evolved < 0.7 * mean(best(play("random", seed, 100)) for seed in range(5))


@pytest.mark.slow
def test_evolution_is_as_good_as_tpe_on_a_structured_problem() -> None:
    evolved = mean(best(play("evolution", seed, 100)) for seed in range(20))
    assert evolved < 1.3 * mean(best(play("tpe", seed, 100)) for seed in range(3))


def test_a_child_differs_from_a_living_trial_in_one_place() -> None:
    history = play("evolution", 1, 20, population=8)
    sampler = evolution()
    for at in range(20, 60):
        child = next(sampler.draws(at, history))
        assert holds(SPACE, child)
        assert any(one_place(told.point, child) for told in history[-8:])


def one_place(parent: Mapping[str, Scalar], child: Mapping[str, Scalar]) -> bool:
    """True when one field differs, or the variant alone: fields of both variants keep their values."""
    if parent["mixer.kind"] == child["mixer.kind"]:
        return sum(parent[path] != child[path] for path in parent) == 1
    return all(child[path.replace(f".{parent['mixer.kind']}.", f".{child['mixer.kind']}.")] == value
               for path, value in parent.items() if path != "mixer.kind")  # fmt: skip


def test_old_trials_die_however_good() -> None:
    history = play("random", 1, 20)
    best_ever = [Told(number=-1, point=history[0].point, fate=Fate.OK, drawn=True, values=(-9.0,)), *history]
    for at in range(20, 40):
        assert next(evolution().draws(at, best_ever)) == next(evolution().draws(at, history))


def test_broken_trials_have_children_only_where_their_whole_tournament_broke() -> None:
    drawn = play("random", 1, 8)
    history = [
        told if told.number == 5 else Told(number=told.number, point=told.point, fate=Fate.BROKEN, drawn=True)
        for told in drawn
    ]
    children = [next(EvolutionSampler(space=SPACE, seed=3, population=8).draws(at, history)) for at in range(8, 48)]
    assert mean(one_place(drawn[5].point, child) for child in children) > 0.35, "one in eight if all were equal"


def test_redraws_leave_the_neighbourhood_in_time() -> None:
    history = play("evolution", 1, 20, population=8)
    draws = list(itertools.islice(evolution().draws(20, history), 100))
    assert len({tuple(point.items()) for point in draws}) > 60
    assert not any(one_place(told.point, draws[-1]) for told in history[-8:])


def test_a_proposal_depends_on_seed_number_and_history_alone() -> None:
    history = play("evolution", 1, 30)
    assert [told.point for told in play("evolution", 1, 30)] == [told.point for told in history]
    assert next(sampler_of("evolution", SPACE, 1, 1, 20).draws(29, history[:29])) == history[29].point
