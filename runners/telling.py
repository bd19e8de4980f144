"""Stored trials in the words of those who ask: samplers, Optuna's tables, the driver."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from optuna.study import StudyDirection

from blocks.cost import Cost
from runners.candidate import Resolved, rebuild
from runners.history import Fate, Told
from runners.ledger import Entry
from runners.pruning import last_reading
from search_space import domains
from search_space.domains import Domain, Scalar
from search_space.records import Metric, Reading, Status
from search_space.space import Space, walk

if TYPE_CHECKING:
    from search_space.experiment import Experiment

_MAXIMISED = (Metric.TOKENS_PER_SECOND,)


def directions(objectives: Sequence[str]) -> list[StudyDirection]:
    """Which way each objective is better."""
    return [StudyDirection.MAXIMIZE if name in _MAXIMISED else StudyDirection.MINIMIZE for name in objectives]


def objective_values(objectives: Sequence[str], entry: Entry) -> list[float]:
    """The objectives of a finished trial, the last loss of one pruned under the loss alone, else nothing.

    A finished trial that lacks an objective, as one that was not finite is never stored, has none at all.
    """
    result = entry.result
    if result is None:
        return []
    if result.status is Status.OK:
        known = {**entry.cost, **result.metrics}
        return [known[name] for name in objectives] if known.keys() >= set(objectives) else []
    last = last_reading(result) if result.status is Status.PRUNED and list(objectives) == [Metric.LOSS] else None
    return [] if last is None else [last.loss]


def others_at(objectives: Sequence[str], entry: Entry, tokens: int) -> tuple[float, ...]:
    """The objectives beside the loss as they were known after so many tokens, lower is better."""
    known = {**entry.cost, Metric.TOKENS_PER_SECOND: entry.speeds.get(tokens, 0.0)}
    return tuple(_minimised(name, known[name]) for name in objectives if name != Metric.LOSS)


def speed_of(objectives: Sequence[str], reading: Reading) -> float:
    """Tokens per second up to the reading; 0 where that is no objective."""
    return reading.tokens / reading.seconds if Metric.TOKENS_PER_SECOND in objectives and reading.seconds else 0.0


def _minimised(name: str, value: float) -> float:
    return -value if name in _MAXIMISED else value


def as_told(entry: Entry, point: Mapping[str, Scalar], objectives: Sequence[str], generation: int) -> Told:
    """The trial as a sampler of this generation sees it; `point` is its point in the space searched now."""
    drawn = bool(entry.marks["drawn"]) and entry.generation == generation
    result = entry.result
    if result is None:
        return Told(number=entry.number, point=point, fate=Fate.RUNNING, drawn=drawn)
    found = objective_values(objectives, entry)
    if result.status is Status.OK and found:
        values = tuple(_minimised(name, value) for name, value in zip(objectives, found, strict=True))
        return Told(number=entry.number, point=point, fate=Fate.OK, drawn=drawn, values=values)
    last = last_reading(result) if result.status is Status.PRUNED else None
    if last is None:
        return Told(number=entry.number, point=point, fate=Fate.BROKEN, drawn=drawn)
    return Told(
        number=entry.number,
        point=point,
        fate=Fate.PRUNED,
        drawn=drawn,
        values=_when_pruned(objectives, entry, last.loss),
        last_tokens=last.tokens,
        last_loss=last.loss,
    )


def _when_pruned(objectives: Sequence[str], entry: Entry, loss: float) -> tuple[float, ...]:
    """The objectives of a pruned trial with its last loss; empty when one of them is not known."""
    assert entry.result is not None
    known = {**entry.cost, **entry.result.metrics, Metric.LOSS: loss}
    if not known.keys() >= set(objectives):
        return ()
    return tuple(_minimised(name, known[name]) for name in objectives)


def told_of(entry: Entry, experiment: "Experiment", generation: int) -> Told | None:
    """The trial as a sampler of a generation sees it; None when its point does not lie in the space."""
    point = completed(experiment.space, entry.point)
    return None if point is None else as_told(entry, point, experiment.objectives, generation)


def completed(space: Space, point: Mapping[str, Scalar]) -> dict[str, Scalar] | None:
    """The point with defaults where the space has paths that it lacks; None when it does not lie in the space."""

    def ask(path: str, domain: Domain) -> Scalar:
        value = point.get(path, domain.default)
        if not domains.contains(domain, value):
            raise LookupError(path)
        return value

    try:
        whole = walk(space, ask)
    except LookupError:
        return None
    agrees = all(path in whole and domains.same(whole[path], value) for path, value in point.items())
    return whole if agrees else None


def live_domains(space: Space, searched: Mapping[str, Domain], point: Mapping[str, Scalar]) -> dict[str, Domain]:
    """The searched paths of a point; none when it does not lie in the space (a baseline need not)."""
    if completed(space, point) is None:
        return {}
    return {path: domain for path, domain in searched.items() if path in point}


def as_resolved(entry: Entry) -> Resolved:
    """What was resolved when the trial was stored, whatever the code would make of its point today."""
    return Resolved(
        flat=dict(entry.point),
        candidate=rebuild(entry.spec),
        cost=Cost(**entry.cost),  # type: ignore[arg-type]
        arch_id=entry.arch_id,
    )
