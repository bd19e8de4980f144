"""What is said of a size that nobody trained: right where laws are known, silent where nothing is known."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from analysis.compare import number_text
from analysis.extrapolation import Measured, difference_at, loss_at
from analysis.ladder import Ladder, Training, cautions, ladder_text, projections
from analysis.projection import Losses, Projection, chance_text, paired, project, size_text
from analysis.report.ladder import write_ladder_report

ROOT = Path(__file__).parents[2]
SIZES = (1e6, 3e6, 1e7, 3e7)
TARGET = 1e9


def losses(floor: float, slope: float, exponent: float = 0.25, *, noise: float = 0.002, seeds: int = 3) -> Losses:
    """A power law with a part that all families share at one size and seed, and noise of its own."""
    own = np.random.default_rng([int(1e4 * floor), int(1e4 * slope)])
    shared = np.random.default_rng(7).normal(0, noise, (len(SIZES), seeds))
    return {
        size: {
            k: floor + slope * (size / SIZES[0]) ** -exponent + float(shared[row, k] + own.normal(0, noise))
            for k in range(seeds)
        }
        for row, size in enumerate(SIZES)
    }


def judged(one: Losses, other: Losses, *, bad: tuple[int, int] = (0, 0), sure: float = 0.9) -> Projection:
    return project(("one", one, bad[0]), ("other", other, bad[1]), target=TARGET, sure=sure)


def test_a_gap_that_stays_is_a_verdict_at_the_target_with_the_winner_first() -> None:
    found = judged(losses(1.05, 1.0), losses(1.0, 1.0))
    assert found.decided
    assert (found.first, found.second) == ("other", "one")
    assert found.probability > 0.95
    assert found.low < -0.05 < found.high < 0
    assert found.text.startswith("at 1B: other beats one with probability")
    assert f"{number_text(found.estimate)} nats" in found.text
    assert "4 sizes 1M to 30M, 12 pairs, ×33.3 beyond the largest" in found.text


def test_turning_the_sides_around_turns_nothing_else_around() -> None:
    forth, back = judged(losses(1.05, 1.0), losses(1.0, 1.0)), judged(losses(1.0, 1.0), losses(1.05, 1.0))
    assert (forth.first, back.first) == ("other", "one")
    assert forth.probability == pytest.approx(back.probability)
    assert (forth.low, forth.high) == pytest.approx((back.low, back.high))


def test_families_that_are_the_same_get_no_verdict() -> None:
    found = judged(losses(1.0, 1.0), {**losses(1.0, 1.0001)})
    assert not found.decided
    assert "no verdict on one and other: the 80 % extrapolation interval spans zero" in found.text


def test_a_lead_that_melts_with_size_is_no_verdict_for_its_leader() -> None:
    found = judged(losses(1.0, 1.08), losses(1.03, 1.0))
    assert not (found.decided and found.first == "other"), "it leads at 1M alone: the floors are the other way round"


def test_more_certainty_asked_means_fewer_verdicts() -> None:
    sides = losses(1.02, 1.0), losses(1.0, 1.0)
    assert judged(*sides).decided
    strict = judged(*sides, sure=0.9999)
    assert not strict.decided
    assert strict.high - strict.low > 2 * (judged(*sides).high - judged(*sides).low)


def test_a_side_that_ended_badly_more_often_does_not_win() -> None:
    sides = losses(1.05, 1.0), losses(1.0, 1.0)
    assert judged(*sides, bad=(1, 1)).decided
    withheld = judged(*sides, bad=(0, 2))
    assert not withheld.decided
    assert "2 of its trainings ended badly, and 0 of the other's" in withheld.text


def test_too_few_sizes_or_seeds_are_said_to_be_too_few() -> None:
    short = {size: by for size, by in losses(1.0, 1.0).items() if size < 5e6}
    assert "pairs at 2 sizes, and 3 are needed; give more --sizes" in judged(short, losses(1.1, 1.0)).text
    single = judged(losses(1.0, 1.0, seeds=1), losses(1.1, 1.0, seeds=1))
    assert math.isnan(single.probability)
    assert "give more --seeds" in single.text


def test_pairs_are_of_one_size_and_seed_alone() -> None:
    one = {1e6: {0: 1.0, 1: 1.5}, 3e6: {0: 0.9}}
    other = {1e6: {1: 1.0, 2: 9.0, 0: 0.8}, 3e6: {1: 0.7}}
    found = paired(one, other)
    assert found is not None
    assert found[0].sizes.tolist() == [1e6]
    assert found[0].means.tolist() == pytest.approx([0.35])
    assert found[0].counts.tolist() == [2]


def test_a_law_is_carried_on_to_a_size_thirty_times_beyond() -> None:
    sizes = np.array(SIZES)
    means = 0.9 + 1.1 * (sizes / 1e6) ** -0.3
    curve = Measured(sizes=sizes, means=means, counts=np.full(4, 3.0), deviation=0.002, degrees=8)
    low, high = loss_at(curve, [TARGET]).interval(0.9)
    assert low < 0.9 + 1.1 * 1000**-0.3 < high
    assert high - low < 0.1


def test_intervals_widen_with_the_distance_to_the_target() -> None:
    found = paired(losses(1.02, 1.0), losses(1.0, 1.0))
    assert found is not None
    believed = difference_at(*found, [3e7, 1e8, 1e9, 1e11])
    widths = [high - low for low, high in (believed.interval(0.8, place) for place in range(4))]
    assert widths == sorted(widths)
    assert sum(believed.shares().values()) == pytest.approx(1)


def test_a_curve_that_breaks_at_the_largest_size_fails_its_check() -> None:
    straight, broken = losses(1.0, 1.0), losses(1.03, 1.0)
    broken = {**broken, SIZES[-1]: {k: loss + 0.3 for k, loss in broken[SIZES[-1]].items()}}
    kept, failed = judged(straight, losses(1.03, 1.0)).check, judged(straight, broken).check
    assert kept is not None
    assert kept.holds
    assert failed is not None
    assert not failed.holds


@pytest.mark.parametrize(
    ("size", "said"), [(20_000, "20k"), (1e6, "1M"), (2.5e6, "2.5M"), (1e9, "1B"), (7e12, "7T"), (12, "12")]
)
def test_sizes_read_as_they_are_typed(size: float, said: str) -> None:
    assert size_text(size) == said


def test_no_probability_is_said_to_be_certain() -> None:
    assert [chance_text(chance) for chance in (1.0, 0.93, 0.0)] == ["over 0.99", "0.93", "under 0.01"]


def made_up(**changes: object) -> Ladder:
    """A ladder of two candidates as a store would hold it."""
    sides = {"relu": losses(1.05, 1.0), "swiglu": losses(1.0, 1.0)}
    trainings = [
        Training(
            candidate=label, rung=int(size), replica=k, number=0, status="ok", loss=loss, params=size,
            tokens=20 * size, learning_rate=1e-3, d_model=64, layers=2, seconds=1.0, untuned="",
        )
        for label, side in sides.items()
        for size, by in side.items()
        for k, loss in by.items()
    ]  # fmt: skip
    plain: dict[str, object] = {
        "name": "steps",
        "unit": "nats/byte",
        "metric": "test/loss",
        "target": TARGET,
        "sure": 0.9,
        "candidates": {"relu": "steps/0", "swiglu": "steps/1"},
        "rules": ["Depth: the layers of the run."],
        "trainings": tuple(trainings),
    }
    return Ladder(**{**plain, **changes})  # type: ignore[arg-type]


def test_what_lowers_the_trust_in_a_ladder_is_said_beside_its_verdicts() -> None:
    whole = made_up()
    lost = [
        Training(**{**vars(one), "status": "diverged", "loss": math.nan, "untuned": "at an edge"})
        for one in whole.trainings[:1]
    ]
    ladder = made_up(trainings=(*lost, *whole.trainings[1:]))
    assert cautions(ladder) == ["not tuned: relu: at an edge", "relu: 1 of its trainings ended badly"]
    said = ladder_text(ladder, projections(ladder))
    assert said.splitlines()[0].startswith("at 1B: swiglu beats relu with probability")
    assert "held-out check: from the smaller sizes, swiglu minus relu at 30M" in said
    assert "not tuned: relu" in said


def test_the_report_shows_verdict_picture_and_every_training(tmp_path: Path) -> None:
    ladder = made_up()
    page = write_ladder_report(ladder, projections(ladder), tmp_path)
    told = page.read_text()
    assert (tmp_path / "ladder.png").stat().st_size > 10_000
    assert "swiglu beats relu" in told
    assert told.count("steps/ladder/0") >= len(ladder.trainings)
    markdown = (tmp_path / "report.md").read_text()
    assert "![Loss against size](ladder.png)" in markdown
    assert "Depth: the layers of the run." in markdown


def simulation() -> ModuleType:
    """benchmarks/ladder.py."""
    spec = importlib.util.spec_from_file_location("simulated_ladders", ROOT / "benchmarks" / "ladder.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_probabilities_come_true_as_often_as_they_say() -> None:
    """`python benchmarks/ladder.py` measures the same on 2,000 ladders."""
    simulated = simulation()
    stories = [simulated.play(seed) for seed in range(20_000, 20_150)]
    whole = simulated.figures(stories)
    assert whole.verdicts >= 30
    assert whole.errors <= 0.1
    assert whole.coverage >= 0.8
    assert whole.coverage_wide >= 0.95
    for _, stated, right, count in simulated.reliability(stories):
        assert right >= stated - 3 * math.sqrt(stated * (1 - stated) / count) - 0.02
