"""Measures what effects of planted searches come to: how near, how often covered, and what is claimed that is absent.

Searches have main, conditional and pairwise effects of known size and are sampled by the sampler that real searches
use, one trial after another, with its bias towards what looked good (benchmarks/effects_planted.py). `--pruned` stops
trials at rungs, so that most final losses are never seen; `--searches` and `--seed` say how many and which. Beside the
estimates stand those of benchmarks/effects_oracle.py, which is told what there is to find. With `--deviations`,
deviations that sum to zero have the planted sizes: differences are twice, interactions four times as large.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from effects_oracle import informed
from effects_planted import (
    BUDGET,
    HEADS,
    LEAST,
    MOST,
    PATHS,
    RATE,
    WINDOW,
    Planted,
    Sampled,
    plant,
    planted_space,
    sampled,
)
from scipy.special import ndtr

from analysis.censoring import filled
from analysis.estimates import Model
from analysis.factors import FEWEST, Factor, Level, factor
from analysis.mixed import Contrast
from search_space.space import searched

SIZES = (50, 200, 400)
BANDS = (LEAST, 4.0, 6.0)
"""Sizes of effects that are told apart."""
NEAR = 0.1


@dataclass(kw_only=True)
class Tally:
    """What many searches came to; main, conditional and pair effects apart."""

    covered: dict[str, list[bool]] = field(default_factory=dict)
    """Of planted effects, and of absent ones under `absent`."""
    near: dict[str, list[bool]] = field(default_factory=dict)
    by_size: dict[str, list[bool]] = field(default_factory=dict)
    """Whether an estimate was near, by the size of the effect."""
    informed: dict[str, list[bool]] = field(default_factory=dict)
    """Whether the oracle's estimate was near."""
    informed_by_size: dict[str, list[bool]] = field(default_factory=dict)
    expected: list[float] = field(default_factory=list)
    """The chance of that, by the variances of its estimates, which no unbiased estimate undercuts."""
    found: dict[str, list[bool]] = field(default_factory=dict)
    false: dict[str, list[bool]] = field(default_factory=dict)
    """Whether any absent effect was claimed, a search each."""

    def take(self, what: str, truth: float, contrast: Contrast, level: float) -> bool:
        """Count one estimate; True where an absent effect was claimed."""
        low, high = contrast.interval(0.05)
        self.covered.setdefault(what if truth else "absent", []).append(low <= truth <= high)
        low, high = contrast.interval(level)
        if abs(truth) >= LEAST:
            near = abs(contrast.estimate - truth) <= NEAR * abs(truth)
            self.near.setdefault(what, []).append(near)
            self.by_size.setdefault(_band(truth), []).append(near)
            self.found.setdefault(what, []).append(high < 0 if truth < 0 else low > 0)
        return truth == 0 and not low <= 0 <= high

    def compare(self, what: str, truth: float, estimate: float, deviation: float) -> None:
        """Count an estimate of the oracle."""
        if abs(truth) >= LEAST:
            near = abs(estimate - truth) <= NEAR * abs(truth)
            self.informed.setdefault(what, []).append(near)
            self.informed_by_size.setdefault(_band(truth), []).append(near)
            self.expected.append(2 * float(ndtr(NEAR * abs(truth) / deviation)) - 1)


def _band(truth: float) -> str:
    return f"from {max(band for band in BANDS if band <= abs(truth)):g}"


def measure(search: Sampled, n: int, tally: Tally, *, drop: bool = False) -> None:
    """Estimate all effects from the first n trials and count them; `drop` leaves stopped trials out."""
    points, readings = search.points[:n], search.readings[:n]
    if drop:
        whole = readings[BUDGET].notna()
        points, readings = points[whole].reset_index(drop=True), readings[whole].reset_index(drop=True)
    domains = searched(planted_space())
    found = [factor(path, points, None, domains[path]) for path in PATHS]
    factors = [entry for entry in found if entry is not None]
    losses = filled(readings, BUDGET, factors)
    model = Model(factors, losses.outcomes)
    mains = [one for one in model.mains() if one.contrast and one.level.enough and one.factor.path != RATE]
    pairs = [one for one in model.pairs() if one.contrast and one.fewest >= FEWEST]
    false = {"main": False, "pair": False}
    for one in mains:
        if one.contrast:
            truth = search.planted.main(one.factor.path, one.level.label, one.level.reference)
            false["main"] |= tally.take(_kind(one.factor.path), truth, one.contrast, 0.05 / len(mains))
    for pair in pairs:
        if pair.contrast:
            truth = search.planted.pair(*_names(pair.factors, pair.levels))
            false["pair"] |= tally.take("pair", truth, pair.contrast, 0.05 / len(pairs))
    for what, claimed in false.items():
        tally.false.setdefault(what, []).append(claimed)
    if not losses.censored.any():
        _compare(search.planted, factors, losses.outcomes[0], tally)


def _compare(planted: Planted, factors: Sequence[Factor], losses: np.ndarray, tally: Tally) -> None:
    """Count what the oracle makes of the same trials."""
    there = [entry for entry in factors if entry.path == RATE or any(planted.worth[entry.path].values())]
    for factors_of, levels, estimate, deviation in informed(there, list(planted.pairs), losses):
        if len(levels) == 2:
            tally.compare("pair", planted.pair(*_names(factors_of, levels)), estimate, deviation)
        elif factors_of[0].path != RATE:
            path, level = factors_of[0].path, levels[0]
            tally.compare(_kind(path), planted.main(path, level.label, level.reference), estimate, deviation)


def _kind(path: str) -> str:
    return "conditional" if path in (HEADS, WINDOW) else "main"


def _names(
    factors: Sequence[Factor], levels: Sequence[Level]
) -> tuple[tuple[str, str], tuple[str, str], tuple[str, str]]:
    """The paths of two factors, the options, and what these are compared with."""
    (one, other), (level, beside) = factors, levels
    return (one.path, other.path), (level.label, beside.label), (level.reference, beside.reference)


def told(n: int, tally: Tally) -> str:
    """A few lines of figures."""
    near = [one for entries in tally.near.values() for one in entries]
    best = [one for entries in tally.informed.values() for one in entries]
    covered = [one for entries in tally.covered.values() for one in entries]
    lines = [
        f"{n} trials: intervals cover {_share(covered)} ({_parts(tally.covered)})",
        f"  within 10 %: {_share(near)} ({_parts(tally.near)}; {_parts(tally.by_size)})",
        f"  found: {_parts(tally.found)}; searches that claim an absent effect: {_parts(tally.false)}",
    ]
    if best:
        expected = f"{100 * float(np.mean(tally.expected)):.1f} % expected"
        told_best = f"{_parts(tally.informed)}; {_parts(tally.informed_by_size)}; {expected}"
        lines.insert(2, f"  told what there is to find, within 10 %: {_share(best)} ({told_best})")
    return "\n".join(lines)


def _parts(found: dict[str, list[bool]]) -> str:
    return ", ".join(f"{what} {_share(entries)}" for what, entries in sorted(found.items()))


def _share(found: list[bool]) -> str:
    return f"{100 * float(np.mean(found)):.1f} % of {len(found)}"


def main() -> None:
    """Simulate, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--searches", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="numbers of trials looked at")
    parser.add_argument("--sampler", default="tpe", choices=("tpe", "random"))
    parser.add_argument("--pruned", action="store_true", help="stop half of the trials at each rung")
    parser.add_argument("--drop", action="store_true", help="leave stopped trials out, to see what that costs")
    parser.add_argument("--deviations", action="store_true", help="plant deviations of that size, not differences")
    arguments = parser.parse_args()
    tallies = {n: Tally() for n in arguments.sizes}
    for seed in range(arguments.seed, arguments.seed + arguments.searches):
        planted = plant(np.random.default_rng([seed, 1]), deviations=arguments.deviations)
        search = sampled(planted, seed, max(tallies), sampler=arguments.sampler, pruned=arguments.pruned)
        for n, tally in tallies.items():
            measure(search, n, tally, drop=arguments.drop)
    what = "deviations" if arguments.deviations else "differences"
    print(f"{arguments.searches} searches of {arguments.sampler}, {what} of {LEAST} to {MOST} noise deviations a step")
    for n, tally in tallies.items():
        print(told(n, tally), flush=True)


if __name__ == "__main__":
    main()
