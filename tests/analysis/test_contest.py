"""Tests of analysis/contest.py: who meets, what is trained next, and when a contest is over."""

import importlib.util
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from analysis.contest import MOST_FAILURES, candidates, counted, finalists, next_bout, tuned, verdict_on
from search_space.contest import BASELINE, Bout, Contest, Ranked
from search_space.records import Stage
from search_space.settings import ContestSpec

ROOT = Path(__file__).parents[2]
Losses = Callable[[Bout], float]


def contest(finalists: int = 2, *, reach: tuple[int, int] = (-9, 9), **settings: float) -> Contest:
    return Contest(spec=ContestSpec(top=finalists, **settings), reach=(reach,) * (finalists + 1))  # type: ignore[arg-type]


def played(held: Contest, losses: Losses, *, jobs: int = 1) -> tuple[dict[Bout, float], list[Bout]]:
    """Everything that is trained, and in which order it was begun; the oldest of those that run ends first."""
    ended: dict[Bout, float] = {}
    running: list[Bout] = []
    order: list[Bout] = []
    while True:
        while len(running) < jobs and (bout := next_bout(held, ended, running)) is not None:
            running.append(bout)
            order.append(bout)
        if not running:
            return ended, order
        bout = running.pop(0)
        ended[bout] = losses(bout)


def apart(gaps: tuple[float, ...], best: int = 0) -> Losses:
    """Contestant k loses by gaps[k] nats, a little differently in each replica; the best rates lie at a place."""

    def loss(bout: Bout) -> float:
        if bout.stage is Stage.SWEEP:
            return abs(bout.place - best) / 10
        wobble = 0.01 * math.sin(1 + 7 * bout.place + bout.contestant)
        return gaps[bout.contestant] + wobble + 0.3 * math.cos(bout.place)

    return loss


def test_the_best_trials_meet_the_baseline_once_each_whatever_their_learning_rates() -> None:
    ranked = [
        Ranked(number=0, loss=1.0, identity="base"),
        Ranked(number=1, loss=0.9, identity="a"),
        Ranked(number=2, loss=0.8, identity="b"),
        Ranked(number=3, loss=0.7, identity="a"),
        Ranked(number=4, loss=0.6, identity="base"),
        Ranked(number=5, loss=1.1, identity="c"),
        Ranked(number=6, loss=math.nan, identity="d"),
    ]
    assert candidates(ranked, 5, "base") == [3, 2, 5]
    assert candidates(ranked, 2, "base") == [3, 2]
    assert candidates([], 2, "base") == []


def crowded(searched: tuple[float, ...], **settings: float) -> Contest:
    """Two places for four candidates."""
    return Contest(spec=ContestSpec(top=2, **settings), reach=((-9, 9),) * 5, searched=searched)  # type: ignore[arg-type]


def test_those_enter_that_are_best_over_the_search_and_one_more_training() -> None:
    held = crowded((1.0, 1.1, 1.2, 1.3))
    again = (2.0, 1.2, 1.0, 1.9)
    tried = {Bout(Stage.SWEEP, 1 + k, 0): loss for k, loss in enumerate(again)}
    for bout in tried:
        assert finalists(held, {other: loss for other, loss in tried.items() if other != bout}) == ()
    assert finalists(held, tried) == (2, 3)
    assert finalists(held, {**tried, Bout(Stage.SWEEP, 2, 0): math.nan}) == (1, 3)
    assert held.share == 0.025


def test_candidates_without_a_place_get_one_training_and_the_others_all_of_theirs() -> None:
    held = crowded((1.0, 1.1, 1.2, 1.3), max_seeds=4)
    gaps = (0.0, 0.3, -0.2, -0.1, 0.4)
    for jobs in (1, 3):
        ended, order = played(held, lambda bout: gaps[bout.contestant] + apart((0.0,) * 5)(bout), jobs=jobs)
        assert finalists(held, ended) == (2, 3)
        assert set(order[:4]) == {Bout(Stage.SWEEP, k, 0) for k in (1, 2, 3, 4)}
        for candidate, swept in ((1, 1), (2, 5), (3, 5), (4, 1)):
            mine = [bout.stage for bout in order if bout.contestant == candidate]
            assert mine.count(Stage.SWEEP) == swept
            assert (Stage.FINAL in mine) == (swept > 1)
        assert len(order) == len(set(order))


def test_sweeps_come_first_and_have_the_own_rate_in_their_middle() -> None:
    _, order = played(contest(), apart((0.0, -0.2, 0.0)))
    stages = [bout.stage for bout in order]
    assert stages == sorted(stages, key=lambda stage: stage is Stage.FINAL)
    swept = [(bout.contestant, bout.place) for bout in order if bout.stage is Stage.SWEEP]
    assert swept == list(itertools.product(range(3), range(-2, 3)))


def test_replicas_go_where_nothing_is_decided_and_end_at_the_cap() -> None:
    held = contest(max_seeds=8)
    ended, order = played(held, apart((0.0, -0.2, 0.0)))
    finals = [bout for bout in order if bout.stage is Stage.FINAL]
    counts = [sum(bout.contestant == k for bout in finals) for k in range(3)]
    assert counts == [8, 3, 8]
    assert verdict_on(held, ended, 1).kind == "better"
    assert verdict_on(held, ended, 2).kind == "undecided"
    assert len(set(finals)) == len(finals)


def test_what_is_equal_within_the_margin_gets_no_more_seeds() -> None:
    held = contest(1, max_seeds=30, delta=0.05)
    ended, order = played(held, apart((0.0, 0.0)))
    assert verdict_on(held, ended, 1).kind == "equal"
    assert sum(bout.contestant == 1 and bout.stage is Stage.FINAL for bout in order) < 10


def test_the_level_is_shared_out_over_the_finalists() -> None:
    assert contest(5, alpha=0.05).share == pytest.approx(0.01)


@pytest.mark.parametrize(("best", "last", "doubt"), [(0, 2, False), (2, 4, False), (3, 4, False), (9, 4, True)])
def test_a_best_rate_at_the_end_extends_the_sweep_once(best: int, last: int, doubt: bool) -> None:
    held = contest(1)
    ended, order = played(held, apart((0.0, -0.2), best))
    places = sorted(bout.place for bout in order if bout.stage is Stage.SWEEP and bout.contestant == 1)
    assert places == list(range(-2, last + 1))
    found = tuned(held, ended, 1)
    assert (found.is_over, found.place, bool(found.doubt)) == (True, min(best, last), doubt)


def test_a_sweep_stays_within_the_reach_of_the_rate() -> None:
    held = contest(1, reach=(-1, 2))
    ended, order = played(held, apart((0.0, -0.2), -3))
    assert sorted({bout.place for bout in order if bout.stage is Stage.SWEEP}) == [-1, 0, 1, 2]
    assert tuned(held, ended, 1).doubt.startswith("not tuned")


def test_without_a_sweep_finals_begin_at_once_at_the_own_rate() -> None:
    held = contest(1, sweep=0)
    _, order = played(held, apart((0.0, -0.2)))
    assert {bout.stage for bout in order} == {Stage.FINAL}
    assert tuned(held, {}, 1) == tuned(held, {}, BASELINE)


def test_a_pair_that_is_early_waits_for_those_before_it() -> None:
    ended = {Bout(Stage.FINAL, side, replica): 1.0 * side for side in (0, 1) for replica in (0, 1, 3)}
    assert [replica for replica, _, _ in counted(ended, 1, 10)] == [0, 1]
    ended[Bout(Stage.FINAL, 0, 2)] = math.nan
    ended[Bout(Stage.FINAL, 1, 2)] = 1.0
    assert [replica for replica, _, _ in counted(ended, 1, 10)] == [0, 1, 3]


def test_a_finalist_that_keeps_failing_gets_no_more_seeds() -> None:
    base = apart((0.0, 0.0))
    held = contest(1, max_seeds=10)
    _, order = played(held, lambda bout: math.nan if bout[:2] == (Stage.FINAL, 1) else base(bout))
    assert sum(bout[:2] == (Stage.FINAL, 1) for bout in order) == MOST_FAILURES
    ended, order = played(held, lambda bout: math.nan if bout[:2] == (Stage.SWEEP, 1) else base(bout))
    assert not any(bout.stage is Stage.FINAL for bout in order)
    assert tuned(held, ended, 1).doubt == "not tuned: no rate of its sweep ended well"


def test_several_jobs_train_no_more_kinds_of_things_and_come_to_the_same_verdicts() -> None:
    held = contest(2, max_seeds=8)
    one, _ = played(held, apart((0.0, -0.2, 0.0)))
    many, order = played(held, apart((0.0, -0.2, 0.0)), jobs=4)
    assert len(order) == len(set(order)) == len(many)
    assert [verdict_on(held, many, k).kind for k in (1, 2)] == [verdict_on(held, one, k).kind for k in (1, 2)]
    assert one.items() <= many.items()


def test_what_comes_next_depends_on_what_has_ended_alone() -> None:
    held, losses = contest(2, max_seeds=6), apart((0.0, -0.05, 0.0))
    ended, order = played(held, losses)
    for cut in range(len(order)):
        known = dict(itertools.islice(ended.items(), cut))
        assert next_bout(held, dict(reversed(known.items())), ()) == order[cut]
    assert next_bout(held, ended, ()) is None


def simulations() -> ModuleType:
    """benchmarks/verdicts.py."""
    spec = importlib.util.spec_from_file_location("simulated_verdicts", ROOT / "benchmarks" / "verdicts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["normal", "t3", "unequal"])
def test_simulated_searches_are_judged_as_promised(kind: int) -> None:
    module = simulations()
    found = module.measure(module.NOISES[kind], 200, hunts=100, twenty=6)
    assert found.false_winners <= 0.05, found.line()
    assert found.plain.found >= 0.80, found.line()
    assert found.tuned.found >= 0.80, found.line()
    assert found.mean_seeds <= 10, found.line()
    assert found.coverage >= 0.95, found.line()


def test_a_baseline_that_breaks_every_time_ends_the_contest() -> None:
    def broken(bout: Bout) -> float:
        return math.nan if bout.contestant == BASELINE and bout.stage is Stage.FINAL else 1.0

    _, order = played(contest(), broken)
    finals = [bout for bout in order if bout.stage is Stage.FINAL and bout.contestant == BASELINE]
    assert len(finals) == MOST_FAILURES

    def never_tuned(bout: Bout) -> float:
        return math.nan if bout.contestant == BASELINE else 1.0

    _, order = played(contest(), never_tuned)
    assert [bout for bout in order if bout.stage is Stage.FINAL] == []
