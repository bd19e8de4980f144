"""Samplers: points worth trying next, as a pure function of the seed, the trial number and the history given.

Optuna's samplers run in memory on a copy of that history; nothing of their state is kept between proposals.
"""

import copy
import dataclasses
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from runners.evolution import CmaesSampler, EvolutionSampler, Nsga2Sampler
from runners.history import MOST_SEEN, AbstractSampler, Fate, Told
from runners.ledger import distribution
from search_space.canon import seed_from
from search_space.domains import Domain, Scalar
from search_space.errors import UserError
from search_space.space import Space, enumerate_all, random_point, searched, size, walk

if TYPE_CHECKING:
    from search_space.experiment import Experiment

STARTUP_TRIALS = 10
MODEL_DRAWS = 16
"""Draws from a model of the history before plain random ones take over for this proposal."""
MOST_GRID_POINTS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class RandomSampler(AbstractSampler):
    """Independent uniform draws."""

    space: Space
    seed: int

    def draws(self, number: int, history: Sequence[Told]) -> Iterator[dict[str, Scalar]]:
        for attempt in itertools.count():
            yield random_point(self.space, random.Random(seed_from(self.seed, number, attempt)))


class GridSampler(AbstractSampler):
    """Every point once, in declared order; the last field moves fastest."""

    ends = True

    def __init__(self, space: Space) -> None:
        self._points = enumerate_all(space)
        self._fresh = True

    def draws(self, number: int, history: Sequence[Told]) -> Iterator[dict[str, Scalar]]:
        last = next((told.point for told in reversed(history) if told.drawn), None)
        if self._fresh and last is not None:
            self._points = itertools.islice(itertools.dropwhile(lambda point: point != last, self._points), 1, None)
        self._fresh = False
        # A `yield from` would close the iterator together with this generator; the next proposal goes on with it.
        while (point := next(self._points, None)) is not None:
            yield point


@dataclass(frozen=True, kw_only=True)
class ModelSampler(AbstractSampler):
    """Draws from an Optuna sampler that saw the history; refused draws stay in its memory as running trials."""

    space: Space
    seed: int
    directions: int
    """How many objectives there are; all are minimised."""
    make: Callable[[int], BaseSampler]
    """The Optuna sampler of a seed."""
    knows_pruned: bool
    """Whether the sampler understands pruned trials of one objective; else they count as ended with the last loss."""

    def draws(self, number: int, history: Sequence[Told]) -> Iterator[dict[str, Scalar]]:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = InMemoryStorage()
        study = optuna.create_study(storage=storage, directions=["minimize"] * self.directions)
        bad = _worst(history, self.directions)
        known = {path: distribution(domain) for path, domain in searched(self.space).items()}
        for told in history:
            if told.fate is Fate.PRUNED and (self.directions > 1 or not self.knows_pruned):
                told = dataclasses.replace(told, fate=Fate.OK if told.values else Fate.BROKEN)
            storage.create_new_trial(study._study_id, _as_frozen(told, known, bad))
        for attempt in range(MODEL_DRAWS):
            study.sampler = self.make(seed_from(self.seed, number, attempt) % 2**32)
            trial = study.ask()
            yield walk(self.space, lambda path, domain, trial=trial: _suggest(trial, path, domain))
        yield from RandomSampler(space=self.space, seed=seed_from(self.seed, "after the model")).draws(number, history)


def _suggest(trial: Trial, path: str, domain: Domain) -> Scalar:
    space = distribution(domain)
    if isinstance(space, CategoricalDistribution):
        value: Scalar = trial.suggest_categorical(path, space.choices)  # type: ignore[assignment]
        return value
    if isinstance(space, IntDistribution):
        return trial.suggest_int(path, space.low, space.high, step=space.step, log=space.log)
    assert isinstance(space, FloatDistribution)
    return trial.suggest_float(path, space.low, space.high, log=space.log)


class _Shown(FrozenTrial):
    """A trial that Optuna's memory takes as it is; its own deep copy of each costs half of a proposal."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return copy.copy(self)


def _as_frozen(told: Told, known: Mapping[str, BaseDistribution], bad: Sequence[float]) -> FrozenTrial:
    distributions = {path: held for path, held in known.items() if path in told.point}
    state = {Fate.RUNNING: TrialState.RUNNING, Fate.PRUNED: TrialState.PRUNED}.get(told.fate, TrialState.COMPLETE)
    values = {Fate.OK: list(told.values), Fate.BROKEN: list(bad)}.get(told.fate)
    trial = _Shown(
        number=told.number,
        trial_id=-1,
        state=state,
        value=None,
        values=values,
        datetime_start=None,
        datetime_complete=None,
        params={path: told.point[path] for path in distributions},
        distributions=distributions,
        user_attrs={},
        system_attrs={},
        intermediate_values={told.last_tokens: told.last_loss} if told.fate is Fate.PRUNED else {},
    )
    if told.fate in (Fate.OK, Fate.BROKEN):
        trial.set_constraint("broken", float(told.fate is Fate.BROKEN))
    return trial


def _worst(history: Sequence[Told], directions: int) -> list[float]:
    """The value of a trial that has none: as bad as the worst so far in each objective."""
    values = [told.values for told in history if told.fate is Fate.OK]
    return [max((value[i] for value in values), default=0.0) for i in range(directions)]


def _tpe(seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        # Grouping by the conditions of the tree is marked experimental; leaving it out ignores half the fields.
        warnings.simplefilter("ignore", ExperimentalWarning)
        return TPESampler(
            seed=seed,
            n_startup_trials=STARTUP_TRIALS,
            n_ei_candidates=24,
            multivariate=True,
            group=True,
            constant_liar=True,
        )


def _gp(seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        # The Gaussian process sampler is marked experimental as a whole.
        warnings.simplefilter("ignore", ExperimentalWarning)
        return GPSampler(
            seed=seed, independent_sampler=None, n_startup_trials=STARTUP_TRIALS, deterministic_objective=False
        )


def make_sampler(experiment: "Experiment") -> AbstractSampler:
    """The sampler an experiment asks for; that it suits the space was checked when the experiment was read."""
    search = experiment.search
    return sampler_of(search.sampler, experiment.space, search.seed, len(experiment.objectives), search.population)


def sampler_of(kind: str, space: Space, seed: int, objectives: int = 1, population: int = 8) -> AbstractSampler:
    """The sampler of a kind for a space and so many objectives; `population` is for those that evolve one."""
    makers: dict[str, Callable[[], AbstractSampler]] = {
        "random": lambda: RandomSampler(space=space, seed=seed),
        "tpe": lambda: ModelSampler(space=space, seed=seed, directions=objectives, make=_tpe, knows_pruned=True),
        "grid": lambda: _grid(space),
        "gp": lambda: ModelSampler(space=space, seed=seed, directions=objectives, make=_gp, knows_pruned=False),
        "cmaes": lambda: CmaesSampler(space=space, seed=seed, fields=searched(space)),
        "nsga2": lambda: Nsga2Sampler(space=space, seed=seed, population=_seen(population)),
        "evolution": lambda: EvolutionSampler(space=space, seed=seed, population=_seen(population)),
    }
    return makers[kind]()


def _grid(space: Space) -> AbstractSampler:
    if size(space) > MOST_GRID_POINTS:
        raise UserError(
            f"search.sampler: grid would go through {size(space):.3g} points, at most {MOST_GRID_POINTS} are allowed; "
            "narrow the space or write sampler: tpe"
        )
    return GridSampler(space)


def _seen(population: int) -> int:
    """The population, which must be seen whole."""
    if population > MOST_SEEN // 2:
        raise UserError(
            f"search.population={population}: a proposal looks at {MOST_SEEN} trials, so at most "
            f"{MOST_SEEN // 2} can be a population; write a smaller one"
        )
    return population
