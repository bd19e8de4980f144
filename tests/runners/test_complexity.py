"""`assay blocks --measure`: exponents of what grows as told, and the page, the picture and the refusals."""

import json
import math
from pathlib import Path

import pytest

from runners.cli import main
from runners.complexity import Point, exponent, measure


def points(seconds: list[float]) -> list[Point]:
    return [
        Point(length=64 * 2**step, seconds=value, saved_bytes=1, peak_bytes=0, flops=1.0)
        for step, value in enumerate(seconds)
    ]


def test_exponents_are_slopes_over_the_longest_lengths() -> None:
    assert exponent(points([9.0, 1.0, 2.0, 4.0]), lambda point: point.seconds) == pytest.approx(1.0)
    assert exponent(points([1.0, 4.0]), lambda point: point.seconds) == pytest.approx(2.0)
    assert math.isnan(exponent(points([1.0]), lambda point: point.seconds))


def test_memory_and_declared_cost_grow_as_each_mixer_says() -> None:
    found = {
        growth.kind: growth for growth in measure(("linear", "sliding_window", "topk", "nystrom"), (256, 512, 1024))
    }
    assert found["nystrom"].stack == "encoder"
    for kind in ("linear", "sliding_window"):
        assert found[kind].memory_exponent == pytest.approx(1.0, abs=0.1)
        assert found[kind].flops_exponent == pytest.approx(1.0, abs=0.05)
    assert found["topk"].memory_exponent > 1.7
    assert found["topk"].flops_exponent > 1.6


def test_the_command_writes_figures_a_page_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["blocks", "--measure", str(tmp_path), "--mixers", "linear,softmax", "--lengths", "128,64"]
    assert main(asked) == 0
    assert "softmax" in capsys.readouterr().err
    data = json.loads((tmp_path / "complexity.json").read_text())
    assert [row["kind"] for row in data["mixers"]] == ["linear", "softmax"]
    assert [point["length"] for point in data["mixers"][0]["points"]] == [64, 128]
    page = (tmp_path / "complexity.md").read_text()
    assert "| linear | heads 4" in page
    assert (tmp_path / "complexity.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--measure", "nowhere/at/all"], "is no folder; name one that exists"),
        (["--measure", ".", "--mixers", "softmx"], "did you mean 'softmax'"),
        (["--measure", ".", "--lengths", "12,x"], "two or more different numbers of tokens"),
        (["--lengths", "64,128"], "says what --measure FOLDER measures; add it"),
    ],
)
def test_wrong_requests_are_told_with_their_remedy(
    asked: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["blocks", *asked]) == 2
    assert said in capsys.readouterr().err
