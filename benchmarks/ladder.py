"""How far the probabilities of `assay ladder` can be trusted, on simulated families whose laws are known.

Each ladder draws two families, trains nothing, and hands noisy losses at a few sizes to the very function that judges a
real ladder; the true order at the target then says whether it was right. Laws are of four kinds, none of which the
judge is told: curves that keep their order, curves that cross between the largest size and the target, curves bent
away from any power law, and two families that are the same. Noise falls with size, part of it shared by both sides of
a pair; a third of the ladders has heavy tails.

`python benchmarks/ladder.py` prints, for each kind and for all: the share of ladders that end in a verdict, errors
among verdicts, the coverage of two intervals at the target, and stated against observed probabilities.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from analysis.extrapolation import difference_at
from analysis.projection import SURE, Losses, Projection, paired, project

SIZES = (1e6, 3e6, 1e7, 3e7)
TARGET = 1e9
SEEDS = (2, 3, 4)
KINDS = {"keeps its order": 0.45, "crosses": 0.15, "bent": 0.3, "the same": 0.1}
"""Kinds of pairs and how often they are drawn."""
BINS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


@dataclass(frozen=True, kw_only=True)
class Law:
    """L(N) = floor + slope (N / 1M)^-exponent, bent in the logarithm of N."""

    floor: float
    slope: float
    exponent: float
    bend: float

    def at(self, size: float) -> float:
        """The expected loss."""
        far = math.log(size / SIZES[0]) / math.log(SIZES[-1] / SIZES[0])
        return self.floor + self.slope * (size / SIZES[0]) ** -self.exponent + self.bend * far**2 / (1 + far)


@dataclass(frozen=True, kw_only=True)
class Story:
    """One simulated ladder."""

    kind: str
    true: float
    """First named minus second named at the target, nats."""
    found: Projection
    inside: bool
    """Whether the true difference lies in the interval of the verdict."""
    inside_wide: bool
    """Whether it lies in the one of 95 %."""


def laws(rng: np.random.Generator, kind: str) -> tuple[Law, Law]:
    """Two families of a kind."""
    while True:
        floor, slope, exponent = rng.uniform(0.4, 2.0), rng.uniform(0.4, 1.5), rng.uniform(0.12, 0.45)
        one = Law(floor=floor, slope=slope, exponent=exponent, bend=0.0)
        if kind == "the same":
            return one, one
        gap = 10 ** rng.uniform(-2.3, -0.9)
        other = Law(
            floor=floor + gap * rng.normal() * rng.integers(0, 2),
            slope=slope + gap * rng.normal(),
            exponent=exponent * math.exp(0.5 * gap * rng.normal() * rng.integers(0, 2)),
            bend=0.0,
        )
        if kind == "bent":
            shared = 0.03 * rng.normal()
            own = 0.3 * gap * rng.normal(size=2)
            one, other = (
                Law(floor=law.floor, slope=law.slope, exponent=law.exponent, bend=shared + float(bend))
                for law, bend in ((one, own[0]), (other, own[1]))
            )
        gaps = [one.at(size) - other.at(size) for size in (SIZES[-1], TARGET)]
        if kind == "bent" or (gaps[0] * gaps[1] < 0) == (kind == "crosses"):
            return one, other


def losses(rng: np.random.Generator, pair: tuple[Law, Law], seeds: int) -> tuple[Losses, Losses]:
    """What both sides were measured to lose, seeds paired."""
    loud, heavy = 10 ** rng.uniform(-2.8, -2.0), rng.random() < 1 / 3

    def noise() -> float:
        return float(rng.standard_t(3) / math.sqrt(3) if heavy else rng.normal())

    sides: tuple[dict[float, dict[int, float]], dict[float, dict[int, float]]] = ({}, {})
    for size in SIZES:
        deviation = loud * (size / SIZES[0]) ** -0.15
        for replica in range(seeds):
            shared = deviation * noise()
            for side, law in zip(sides, pair, strict=True):
                side.setdefault(size, {})[replica] = law.at(size) + shared + deviation * noise()
    return sides


def play(seed: int, sure: float = SURE) -> Story:
    """One simulated ladder and what was said of it."""
    rng = np.random.default_rng(seed)
    kind = str(rng.choice(list(KINDS), p=list(KINDS.values())))
    pair = laws(rng, kind)
    one, other = losses(rng, pair, int(rng.choice(SEEDS)))
    found = project(("one", one, 0), ("other", other, 0), target=TARGET, sure=sure)
    forward = pair[0].at(TARGET) - pair[1].at(TARGET)
    true = forward if found.first == "one" else -forward
    measured = paired(one, other)
    assert measured is not None
    low, high = difference_at(*measured, [TARGET]).interval(0.95)
    return Story(
        kind=kind,
        true=true,
        found=found,
        inside=found.low <= true <= found.high,
        inside_wide=low <= forward <= high,
    )


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one kind of ladders."""

    kind: str
    ladders: int
    decided: float
    """Share of ladders that end in a verdict."""
    errors: float
    """Share of verdicts that name the wrong winner; for two families that are the same, any."""
    verdicts: int
    coverage: float
    """Share of verdicts' intervals that hold the true difference."""
    coverage_wide: float
    """The same of the intervals of 95 %."""

    def line(self, level: float) -> str:
        """All in one line."""
        return (
            f"{self.kind:16} {self.ladders:5} ladders: {self.decided:5.1%} end in a verdict, {self.errors:5.1%} of "
            f"these {self.verdicts} wrong; the {level:.0%} interval holds {self.coverage:.1%}, that of 95% "
            f"{self.coverage_wide:.1%}"
        )


def figures(stories: Sequence[Story], kind: str = "all") -> Figures:
    """The figures of those stories that are of a kind."""
    chosen = [story for story in stories if kind in ("all", story.kind)]
    verdicts = [story for story in chosen if story.found.decided]
    return Figures(
        kind=kind,
        ladders=len(chosen),
        decided=len(verdicts) / len(chosen),
        errors=sum(story.true >= 0 for story in verdicts) / max(len(verdicts), 1),
        verdicts=len(verdicts),
        coverage=float(np.mean([story.inside for story in chosen])),
        coverage_wide=float(np.mean([story.inside_wide for story in chosen])),
    )


def reliability(stories: Sequence[Story]) -> list[tuple[float, float, float, int]]:
    """For each bin of stated probabilities above one half: least, mean stated, share that came true, count.

    Families that are the same are left out: neither of them is better.
    """
    told = [
        (max(story.found.probability, 1 - story.found.probability), (story.true < 0) == (story.found.probability > 0.5))
        for story in stories
        if story.true != 0
    ]
    rows = []
    for low, high in pairwise(BINS):
        inside = [(stated, right) for stated, right in told if low <= stated < high or stated == high == 1.0]
        if inside:
            stated, right = (float(np.mean(column)) for column in zip(*inside, strict=True))
            rows.append((low, stated, right, len(inside)))
    return rows


def main() -> int:
    """Print the figures; 1 when errors among verdicts or the coverage miss what is stated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ladders", type=int, default=2000)
    parser.add_argument("--sure", type=float, default=SURE)
    arguments = parser.parse_args()
    stories = [play(seed, arguments.sure) for seed in range(arguments.ladders)]
    level = 2 * arguments.sure - 1
    for kind in ("all", *KINDS):
        print(figures(stories, kind).line(level))
    print("stated probability  came true  ladders")
    for _, stated, right, count in reliability(stories):
        print(f"{stated:18.3f} {right:10.3f} {count:8}")
    whole = figures(stories)
    good = whole.errors <= 1 - arguments.sure and whole.coverage >= level and whole.coverage_wide >= 0.95
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
