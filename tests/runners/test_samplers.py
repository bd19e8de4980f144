"""What samplers promise: points of the space, exactness by seed, learning from every kind of end."""

import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest
from studied import FINITE, experiment, made_up, opened

from runners.evolution import CmaesSampler, Nsga2Sampler, survivors
from runners.history import MOST_SEEN, AbstractSampler, Fate, Told, as_ranges, from_ranges, fronts, rank, select
from runners.samplers import make_sampler
from search_space.domains import FloatRange, IntRange, Scalar
from search_space.errors import UserError
from search_space.experiment import Experiment
from search_space.space import Space, holds, searched

NUMBERS = Space(
    fields={
        "rate": FloatRange(low=1e-4, high=1e-1, default=1e-3, log=True),
        "depth": IntRange(low=1, high=8, default=2),
    }
)


def distance(point: dict[str, Scalar]) -> float:
    """Best at a rate of 0.01 and a depth of 6."""
    rate, depth = point["rate"], point["depth"]
    assert isinstance(rate, float)
    assert isinstance(depth, int)
    return abs(math.log10(rate) + 2) + abs(depth - 6) / 4


TWO = "objectives=[loss, params]"


def told(number: int, point: dict[str, Scalar], *values: float, fate: Fate = Fate.OK) -> Told:
    return Told(number=number, point=point, fate=fate, drawn=True, values=values)


def asks(sampler: str) -> tuple[str, ...]:
    """What makes the small experiment use a sampler."""
    return (f"search.sampler={sampler}", "search.population=4", TWO)[: 3 if sampler == "nsga2" else 2]


def play(sampler: AbstractSampler, count: int, end: Callable[[int, dict[str, Scalar]], Told]) -> list[Told]:
    history: list[Told] = []
    for number in range(count):
        history.append(end(number, next(sampler.draws(number, history))))
    return history


@pytest.mark.parametrize("sampler", ["random", "tpe", "nsga2"])
def test_every_draw_is_a_point_of_the_space_and_depends_on_seed_and_history_alone(sampler: str) -> None:
    small = experiment(*asks(sampler))

    def values(number: int) -> tuple[float, ...]:
        return (float(number % 5), float(-number % 3)) if sampler == "nsga2" else (float(number % 5),)

    def run() -> list[Told]:
        return play(make_sampler(small), 16, lambda number, point: told(number, point, *values(number)))

    first, second = run(), run()
    assert [end.point for end in first] == [end.point for end in second]
    assert all(holds(small.space, end.point) for end in first)


@pytest.mark.parametrize("sampler", ["random", "tpe", "nsga2"])
def test_redraws_of_one_trial_differ(sampler: str) -> None:
    draws = make_sampler(experiment(*asks(sampler))).draws(0, [])
    rates = {point["optimizer.adamw.learning_rate"] for point in itertools.islice(draws, 30)}
    assert len(rates) == 30


def test_tpe_beats_random_draws_and_leaves_a_failing_variant() -> None:
    def end(number: int, point: dict[str, Scalar]) -> Told:
        if point["model.mixer.kind"] == "sliding_window":
            return told(number, point, fate=Fate.BROKEN)
        return told(number, point, distance_of_rate(point))

    late = [told for seed in range(3) for told in play(make_sampler(asks_seed(seed)), 60, end)[-20:]]
    assert sum(end.fate is Fate.BROKEN for end in late) <= 18, "random draws break 30 on average"
    values = [end.values[0] for end in late if end.fate is Fate.OK]
    assert mean(values) < 0.18, "random draws are 0.25 away on average"


def asks_seed(seed: int) -> Experiment:
    return experiment("search.sampler=tpe", f"search.seed={seed}")


def test_running_trials_push_tpe_away() -> None:
    small = experiment("search.sampler=tpe")
    history = play(make_sampler(small), 20, lambda number, point: told(number, point, distance_of_rate(point)))
    alone = [next(make_sampler(small).draws(number, history)) for number in (20, 21, 22, 23)]
    running = [*history]
    for number in (20, 21, 22, 23):
        point = next(make_sampler(small).draws(number, running))
        running.append(told(number, point, fate=Fate.RUNNING))
    assert [end.point for end in running[20:]] != alone


def distance_of_rate(point: dict[str, Scalar]) -> float:
    rate = point["optimizer.adamw.learning_rate"]
    assert isinstance(rate, float)
    return abs(math.log10(rate / 0.003))


def test_pruned_trials_count_by_how_far_they_came() -> None:
    def end(number: int, point: dict[str, Scalar]) -> Told:
        good = point["model.mixer.kind"] == "softmax"
        return Told(
            number=number,
            point=point,
            fate=Fate.PRUNED,
            drawn=True,
            last_tokens=512 if good else 256,
            last_loss=2.0 if good else 1.0,
        )

    late = [told for seed in range(3) for told in play(make_sampler(asks_seed(seed)), 60, end)[-20:]]
    assert sum(end.point["model.mixer.kind"] == "softmax" for end in late) >= 37, "random draws give 30 on average"


def test_cmaes_and_gp_close_in_on_the_optimum() -> None:
    small = experiment("search.sampler=gp", *FIXED)
    path = "optimizer.adamw.learning_rate"
    gp = play(make_sampler(small), 14, lambda number, point: told(number, point, distance_of_rate(point)))
    assert min(end.values[0] for end in gp[10:]) < 0.05
    cmaes = CmaesSampler(space=NUMBERS, seed=1, fields=searched(NUMBERS))
    ends = play(cmaes, 90, lambda number, point: told(number, point, distance(point)))
    assert mean(end.values[0] for end in ends[-20:]) < 0.5 * mean(end.values[0] for end in ends[:20])
    assert all(holds(NUMBERS, end.point) for end in ends)
    assert path in searched(small.space)


FIXED = (
    "model.mixer={softmax: {kv_heads: 1, queries_per_kv: 1, head_dim: 8, qk_norm: none}}",
    "model.position=none",
)


def test_a_cmaes_proposal_is_the_same_after_a_restart_and_unmoved_by_later_blocks() -> None:
    ends = play(CmaesSampler(space=NUMBERS, seed=3, fields=searched(NUMBERS)), 20, lambda n, p: told(n, p, distance(p)))
    again = next(CmaesSampler(space=NUMBERS, seed=3, fields=searched(NUMBERS)).draws(13, ends))
    assert again == ends[13].point


def test_nsga2_moves_the_front_and_keeps_its_spread() -> None:
    def end(number: int, point: dict[str, Scalar]) -> Told:
        depth = point["depth"]
        assert isinstance(depth, int)
        return told(number, point, distance(point), float(depth))

    ends = play(Nsga2Sampler(space=NUMBERS, seed=0, population=12), 120, end)
    first, last = survivors(ends[:12], 12), survivors(ends, 12)
    assert sum(end.values[0] for end in last) < sum(end.values[0] for end in first)
    assert len({end.values[1] for end in fronts(ends)[0]}) >= 4


def test_fronts_put_broken_trials_last() -> None:
    ends = [told(0, {}, 1.0, 2.0), told(1, {}, 2.0, 1.0), told(2, {}, 3.0, 3.0), told(3, {}, fate=Fate.BROKEN)]
    assert [[end.number for end in front] for front in fronts(ends)] == [[0, 1], [2], [3]]


def test_the_history_is_bounded_and_keeps_the_best_and_the_latest() -> None:
    ends = [told(number, {}, float(abs(number - 10))) for number in range(1000)]
    chosen = [end.number for end in select(ends)]
    assert len(chosen) == MOST_SEEN
    assert chosen == sorted(chosen)
    assert 10 in chosen
    assert chosen[-200:] == list(range(800, 1000))
    assert from_ranges(as_ranges(chosen)) == chosen


def test_a_population_beyond_what_a_proposal_sees_is_refused() -> None:
    with pytest.raises(UserError, match="at most 125"):
        make_sampler(experiment("search.sampler=nsga2", "search.population=126", "search.trials=600", TWO))


def test_a_grid_of_too_many_points_is_refused() -> None:
    many = ("model.layers={low: 1, high: 64}", "model.d_model={low: 16, high: 4096, step: 16}")
    rates = "optimizer.adamw.learning_rate={low: 0.001, high: 0.01, step: 0.0001}"
    with pytest.raises(UserError, match="grid would go through"):
        make_sampler(experiment("search.sampler=grid", *many, rates))


def test_grid_suits_the_finite_space() -> None:
    assert len(list(make_sampler(experiment("search.sampler=grid", *FINITE)).draws(0, []))) == 8


@pytest.mark.parametrize("fate", [Fate.BROKEN, Fate.PRUNED])
def test_nsga2_goes_on_when_no_trial_was_ever_ok(fate: Fate) -> None:
    ends = play(Nsga2Sampler(space=NUMBERS, seed=0, population=4), 12, lambda n, p: told(n, p, fate=fate))
    assert all(holds(NUMBERS, end.point) for end in ends)
    assert [end.number for end in survivors(ends, 4)] == [0, 1, 2, 3]
    assert [len(front) for front in fronts(ends)] == [12]


def cmaes(seed: int = 3) -> CmaesSampler:
    return CmaesSampler(space=NUMBERS, seed=seed, fields=searched(NUMBERS))


def test_cmaes_learns_when_the_first_trials_are_no_points_of_the_space() -> None:
    ends = [told(number, next(cmaes().draws(number, [])), float(number)) for number in range(3, 23)]
    unlearned = next(cmaes().draws(40, []))
    assert next(cmaes().draws(40, ends)) != unlearned
    closing: list[Told] = []
    sampler = cmaes(1)
    for number in range(3, 93):
        point = next(sampler.draws(number, closing))
        closing.append(told(number, point, distance(point)))
    assert mean(end.values[0] for end in closing[-20:]) < 0.5 * mean(end.values[0] for end in closing[:20])


def test_a_cmaes_block_waits_for_its_running_trials_alone() -> None:
    ends = play(cmaes(), 18, lambda n, p: told(n, p, distance(p)))
    unlearned = next(cmaes().draws(18, []))
    waiting = [told(2, dict(ends[2].point), fate=Fate.RUNNING) if end.number == 2 else end for end in ends]
    later = [told(17, dict(ends[17].point), fate=Fate.RUNNING) if end.number == 17 else end for end in ends]
    assert next(cmaes().draws(18, waiting)) == unlearned
    learned = next(cmaes().draws(18, later))
    assert learned == next(cmaes().draws(18, ends[:12])) != unlearned


def test_cmaes_learns_beside_a_baseline_outside_the_space(tmp_path: Path) -> None:
    model = "{d_model: 16, layers: 1, mixer: {softmax: {kv_heads: 2, queries_per_kv: 1, head_dim: 8}}, position: none}"
    fixed = (
        "model.mixer={softmax: {kv_heads: 1, queries_per_kv: 1, head_dim: 8, qk_norm: none}}",
        "model.position=none",
        "optimizer.adamw.weight_decay={low: 0.01, high: 0.1}",
        "search.sampler=cmaes",
        f"baseline={{model: {model}}}",
    )
    with opened(tmp_path, *fixed) as study:
        for _ in range(40):
            proposed = study.propose()
            assert proposed is not None
            study.tell(proposed.number, made_up(proposed))
        misses = [distance_of_rate(dict(entry.point)) for entry in study.trials()]
    assert mean(misses[-10:]) < 0.5 * mean(misses[1:13])


@pytest.mark.parametrize("objectives", [1, 2])
def test_the_best_trials_kept_in_order_give_the_selection_that_a_look_at_all_of_them_gives(objectives: int) -> None:
    dice = random.Random(0)
    ends: list[Told] = []
    best: list[Told] = []
    for number in range(4 * MOST_SEEN):
        fate = dice.choice([Fate.OK, Fate.OK, Fate.PRUNED, Fate.BROKEN])
        end = told(number, {}, *(dice.choice([0.5, dice.random()]) for _ in range(objectives)), fate=fate)
        ends.append(end)
        rank(best, end)
        if number % 97 == 0:
            running = [told(number + 1 + more, {}, fate=Fate.RUNNING) for more in range(3)]
            assert select([*ends, *running], best) == select([*ends, *running])
    assert len(best) < MOST_SEEN
