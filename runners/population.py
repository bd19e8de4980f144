"""Population based training: the worst trials go on from the state of one of the best, with other settings.

Jaderberg et al. 2017, Population Based Training of Neural Networks (arXiv:1711.09846), algorithm 1, with truncation
selection and perturbation (section 4.1.1), asynchronous: a trial is compared, at equal tokens, with those of its
population that came there before it, and waits for none.
"""

import math
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

from runners.pruning import AbstractPruner
from search_space.canon import flatten, seed_from, unflatten
from search_space.domains import FloatRange, Scalar
from search_space.space import searched

if TYPE_CHECKING:
    from search_space.experiment import Experiment
    from search_space.settings import PrunerSpec

Settings = Mapping[str, Scalar]
"""Values by full path of those settings that a population changes."""


class Population(AbstractPruner):
    """Consecutive trials are a population; decisions follow from their losses, their numbers and the seed alone."""

    def __init__(
        self, pruner: "PrunerSpec", *, size: int, budget_tokens: int, seed: int, domains: Mapping[str, FloatRange]
    ) -> None:
        """`domains` are those of the settings that are changed."""
        self.interval_tokens = pruner.interval_tokens
        self.domains = domains
        self._quantile = pruner.quantile
        self._factors = pruner.factors
        self._size = size
        self._budget_tokens = budget_tokens
        self._seed = seed
        self._losses: dict[int, dict[int, float]] = {}

    @classmethod
    def of(cls, experiment: "Experiment") -> Self:
        """The population of an experiment, with nothing observed yet."""
        search = experiment.search
        domains = {path: each for path, each in searched(experiment.space).items() if isinstance(each, FloatRange)}
        return cls(
            search.pruner,
            size=search.population,
            budget_tokens=experiment.budget.tokens,
            seed=search.seed,
            domains=domains,
        )

    @property
    def most_shared(self) -> int:
        """States that others may go on from, over a population's whole way, at most."""
        return self._most_donors * (self._budget_tokens // self.interval_tokens)

    @property
    def _most_donors(self) -> int:
        return max(int(self._size * self._quantile), 1)

    def wants(self, number: int, tokens: int) -> bool:
        # What has been decided stays decided, whoever came there since.
        due = 0 < tokens < self._budget_tokens and tokens % self.interval_tokens == 0
        return due and not self.has_read(number, tokens)

    def observe(self, number: int, tokens: int, loss: float, *others: float) -> None:
        self._losses.setdefault(tokens, {})[number] = loss if math.isfinite(loss) else math.inf

    def goes_on(self, number: int, tokens: int) -> bool:
        return True

    def end(self, number: int, tokens: int) -> None:
        """A trial that broke is compared no more."""

    def has_read(self, number: int, tokens: int) -> bool:
        """True when the trial's loss at these tokens is known."""
        return number in self._losses.get(tokens, {})

    def loss(self, number: int, tokens: int) -> float:
        """Of a trial that has been read there."""
        return self._losses[tokens][number]

    def mates(self, number: int) -> range:
        """The numbers of a trial's population."""
        first = number // self._size * self._size
        return range(first, first + self._size)

    def may_give(self, number: int, tokens: int) -> bool:
        """True when the state of a trial that was read there may be gone on from, by any trial still to come there."""
        return number in self._ranked(number, tokens)[: self._most_donors]

    def donor(self, number: int, tokens: int, loss: float) -> int | None:
        own = loss if math.isfinite(loss) else math.inf
        losses = {**self._of_mates(number, tokens), number: own}
        count = int(len(losses) * self._quantile)
        ranked = sorted(losses, key=lambda each: (losses[each], each))
        if number not in ranked[len(ranked) - count :]:
            return None
        better = [each for each in ranked[:count] if losses[each] < own]
        return self._dice(number, tokens, "donor").choice(better) if better else None

    def changed(self, settings: Settings, number: int, tokens: int) -> dict[str, Scalar]:
        """A donor's settings, each times one of the factors, within its range."""
        dice = self._dice(number, tokens, "settings")
        return {
            path: _times(self.domains[path], float(value), dice.choice(self._factors))
            for path, value in sorted(settings.items())
        }

    def settings(self, optimizer: Mapping[str, object]) -> dict[str, Scalar]:
        """Of an optimiser as plain data: what the population changes."""
        flat = flatten({"optimizer": optimizer})
        return {path: flat[path] for path in self.domains}

    def _dice(self, number: int, tokens: int, what: str) -> random.Random:
        return random.Random(seed_from(self._seed, "population", number, tokens, what))

    def _of_mates(self, number: int, tokens: int) -> dict[int, float]:
        mates = self.mates(number)
        return {each: loss for each, loss in self._losses.get(tokens, {}).items() if each in mates}

    def _ranked(self, number: int, tokens: int) -> Sequence[int]:
        losses = self._of_mates(number, tokens)
        return sorted(losses, key=lambda each: (losses[each], each))


def with_settings(optimizer: Mapping[str, object], settings: Settings) -> dict[str, object]:
    """An optimiser as plain data with other values for some of its settings."""
    flat = {**flatten({"optimizer": optimizer}), **settings}
    changed: dict[str, object] = unflatten(flat)["optimizer"]
    return changed


def _times(domain: FloatRange, value: float, factor: float) -> float:
    multiplied = 1.0 - (1.0 - value) * factor if domain.live == "rest" else value * factor
    return min(max(multiplied, domain.low), domain.high)
