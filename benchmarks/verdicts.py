"""Simulated searches whose finals run through the very functions that decide in `assay finals`.

Each search draws candidates, tries each once, and hands its losses to `finalists`; then sweeps and replicas are drawn
as `next_bout` asks for them, with every verdict looked at after every training. Nothing is trained. A run's loss is
the candidate's own, plus a part that all runs of a seed share, plus noise of its own; one seed in the search, others in
the sweeps, others in the replicas. Printed: how often equal candidates were told apart, how often and after how many
seeds a gap of two paired deviations was found, and how often every interval of a contest held the true difference.
Where deviations are unequal, noisy candidates crowd out the better one before the finals, which is told apart.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from analysis.contest import JUDGE, verdict_on
from search_space.contest import BASELINE, Bout, Contest, Ranked
from search_space.records import Stage
from search_space.settings import ContestSpec

CANDIDATES = 24
"""Of a search, the baseline not among them."""
REPLICA_NOISE = 0.006
"""Nats per token between two seeds of one small model, about as measured on the quickstart."""
SEED_NOISE = 0.01
"""What the runs of one seed share."""
BEND = 0.25
"""Loss of a learning rate one factor of 2 beside the best one, in units of the noise."""
UNCAPPED = 400


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How runs of one candidate vary."""

    name: str
    draw: Callable[[np.random.Generator], float]
    """Of mean 0 and deviation 1."""
    factors: tuple[float, ...] = (1.0,)
    """The deviations that candidates may have."""


NOISES = (
    Noise(name="normal", draw=lambda rng: float(rng.standard_normal())),
    Noise(name="t3", draw=lambda rng: float(rng.standard_t(3)) / math.sqrt(3)),
    Noise(name="unequal", draw=lambda rng: float(rng.standard_normal()), factors=(0.3, 1.0, 3.0)),
)


class World:
    """One simulated search: what each candidate's runs come to; candidate 0 is the baseline."""

    def __init__(self, seed: int, noise: Noise, *, gap: float, bend: float) -> None:
        """Candidate 1 is better than the baseline by `gap` deviations of their paired difference, the rest equal it."""
        self._rng = np.random.default_rng(seed)
        self._noise, self._bend = noise, bend
        self.deviations = REPLICA_NOISE * self._rng.choice(noise.factors, CANDIDATES + 1)
        self._means = np.zeros(CANDIDATES + 1)
        self._means[1] = -gap * math.hypot(self.deviations[0], self.deviations[1])
        self._best_places = self._rng.normal(0, 0.7, CANDIDATES + 1)
        self._shared: dict[object, float] = {}

    def mean(self, candidate: int, place: int) -> float:
        """The expected loss of a candidate whose own learning rate is moved by factors of 2."""
        away = place - self._best_places[candidate]
        return float(self._means[candidate] + self._bend * REPLICA_NOISE * away**2)

    def loss(self, candidate: int, place: int, seed: object) -> float:
        """One run."""
        if seed not in self._shared:
            self._shared[seed] = SEED_NOISE * self._noise.draw(self._rng)
        own = self.deviations[candidate] * self._noise.draw(self._rng)
        return self.mean(candidate, place) + self._shared[seed] + float(own)


@dataclass(frozen=True, kw_only=True)
class Story:
    """What came of one simulated contest."""

    declared: frozenset[int]
    """Candidates of which any look ever said that they beat the baseline or lose to it."""
    found_after: float
    """Pairs after which candidate 1 was first declared better; infinite when it never was."""
    entered: bool
    """Whether candidate 1 was among the finalists."""
    held: bool
    """Whether every interval at every look held the true difference."""
    trainings: int


def play(world: World, spec: ContestSpec, *, until_found: bool = False) -> Story:
    """One search and its contest."""
    ranked = [Ranked(number=k, loss=world.loss(k, 0, "search"), identity=str(k)) for k in range(CANDIDATES + 1)]
    entered = [0, *JUDGE.finalists(ranked, spec.top, "0")]
    contest = Contest(spec=spec, reach=((-9, 9),) * len(entered))
    ended: dict[Bout, float] = {}
    declared: set[int] = set()
    found, held = math.inf, True
    while (bout := JUDGE.next_bout(contest, ended, ())) is not None:
        place, seed = _run_of(contest, ended, bout)
        ended[bout] = world.loss(entered[bout.contestant], place, seed)
        if bout.stage is Stage.SWEEP or bout.contestant == BASELINE:
            continue
        verdict = verdict_on(contest, ended, bout.contestant)
        candidate = entered[bout.contestant]
        rates = [JUDGE.tuned(contest, ended, k).place for k in (bout.contestant, BASELINE)]
        true = world.mean(candidate, rates[0]) - world.mean(0, rates[1])
        held = held and (verdict.low <= true <= verdict.high)
        if verdict.kind in ("better", "worse"):
            declared.add(candidate)
            if candidate == 1 and verdict.kind == "better":
                found = min(found, verdict.n)
        if until_found and (1 not in entered or found < math.inf):
            break
    return Story(declared=frozenset(declared), found_after=found, entered=1 in entered, held=held, trainings=len(ended))


def _run_of(contest: Contest, ended: dict[Bout, float], bout: Bout) -> tuple[int, object]:
    """The learning rate's place and the seed of a training."""
    if bout.stage is Stage.SWEEP:
        return bout.place, "sweep"
    return JUDGE.tuned(contest, ended, bout.contestant).place, bout.place


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one kind of noise."""

    noise: str
    searches: int
    false_winners: float
    """Share of null searches in which any look declared any winner."""
    selected: float
    """Share of searches whose one better candidate came among five finalists, by one noisy run of each of all."""
    power: float
    """Share of those in which it was found within ten seeds."""
    mean_seeds: float
    """Pairs until the better one of twenty is found, without a cap."""
    coverage: float
    """Share of contests in which every interval at every look held the true difference, rates tuned by their sweeps."""
    trainings: float
    """Mean number of a null contest, sweeps included."""

    def line(self) -> str:
        """All in one line."""
        return (
            f"{self.noise:8} {self.searches} searches each: null declares any winner {self.false_winners:.1%}; "
            f"a gap of 2 comes among 5 finalists {self.selected:.1%}, and is then found within 10 seeds "
            f"{self.power:.1%}; among 20, uncapped, after {self.mean_seeds:.2f} seeds; all intervals of a contest hold "
            f"{self.coverage:.1%}; "
            f"{self.trainings:.0f} trainings in a null contest"
        )


def measure(noise: Noise, searches: int, *, twenty: int) -> Figures:
    """The figures of so many searches of each kind; of `twenty` for the contests of twenty finalists."""
    capped = ContestSpec(top=5, max_seeds=10)
    null = [play(World(seed, noise, gap=0.0, bend=0.0), capped) for seed in range(searches)]
    real = [play(World(10_000 + seed, noise, gap=2.0, bend=0.0), capped) for seed in range(searches)]
    tuned = [play(World(20_000 + seed, noise, gap=2.0, bend=BEND), capped) for seed in range(searches)]
    wide = ContestSpec(top=20, max_seeds=UNCAPPED)
    many = [play(World(30_000 + seed, noise, gap=2.0, bend=0.0), wide, until_found=True) for seed in range(twenty)]
    seeds = [story.found_after for story in many if story.found_after < math.inf]
    return Figures(
        noise=noise.name,
        searches=searches,
        false_winners=sum(bool(story.declared) for story in null) / searches,
        selected=sum(story.entered for story in real) / searches,
        power=sum(story.found_after < math.inf for story in real) / sum(story.entered for story in real),
        mean_seeds=sum(seeds) / len(seeds) if seeds else math.nan,
        coverage=sum(story.held for story in (*null, *real, *tuned)) / (3 * searches),
        trainings=sum(story.trainings for story in null) / searches,
    )


def main() -> int:
    """Print the figures; 1 when one of them misses its bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--searches", type=int, default=200)
    arguments = parser.parse_args()
    good = True
    for noise in NOISES:
        found = measure(noise, arguments.searches, twenty=arguments.searches)
        print(found.line(), flush=True)
        good &= found.false_winners <= 0.05 and found.power >= 0.8 and found.mean_seeds <= 10 and found.coverage >= 0.95
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
