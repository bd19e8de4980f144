"""The page on learning rates and widths says what its numbers say, and its claim holds for a part of its runs."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def mup() -> ModuleType:
    """The command that makes the page."""
    spec = importlib.util.spec_from_file_location("mup_picture", ROOT / "benchmarks" / "mup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_says_what_the_kept_losses_say(mup: ModuleType) -> None:
    kept = json.loads((ROOT / "docs" / "mup.json").read_text())
    losses = mup.in_numbers(kept["losses"])
    found = {rule: mup.moves(by_width) for rule, by_width in losses.items()}
    assert (ROOT / "docs" / "mup.md").read_text() == mup.table(losses, found, kept["seeds"])
    assert all(mup.claim(found).values())
    assert tuple(losses["mup"]) == mup.WIDTHS == (32, 64, 128, 256)


def test_a_best_rate_lies_where_the_parabola_has_its_vertex(mup: ModuleType) -> None:
    losses = {exponent: (exponent + 7.25) ** 2 for exponent in range(-10, -3)}
    assert mup.best_exponent(losses) == pytest.approx(-7.25)
    with pytest.raises(AssertionError, match="widen"):
        mup.best_exponent({exponent: float(exponent) for exponent in range(-10, -3)})


def test_a_rate_that_moves_breaks_the_claim(mup: ModuleType) -> None:
    def curves(slope: float) -> dict[int, dict[int, list[float]]]:
        by_width = {}
        for index, width in enumerate(mup.WIDTHS):
            by_width[width] = {exponent: [(exponent + 6 - slope * index) ** 2] for exponent in range(-12, -1)}
        return by_width

    for of_mup, of_xavier, held in ((0.0, -1.0, [True, True]), (-0.5, -1.0, [False, True]), (0.0, -0.4, [True, False])):
        found = {"mup": mup.moves(curves(of_mup)), "xavier": mup.moves(curves(of_xavier))}
        assert list(mup.claim(found).values()) == held


@pytest.mark.slow
def test_the_best_rate_of_the_narrow_model_serves_the_wide_one_under_maximal_update_only(mup: ModuleType) -> None:
    """At 4 times the width: under mup the same rate still beats a quarter and 4 times of it, and under xavier none."""
    data = mup.PythonSource(seq_len=mup.LENGTH).prepare()

    def loss(rule: object, width: int, exponent: int) -> float:
        return float(mup.final_loss(rule, width, exponent, 0, data))

    for width in (32, 128):
        slow, best, fast = (loss(mup.MAXIMAL, width, exponent) for exponent in (-9, -7, -5))
        assert best < min(slow, fast) - 0.03
    assert loss(mup.STANDARD, 32, -7) < loss(mup.STANDARD, 32, -9) - 0.03
    assert loss(mup.STANDARD, 128, -9) < loss(mup.STANDARD, 128, -7) - 0.03
