"""What pruning with several objectives promises: compute is saved and the front is not."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
from studied import experiment, made_up, opened, points, uri

from runners.history import Fate, layers
from runners.pruning import AbstractPruner, Asha, Hyperband
from runners.search import run_search
from runners.study import Study
from runners.tracking import Tracker
from search_space.records import Reading, Status, TrialResult

BUDGET = 1600


def hypervolume(values: Sequence[tuple[float, float]], corner: tuple[float, float]) -> float:
    """The area between a front of two minimised values and a corner beyond it."""
    area, height = 0.0, corner[1]
    for first, second in sorted(values):
        if first < corner[0] and second < height:
            area += (corner[0] - first) * (height - second)
            height = second
    return area


def simulated(pruner: AbstractPruner, seed: int, trials: int) -> tuple[dict[int, tuple[float, float]], int]:
    """The (loss, latency) of trials that finished, and how many tokens all took; slower models end lower."""
    rng = random.Random(seed)
    finished, spent = {}, 0
    for number in range(trials):
        latency = math.exp(rng.uniform(0.0, 2.0))
        final = 2.0 + 1.5 / latency + rng.expovariate(2.0)
        height, power = rng.uniform(1.0, 3.0), rng.uniform(0.8, 1.2)
        for tokens in range(100, BUDGET + 1, 100):
            spent += 100
            loss = final + height * ((100 / tokens) ** power - (100 / BUDGET) ** power) + rng.gauss(0.0, 0.02)
            if pruner.wants(number, tokens):
                pruner.observe(number, tokens, loss, latency)
                if not pruner.goes_on(number, tokens):
                    break
        else:
            finished[number] = (final, latency)
    return finished, spent


@pytest.mark.parametrize(
    "make",
    [
        lambda: Asha(grace_tokens=200, factor=2, budget_tokens=BUDGET),
        lambda: Hyperband(grace_tokens=200, factor=2, budget_tokens=BUDGET),
    ],
    ids=["asha", "hyperband"],
)
def test_the_front_of_a_pruned_search_is_that_of_an_unpruned_one(make: type) -> None:
    kept, saved = [], []
    for seed in range(10):
        pruned, spent = simulated(make(), seed, 80)
        every, whole = simulated(Asha(grace_tokens=BUDGET, factor=2, budget_tokens=BUDGET), seed, 80)
        assert len(every) == 80
        corner = (6.0, math.exp(2.0))
        kept.append(hypervolume(list(pruned.values()), corner) / hypervolume(list(every.values()), corner))
        saved.append(1 - spent / whole)
    print(f"hypervolume kept {mean(kept):.4f} (least {min(kept):.4f}), compute saved {mean(saved):.2f}")
    assert mean(kept) >= 0.98, "curves cross and are noisy: a single search may lose more"
    assert mean(saved) >= 0.2


TWO = ("objectives=[loss, tokens_per_second]", "search.pruner={asha: {grace_tokens: 256, factor: 2}}")


def test_speed_on_the_way_decides_at_rungs_and_is_stored_with_the_reading(tmp_path: Path) -> None:
    def reading(loss: float, seconds: float) -> Reading:
        return Reading(tokens=256, loss=loss, train_loss=1.0, seconds=seconds)

    with opened(tmp_path, *TWO, "search.sampler=tpe") as study:
        for _ in range(4):
            study.propose()
        assert study.report(0, reading(2.0, 1.0))
        assert study.report(1, reading(3.0, 0.5)), "worse, but faster than any"
        assert not study.report(2, reading(3.5, 0.7)), "beaten by trial 1"
    with opened(tmp_path, *TWO, "search.sampler=tpe") as study:
        assert study.trials()[1].speeds == {256: 512.0}
        assert not study.report(2, reading(3.5, 0.7))
        assert not study.report(3, reading(3.4, 0.6))
        assert study.report(3, reading(3.4, 0.4))


@pytest.mark.parametrize("sampler", ["tpe", "nsga2", "random", "evolution"])
def test_pruned_trials_of_two_objectives_inform_the_sampler(tmp_path: Path, sampler: str) -> None:
    asked = (*TWO, f"search.sampler={sampler}", "search.population=4")
    with opened(tmp_path, *asked) as study:
        for at in range(14):
            proposed = study.propose()
            assert proposed is not None
            found = made_up(proposed)
            pruned = TrialResult(status=Status.PRUNED, metrics={"tokens_per_second": 9.0}, curve=found.curve[:2])
            study.tell(proposed.number, pruned if at % 3 == 1 else found)
        history = study.told()
        proposed_points = points(study)
    assert [told.fate for told in history[:3]] == [Fate.OK, Fate.PRUNED, Fate.OK]
    assert history[1].values == (history[1].last_loss, -9.0)
    again = tmp_path / "again"
    again.mkdir()
    with opened(again, *asked) as study:
        for at in range(14):
            proposed = study.propose()
            assert proposed is not None
            found = made_up(proposed)
            pruned = TrialResult(status=Status.PRUNED, metrics={"tokens_per_second": 9.0}, curve=found.curve[:2])
            study.tell(proposed.number, pruned if at % 3 == 1 else found)
        assert points(study) == proposed_points


@pytest.mark.slow
def test_a_real_search_prunes_and_keeps_its_front(tmp_path: Path) -> None:
    """Loss and parameters, so that both runs train the same numbers; the same points, since draws are random."""
    found: dict[str, list[tuple[float, float]]] = {}
    counts: dict[str, int] = {}
    for pruner in ("none", "{asha: {grace_tokens: 256, factor: 2}}"):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        asked = ("objectives=[loss, params]", "search.sampler=random", "search.trials=16", f"search.pruner={pruner}")
        small = experiment(*asked, "model.layers=[1, 2]", "model.d_model=[16, 32, 48]")
        run_search(small, tracker=Tracker(f"sqlite:///{folder}/mlflow.db"), study_uri=uri(folder))
        with Study.open(uri(folder), small) as study:
            ended = [(entry.result, entry.cost["params"]) for entry in study.trials() if entry.result is not None]
        found[pruner] = [(result.metrics["loss"], params) for result, params in ended if result.status is Status.OK]
        counts[pruner] = sum(result.status is Status.PRUNED for result, _ in ended)
    every, pruned = found.values()
    corner = (max(loss for loss, _ in every) + 0.1, max(params for _, params in every) + 1.0)
    print("pruned", counts, hypervolume(pruned, corner) / hypervolume(every, corner))
    assert list(counts.values())[1] >= 2
    assert hypervolume(pruned, corner) >= 0.98 * hypervolume(every, corner)


def test_layers_are_fronts_of_rows() -> None:
    assert layers(np.array([[1.0, 2.0], [2.0, 1.0], [3.0, 3.0], [2.0, 2.0]])) == [[0, 1], [3], [2]]
