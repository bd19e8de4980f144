"""Evolutionary samplers whose whole state is the history: NSGA-II and regularised evolution on trees, and CMA-ES."""

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cmaes import CMA
from numpy.typing import NDArray

from runners.history import AbstractSampler, Fate, Told, crowding, fronts
from search_space import domains
from search_space.canon import seed_from
from search_space.domains import Choice, Domain, FloatRange, IntRange, Scalar
from search_space.space import Space, random_point, searched, walk

_CROSSOVER = 0.9
_START_SPREAD = 1 / 6
_TOURNAMENTS = 2
"""A tournament holds the population divided by so many."""
_SWITCHES = 0.15
"""Mutations that are sure to switch a variant, where one is searched."""
_STEP, _JUMPS = 0.15, 0.1
"""A number's step as a share of its range, and how often it is drawn anew instead."""
_TRIES = 16
"""Children with one change that are drawn before one more change is made."""


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
        distances = crowding(np.array([told.values if told.fate is Fate.OK else () for told in front]))
        kept.extend(told for told, _ in sorted(zip(front, distances, strict=True), key=lambda each: -each[1]))
        if len(kept) >= count:
            break
    return kept[:count]


@dataclass(frozen=True, kw_only=True)
class EvolutionSampler(AbstractSampler):
    """Regularised evolution: the best of a few of the latest trials, changed in one place; old trials die of age.

    Real et al. 2019, Regularized Evolution for Image Classifier Architecture Search (arXiv:1802.01548), algorithm 1.
    A number moves a little, a choice moves to another option, a family switches its variant and keeps the fields that
    both variants have. Redraws for one trial change more and more places, so that a parent whose neighbours were all
    tried still has children. Several objectives are ranked by fronts, then by crowding distance.
    """

    space: Space
    seed: int
    population: int

    def draws(self, number: int, history: Sequence[Told]) -> Iterator[dict[str, Scalar]]:
        alive = [told for told in history if told.fate is not Fate.RUNNING][-self.population :]
        standing = _standing(alive)
        for attempt in itertools.count():
            rng = random.Random(seed_from(self.seed, number, attempt))
            if len(alive) < self.population:
                yield random_point(self.space, rng)
            else:
                size = max(2, self.population // _TOURNAMENTS)
                parent = standing[min(rng.sample(range(len(standing)), size))]
                yield self._child(parent.point, [told.point for told in standing], 1 + attempt // _TRIES, rng)

    def _child(
        self, parent: Mapping[str, Scalar], others: Sequence[Mapping[str, Scalar]], places: int, rng: random.Random
    ) -> dict[str, Scalar]:
        fields = sorted(searched(self.space).keys() & parent.keys())
        kinds = [path for path in fields if path.endswith(".kind")]
        mutated: set[str] = set()
        for _ in range(places):
            mutated.add(rng.choice(kinds if kinds and rng.random() < _SWITCHES else fields))

        def ask(path: str, domain: Domain) -> Scalar:
            if path in mutated:
                return _moved(domain, parent[path], rng)
            known = (parent.get(path), _shared(parent, mutated, path), *(other.get(path) for other in others))
            inherited = next((value for value in known if value is not None and domains.contains(domain, value)), None)
            return domains.draw(domain, rng) if inherited is None else inherited

        return walk(self.space, ask)


def _standing(trials: Sequence[Told]) -> list[Told]:
    """Best first: finished trials, then pruned ones by how far they came, then broken ones."""
    finished = [told for told in trials if told.fate is Fate.OK]
    pruned = [told for told in trials if told.fate is Fate.PRUNED]
    return [
        *survivors(finished, len(finished)),
        *sorted(pruned, key=lambda told: (-told.last_tokens, told.last_loss, told.number)),
        *(told for told in trials if told.fate is Fate.BROKEN),
    ]


def _shared(parent: Mapping[str, Scalar], mutated: Iterable[str], path: str) -> Scalar | None:
    """What the parent has in the place of this path, under the variant that a switch replaces."""
    for kind in mutated:
        family = kind.removesuffix("kind")
        if kind.endswith(".kind") and path.startswith(family):
            rest = path.removeprefix(family).partition(".")[2]
            return parent.get(f"{family}{parent[kind]}.{rest}")
    return None


def _moved(domain: Domain, value: Scalar, rng: random.Random) -> Scalar:
    """Another value of the domain, near this one where values have an order."""
    if isinstance(domain, Choice):
        return rng.choice([option for option in domain.options if not domains.same(option, value)])
    if rng.random() < _JUMPS:
        return domains.draw(domain, rng)
    assert isinstance(value, int | float)
    low, high = _span(domain)
    at = (math.log(value) if domain.log else float(value)) + rng.gauss(0.0, _STEP) * (high - low)
    real = math.exp(min(max(at, low), high)) if domain.log else min(max(at, low), high)
    if isinstance(domain, FloatRange):
        return min(max(real, domain.low), domain.high)
    near = _whole(domain, real)
    if near == value:
        near += domain.step * (1 if real > value else -1)
    return near if domains.contains(domain, near) else _whole(domain, 2 * float(value) - near)


def _whole(domain: IntRange, real: float) -> int:
    """The integer of the domain that is nearest."""
    return min(max(domain.low + domain.step * round((real - domain.low) / domain.step), domain.low), domain.high)


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
            return _whole(domain, real)
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
