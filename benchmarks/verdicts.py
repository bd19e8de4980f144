"""Simulated searches whose finals run through the very functions that decide in `assay finals`.

Each search draws candidates, tries each once, and hands its losses to the judge; then sweeps and replicas are drawn as
`next_bout` asks for them, with every verdict looked at after every training. Nothing is trained. A run's loss is the
candidate's own, plus a part that all runs of a seed share, plus noise of its own; one seed in the search, others in the
sweeps, others in the replicas. Printed: how often equal candidates were told apart; how often and after how many seeds
a gap of two paired deviations was found, and what became of it otherwise; how often every interval of a contest held
the true difference. In searches with tuning, rates matter: candidates come with rates that are a little off, a sweep's
single trainings mislead as they do, and the gap is two deviations only at the best rates of both sides.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
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
    gap: float
    """By how many deviations of a paired difference it was better at the rates of its finals; NaN if not entered."""
    held: bool
    """Whether every interval at every look held the true difference."""
    trainings: int


def play(world: World, spec: ContestSpec, *, until_found: bool = False) -> Story:
    """One search and its contest."""
    ranked = [Ranked(number=k, loss=world.loss(k, 0, "search"), identity=str(k)) for k in range(CANDIDATES + 1)]
    entrants = [0, *JUDGE.candidates(ranked, spec.entrants, "0")]
    searched = tuple(ranked[k].loss for k in entrants[1:])
    contest = Contest(spec=spec, reach=((-9, 9),) * len(entrants), searched=searched)
    ended: dict[Bout, float] = {}
    declared: set[int] = set()
    found, gap, held = math.inf, math.nan, True
    while (bout := JUDGE.next_bout(contest, ended, ())) is not None:
        place, seed = _run_of(contest, ended, bout)
        candidate = entrants[bout.contestant]
        ended[bout] = world.loss(candidate, place, seed)
        if bout.stage is Stage.SWEEP or bout.contestant == BASELINE:
            continue
        verdict = verdict_on(contest, ended, bout.contestant)
        true = world.mean(candidate, place) - world.mean(0, JUDGE.tuned(contest, ended, BASELINE).place)
        held = held and (verdict.low <= true <= verdict.high)
        if candidate == 1:
            gap = -true / math.hypot(world.deviations[0], world.deviations[1])
        if verdict.kind in ("better", "worse"):
            declared.add(candidate)
            if candidate == 1 and verdict.kind == "better":
                found = min(found, verdict.n)
        if until_found and (found < math.inf or not _entered(contest, ended, entrants)):
            break
    return Story(
        declared=frozenset(declared),
        found_after=found,
        entered=_entered(contest, ended, entrants),
        gap=gap,
        held=held,
        trainings=len(ended),
    )


def _entered(contest: Contest, ended: dict[Bout, float], entrants: Sequence[int]) -> bool:
    """Whether candidate 1 is among the finalists."""
    return 1 in [entrants[finalist] for finalist in JUDGE.finalists(contest, ended)]


def _run_of(contest: Contest, ended: dict[Bout, float], bout: Bout) -> tuple[int, object]:
    """The learning rate's place and the seed of a training."""
    if bout.stage is Stage.SWEEP:
        return bout.place, "sweep"
    return JUDGE.tuned(contest, ended, bout.contestant).place, bout.place


@dataclass(frozen=True, kw_only=True)
class Hunt:
    """How searches for one better candidate ended, as shares of all of them."""

    found: float
    """Declared better within ten seeds."""
    shut_out: float
    """Not among the five finalists."""
    gap: float
    """Mean gap of those that entered, at the rates of their finals."""

    def line(self) -> str:
        """In words."""
        left = 1 - self.found - self.shut_out
        return f"found {self.found:.1%}, not among 5 finalists {self.shut_out:.1%}, undecided at 10 seeds {left:.1%}"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one kind of noise."""

    noise: str
    searches: int
    """With equal candidates."""
    hunts: int
    """With one better one, of each of both kinds."""
    false_winners: float
    """Share of null searches in which any look declared any winner."""
    plain: Hunt
    """Where the learning rate makes no difference."""
    tuned: Hunt
    """Where it does."""
    mean_seeds: float
    """Pairs until the better one of twenty finalists is found, without a cap."""
    coverage: float
    """Share of contests in which every interval at every look held the true difference."""
    trainings: float
    """Mean number of a null contest, sweeps included."""

    def line(self) -> str:
        """One line a figure."""
        return (
            f"{self.noise}: any winner in {self.false_winners:.1%} of {self.searches} null searches; all intervals of "
            f"a contest hold in {self.coverage:.1%}; {self.trainings:.0f} trainings in a null contest\n"
            f"  a gap of 2, {self.hunts} searches: {self.plain.line()}\n"
            f"  with tuning, a gap of {self.tuned.gap:.2f} left, {self.hunts} searches: {self.tuned.line()}\n"
            f"  among 20 finalists, uncapped, found after {self.mean_seeds:.2f} seeds"
        )


def measure(noise: Noise, searches: int, *, hunts: int, twenty: int) -> Figures:
    """The figures of so many null searches, of `hunts` with a better candidate, and of `twenty` among 20 finalists."""
    capped = ContestSpec(top=5, max_seeds=10)
    null = [play(World(seed, noise, gap=0.0, bend=0.0), capped) for seed in range(searches)]
    plain = [play(World(10_000 + seed, noise, gap=2.0, bend=0.0), capped) for seed in range(hunts)]
    tuned = [play(World(20_000 + seed, noise, gap=2.0, bend=BEND), capped) for seed in range(hunts)]
    wide = ContestSpec(top=20, max_seeds=UNCAPPED)
    many = [play(World(30_000 + seed, noise, gap=2.0, bend=0.0), wide, until_found=True) for seed in range(twenty)]
    seeds = [story.found_after for story in many if story.entered]
    return Figures(
        noise=noise.name,
        searches=searches,
        hunts=hunts,
        false_winners=sum(bool(story.declared) for story in null) / searches,
        plain=_hunt(plain),
        tuned=_hunt(tuned),
        mean_seeds=sum(seeds) / len(seeds),
        coverage=sum(story.held for story in (*null, *plain, *tuned)) / (searches + 2 * hunts),
        trainings=sum(story.trainings for story in null) / searches,
    )


def _hunt(stories: Sequence[Story]) -> Hunt:
    return Hunt(
        found=sum(story.found_after < math.inf for story in stories) / len(stories),
        shut_out=sum(not story.entered for story in stories) / len(stories),
        gap=float(np.nanmean([story.gap for story in stories])),
    )


def main() -> int:
    """Print the figures; 1 when one of them misses its bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--searches", type=int, default=200, help="searches of each kind (default 200)")
    parser.add_argument("--twenty", type=int, default=50, help="contests of twenty finalists (default 50)")
    arguments = parser.parse_args()
    good = True
    for noise in NOISES:
        found = measure(noise, arguments.searches, hunts=arguments.searches, twenty=arguments.twenty)
        print(found.line(), flush=True)
        good &= found.false_winners <= 0.05 and found.coverage >= 0.95 and found.mean_seeds <= 10
        good &= found.plain.found >= 0.8 and found.tuned.found >= 0.8
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
