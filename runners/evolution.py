"""Evolutionary samplers whose whole state is the history: NSGA-II over the tree of a space, and CMA-ES over numbers."""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cmaes import CMA
from numpy.typing import NDArray

from runners.history import AbstractSampler, Fate, Told, fronts
from search_space import domains
from search_space.canon import seed_from
from search_space.domains import Choice, Domain, FloatRange, IntRange, Scalar
from search_space.space import Space, random_point, walk

_CROSSOVER = 0.9
_START_SPREAD = 1 / 6


@dataclass(frozen=True, kw_only=True)
class Nsga2Sampler(AbstractSampler):
    """Steady-state NSGA-II; crossover and mutation act on paths, so a child of two variants is a point of the tree.

    Deb et al. 2002 for the selection, Durillo et al. 2009 for replacing one member at a time.
    """

    space: Space
    seed: int
    population: int

    def draws(self, number: int, history: Sequence[Told]) -> Iterator[dict[str, Scalar]]:
        finished = [told for told in history if told.fate is not Fate.RUNNING]
        parents = survivors(finished, self.population)
        for attempt in itertools.count():
            rng = random.Random(seed_from(self.seed, number, attempt))
            if len(finished) < self.population:
                yield random_point(self.space, rng)
            else:
                yield self._child(parents, rng)

    def _child(self, parents: Sequence[Told], rng: random.Random) -> dict[str, Scalar]:
        """A child of two tournament winners; `parents` are sorted best first."""
        order = range(len(parents))
        first, second = (parents[min(rng.choice(order), rng.choice(order))].point for _ in range(2))
        if rng.random() >= _CROSSOVER:
            second = first
        mutation = 1 / max(1, len(first))

        def ask(path: str, domain: Domain) -> Scalar:
            sources = (first, second) if rng.random() < 0.5 else (second, first)
            inherited = next((point[path] for point in sources if path in point), None)
            if inherited is None or not domains.contains(domain, inherited) or rng.random() < mutation:
                return domains.draw(domain, rng)
            return inherited

        return walk(self.space, ask)


def survivors(trials: Sequence[Told], count: int) -> list[Told]:
    """The best trials by front, then by crowding distance; best first."""
    kept: list[Told] = []
    for front in fronts(trials):
        distance = _crowding(front)
        kept.extend(sorted(front, key=lambda told: (-distance[told.number], told.number)))
        if len(kept) >= count:
            break
    return kept[:count]


def _crowding(front: Sequence[Told]) -> dict[int, float]:
    """Deb et al. 2002, section III-B: how far a trial's neighbours in its front are."""
    distance = {told.number: 0.0 for told in front}
    for objective in range(len(front[0].values)):
        ordered = sorted(front, key=lambda told: (told.values[objective], told.number))
        low, high = ordered[0].values[objective], ordered[-1].values[objective]
        distance[ordered[0].number] = distance[ordered[-1].number] = math.inf
        for before, told, after in zip(ordered, ordered[1:], ordered[2:], strict=False):
            if high > low:
                distance[told.number] += (after.values[objective] - before.values[objective]) / (high - low)
    return distance


@dataclass(frozen=True, kw_only=True)
class CmaesSampler(AbstractSampler):
    """CMA-ES (Hansen 2016, The CMA Evolution Strategy: A Tutorial), replayed from the trials told so far.

    The trials that are points of this space are taken in blocks of one generation, by number, whatever lies between
    them; a proposal has learned from every leading block of which none is still running. Broken and pruned trials rank
    behind all finished ones, pruned before broken.
    """

    sees_all = True

    space: Space
    seed: int
    fields: Mapping[str, Domain]
    """The searched paths; ranges only."""

    def draws(self, number: int, history: Sequence[Told]) -> Iterator[dict[str, Scalar]]:
        known = [told for told in history if told.number < number]
        for attempt in itertools.count():
            strategy = self._strategy(seed_from(self.seed, number, attempt) % 2**32)
            size = strategy.population_size
            for first in range(0, len(known) - size + 1, size):
                block = known[first : first + size]
                if any(member.fate is Fate.RUNNING for member in block):
                    break
                strategy.tell([(self._position(member.point), float(rank)) for rank, member in _ranked(block)])
            position = strategy.ask()
            yield walk(self.space, lambda path, domain, at=position: self._value(path, domain, at))

    def _strategy(self, seed: int) -> CMA:
        count = len(self.fields)
        return CMA(mean=np.full(count, 0.5), sigma=_START_SPREAD, bounds=np.array([[0.0, 1.0]] * count), seed=seed)

    def _position(self, point: Mapping[str, Scalar]) -> NDArray[np.float64]:
        """The point in the unit cube; an integer is the middle of its share."""
        shares = []
        for path, domain in self.fields.items():
            low, high = _span(domain)
            value = point[path]
            assert isinstance(value, int | float)
            scaled = math.log(value) if _is_log(domain) else float(value)
            shares.append(min(max((scaled - low) / (high - low), 0.0), 1.0))
        return np.array(shares)

    def _value(self, path: str, domain: Domain, position: NDArray[np.float64]) -> Scalar:
        low, high = _span(domain)
        scaled = low + (high - low) * float(position[list(self.fields).index(path)])
        real = math.exp(scaled) if _is_log(domain) else scaled
        if isinstance(domain, IntRange):
            steps = round((real - domain.low) / domain.step)
            return min(max(domain.low + domain.step * steps, domain.low), domain.high)
        assert isinstance(domain, FloatRange)
        return min(max(real, domain.low), domain.high)


def _ranked(block: Sequence[Told]) -> list[tuple[int, Told]]:
    order = {Fate.OK: 0, Fate.PRUNED: 1, Fate.BROKEN: 2}
    ordered = sorted(block, key=lambda told: (order[told.fate], -told.last_tokens, told.values or (told.last_loss,)))
    return list(enumerate(ordered))


def _is_log(domain: Domain) -> bool:
    return not isinstance(domain, Choice) and domain.log


def _span(domain: Domain) -> tuple[float, float]:
    """The ends of a range on the scale it is drawn on; integers own half a step on each side."""
    assert not isinstance(domain, Choice), "a range"
    half = domain.step / 2 if isinstance(domain, IntRange) else 0.0
    low, high = domain.low - half, domain.high + half
    return (math.log(low), math.log(high)) if domain.log else (low, high)
