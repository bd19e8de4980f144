"""Who takes part in the finals of a search: the baseline and the best candidates, fixed before anything is trained."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blocks.cost import Cost
from blocks.families import InfeasibleArchitecture
from blocks.registry import decode, encode
from runners.candidate import Candidate, Resolved, resolve
from runners.ledger import Ledger
from runners.study import Study
from runners.telling import as_resolved
from search_space.canon import digest
from search_space.contest import Contest, Judge, Ranked
from search_space.domains import Domain, FloatRange, Scalar
from search_space.errors import UserError
from search_space.records import Metric, Status
from search_space.settings import ContestSpec
from search_space.space import walk

NOTE = "assay.contest"
"""Under which the study keeps who takes part and on what terms."""
_FARTHEST = 20
"""Factors of 2 that a learning rate is moved at most, whatever its domain allows."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Whom the best candidates are to beat."""

    point: Mapping[str, Scalar]
    """A point of the experiment's full space."""
    source: str
    """Where it comes from, in words: a file, a run, or the experiment's own baseline."""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One of those who meet, at its own learning rate."""

    resolved: Resolved
    source: str
    """NAME/NUMBER of the trial it is, or where the baseline comes from."""
    loss: float
    """Of that trial in the search; 0 for the baseline."""

    def at(self, place: int) -> Resolved:
        """With its learning rate moved by factors of 2."""
        optimizer = self.resolved.candidate.optimizer
        rate = optimizer.learning_rate * 2.0**place
        moved = dataclasses.replace(optimizer, learning_rate=rate)  # type: ignore[type-var]
        return dataclasses.replace(
            self.resolved,
            flat={**self.resolved.flat, _rate_path(self.resolved): rate},
            candidate=dataclasses.replace(self.resolved.candidate, optimizer=moved),
        )


@dataclass(frozen=True, kw_only=True)
class Lineup:
    """A contest and who takes part, the baseline first."""

    contest: Contest
    contestants: tuple[Contestant, ...]
    shown: str
    """What the tracking store says of it, as JSON."""


def shown_terms(noted: Mapping[str, Any]) -> str:
    """What the tracking store says of the terms that a ledger of finals has noted, as JSON."""
    entered = noted["contestants"]
    searched = [plain.get("loss", 0.0) for plain in entered[1:]]
    return json.dumps({**noted, "contestants": [plain["source"] for plain in entered], "searched": searched})


def line_up(study: Study, ledger: Ledger, spec: ContestSpec, baseline: Baseline, judge: Judge) -> Lineup:
    """Who takes part: as noted in the ledger of the finals, else chosen and noted now.

    UserError where a contest was begun on other terms, or nobody can meet the baseline.
    """
    noted = ledger.noted(NOTE, None)
    base = _entered(study, baseline)
    if noted is None:
        contestants = [base, *_best(study, spec, base, judge)]
        noted = {**dataclasses.asdict(spec), "contestants": [_plain(contestant) for contestant in contestants]}
    else:
        _refuse_other_terms(study.experiment.name, noted, spec, base)
        noted = {**noted, "max_seeds": max(spec.max_seeds, noted["max_seeds"])}
    ledger.note(NOTE, noted)
    entered = tuple(_contestant(plain) for plain in noted["contestants"])
    terms = ContestSpec(**{field.name: noted[field.name] for field in dataclasses.fields(ContestSpec)})
    reach = tuple(_reach(study, contestant) for contestant in entered)
    searched = tuple(contestant.loss for contestant in entered[1:])
    contest = Contest(spec=terms, reach=reach, searched=searched)
    return Lineup(contest=contest, contestants=entered, shown=shown_terms(noted))


def _best(study: Study, spec: ContestSpec, base: Contestant, judge: Judge) -> list[Contestant]:
    """The best candidates of the search, by final validation loss: twice as many as there are places, with sweeps."""
    finished = {
        entry.number: entry
        for entry in study.trials()
        if entry.result is not None and entry.result.status is Status.OK and Metric.LOSS in entry.result.metrics
    }
    ranked = [
        Ranked(
            number=number,
            loss=entry.result.metrics[Metric.LOSS] if entry.result else math.nan,
            identity=_identity(as_resolved(entry)),
        )
        for number, entry in finished.items()
    ]
    chosen = judge.candidates(ranked, spec.entrants, _identity(base.resolved))
    if not chosen:
        name = study.experiment.name
        raise UserError(
            f"search {name!r}: none of its {len(finished)} finished trials differs from the baseline in more than the "
            f"learning rate, so nobody can meet it; run more trials, or name another baseline (--baseline)"
        )
    name = study.experiment.name
    losses = {trial.number: trial.loss for trial in ranked}
    return [
        Contestant(resolved=as_resolved(finished[number]), source=f"{name}/{number}", loss=losses[number])
        for number in chosen
    ]


def _entered(study: Study, baseline: Baseline) -> Contestant:
    try:
        study.guard.check(baseline.point, study.shape)
        resolved = resolve(baseline.point, study.experiment, study.shape)
    except InfeasibleArchitecture as error:
        raise UserError(f"baseline {baseline.source}: cannot be trained under this experiment: {error}") from error
    return Contestant(resolved=resolved, source=baseline.source, loss=0.0)


def _refuse_other_terms(name: str, noted: Mapping[str, Any], spec: ContestSpec, base: Contestant) -> None:
    asked = {key: value for key, value in dataclasses.asdict(spec).items() if key != "max_seeds"}
    other = [f"{key} was {noted[key]}, now {value}" for key, value in asked.items() if noted[key] != value]
    first = _contestant(noted["contestants"][0])
    if _identity(first.resolved) != _identity(base.resolved):
        other.append(f"the baseline was {first.source}, now {base.source}")
    if other:
        raise UserError(
            f"search {name!r}: its finals were begun on other terms ({'; '.join(other)}), and terms that change once "
            f"results are known void every verdict; ask for the same (more --max-seeds are welcome), or run the "
            f"search under another --name"
        )


def _identity(resolved: Resolved) -> str:
    """Equal for candidates that differ in nothing but their learning rate."""
    plain: dict[str, Any] = json.loads(json.dumps(encode(resolved.candidate)))
    del plain["optimizer"][plain["optimizer"]["kind"]]["learning_rate"]
    return digest(plain)


def _plain(contestant: Contestant) -> dict[str, Any]:
    resolved = contestant.resolved
    return {
        "source": contestant.source,
        "loss": contestant.loss,
        "point": resolved.flat,
        "candidate": encode(resolved.candidate),
        "cost": dataclasses.asdict(resolved.cost),
        "arch_id": resolved.arch_id,
    }


def _contestant(plain: Mapping[str, Any]) -> Contestant:
    resolved = Resolved(
        flat=dict(plain["point"]),
        candidate=decode(Candidate, plain["candidate"]),
        cost=Cost(**plain["cost"]),
        arch_id=plain["arch_id"],
    )
    # Contests that were begun when every candidate had a place noted no losses, and need none.
    return Contestant(resolved=resolved, source=plain["source"], loss=plain.get("loss", 0.0))


def _rate_path(resolved: Resolved) -> str:
    return f"optimizer.{resolved.candidate.optimizer.kind}.learning_rate"


def _reach(study: Study, contestant: Contestant) -> tuple[int, int]:
    """How many factors of 2 the learning rate may go down and up within what its optimiser takes."""
    rate_path, flat = _rate_path(contestant.resolved), contestant.resolved.flat
    domains: dict[str, Domain] = {}

    def ask(path: str, domain: Domain) -> Scalar:
        domains[path] = domain
        return flat.get(path, domain.default)

    walk(study.experiment.full, ask)
    domain, rate = domains.get(rate_path), contestant.resolved.candidate.optimizer.learning_rate
    if not isinstance(domain, FloatRange):
        return -_FARTHEST, _FARTHEST
    lowest = math.ceil(math.log2(domain.low / rate) - 1e-9) if domain.low > 0 else -_FARTHEST
    highest = math.floor(math.log2(domain.high / rate) + 1e-9)
    return max(min(lowest, 0), -_FARTHEST), min(max(highest, 0), _FARTHEST)
