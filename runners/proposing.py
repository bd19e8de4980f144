"""From what was told of earlier trials to the next point: a function of the seed, the number and that history alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from runners.candidate import Resolved, make_spec, resolve
from runners.feasibility import Foresight, Vetted, no_veto
from runners.finding import Finder, Found
from runners.guard import Guard
from runners.history import Told, select, shown
from runners.ledger import Entry
from runners.samplers import make_sampler
from runners.stopwatch import Stopwatch
from runners.telling import as_resolved
from runners.warm import Earlier
from search_space.canon import seed_from
from search_space.domains import Scalar
from search_space.records import Seeds, TrialSpec

if TYPE_CHECKING:
    from runners.tasks.data import TaskShape
    from search_space.experiment import Experiment


@dataclass(frozen=True, kw_only=True)
class Proposed:
    """A stored trial that is to be run."""

    number: int
    generation: int
    resolved: Resolved
    spec: TrialSpec

    @classmethod
    def of(cls, entry: Entry) -> Self:
        """A stored trial, as it was resolved when it was stored."""
        return cls(number=entry.number, generation=entry.generation, resolved=as_resolved(entry), spec=entry.spec)


class Proposer:
    """Finds the next point; it knows which points were tried, and nothing else of what came of them."""

    def __init__(self, experiment: "Experiment", folder: Path) -> None:
        """`folder` is where measured speeds are kept."""
        self.guard = Guard(experiment)
        """To be asked before a point is resolved."""
        self.stopwatch = Stopwatch(folder / "speeds.jsonl", experiment.limits, self.guard)
        self.fingerprint = ""
        self._experiment = experiment
        self._sampler = make_sampler(experiment)
        self._foresight = Foresight(experiment.space, experiment.search.seed)
        self._shape: TaskShape | None = None
        self.earlier = Earlier({}, experiment.space)
        """What earlier searches found."""
        self._finder = Finder(experiment.space, self._resolve, self.stopwatch.check)

    def bind(self, shape: "TaskShape", fingerprint: str, earlier: Earlier) -> Self:
        """Say which data trials are trained on, and what earlier searches found."""
        self._shape, self.fingerprint, self.earlier = shape, fingerprint, earlier
        return self

    @property
    def shape(self) -> "TaskShape":
        """What a model must fit."""
        assert self._shape is not None, "bind() says which data is trained on"
        return self._shape

    @property
    def ended(self) -> str:
        """Why the last search for a point found none."""
        return self._finder.ended

    def know(self, entry: Entry) -> None:
        """The trial's point was tried."""
        self._finder.know(entry.point, entry.spec.candidate)

    def find(
        self, number: int, own: Sequence[Told], best: Sequence[Told] | None = None
    ) -> tuple[Found | None, dict[str, Any]]:
        """The point of trial `number` after what was told of the search's trials, and the record of its choice.

        `own` is sorted by number; `best` are the best of them, as `select` takes them.
        """
        chosen = select(own, best)
        earlier = self.earlier.before(chosen, always=self._sampler.sees_all)
        seen = [*earlier, *(own if self._sampler.sees_all else chosen)]
        veto = no_veto if self._sampler.ends else self._foresight.veto(number, [*earlier, *chosen])
        draws = Vetted(self._sampler.draws(number, seen), veto)
        found, redraws = self._finder.find(draws, ends=self._sampler.ends)
        return found, {"redraws": redraws, "history": shown(seen), "drawn": True}

    def resolved(self, point: Mapping[str, Scalar]) -> Found:
        """A point that was given instead of drawn; InfeasibleArchitecture when it cannot be trained."""
        found = self._resolve(point)
        self.stopwatch.check(found[1])
        return found

    def _resolve(self, point: Mapping[str, Scalar]) -> Found:
        self.guard.check(point, self.shape)
        resolved = resolve(point, self._experiment, self.shape)
        return resolved, self._spec(resolved)

    def _spec(self, resolved: Resolved) -> TrialSpec:
        seed = self._experiment.search.seed
        seeds = Seeds(init=seed_from(seed, "init"), data=seed_from(seed, "data"), dropout=seed_from(seed, "dropout"))
        return make_spec(resolved, self._experiment, fingerprint=self.fingerprint, seeds=seeds)
