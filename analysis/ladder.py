"""A ladder: the same candidates at growing sizes, as the tracking store holds them, and what to say of the target.

Trainings that chose a learning rate are no part of it.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from analysis.compare import interval_text, number_text
from analysis.extrapolation import Measured, Mixture, difference_at, loss_at, pooled
from analysis.fastread import RunRow, StoreError
from analysis.load import find_run, list_runs
from analysis.projection import CHECKED, LEAST_SIZES, Projection, measured_at, paired, project, size_text
from search_space.records import Metric, Stage, Status, Tag

_ENDED = frozenset({Status.OK, Status.DIVERGED, Status.OUT_OF_MEMORY, Status.TIMED_OUT, Status.FAILED})


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training of one candidate at one size."""

    candidate: str
    rung: int
    """The number of parameters that was asked for."""
    replica: int
    number: int
    status: str
    loss: float
    """NaN unless it ended well."""
    params: float
    tokens: float
    learning_rate: float
    d_model: int
    layers: int
    seconds: float
    untuned: str
    """Why its learning rate is not known to be the best; empty otherwise."""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """All that a store holds of a ladder."""

    name: str
    unit: str
    """Of the losses."""
    metric: str
    """The measure that is compared: the loss on the test split where every training read it."""
    target: float
    """Parameters."""
    sure: float
    candidates: Mapping[str, str]
    """The run that each candidate was taken from, by label."""
    rules: Sequence[str]
    """How sizes, learning rates, budgets and seeds were chosen, in sentences."""
    trainings: Sequence[Training]

    def losses(self, candidate: str) -> dict[float, dict[int, float]]:
        """The losses of a candidate's trainings that ended well, by the size asked for and replica."""
        found: dict[float, dict[int, float]] = {}
        for one in self.trainings:
            if one.candidate == candidate and math.isfinite(one.loss):
                found.setdefault(float(one.rung), {})[one.replica] = one.loss
        return found

    def ended_badly(self, candidate: str) -> int:
        """How many of a candidate's trainings ended otherwise than well."""
        mine = [one for one in self.trainings if one.candidate == candidate and one.status in _ENDED]
        return sum(one.status != Status.OK for one in mine)


def read_ladder(uri: str, name: str) -> Ladder:
    """The ladder of this name; StoreError when the store holds none."""
    rows = [row for row in list_runs(uri, name) if row.stage == Stage.LADDER]
    if not rows:
        raise StoreError(f"{name!r}: holds no training of a ladder; train one: assay ladder RUN... --sizes 1M,3M,10M")
    parent = find_run(uri, rows[0].tags["mlflow.parentRunId"])
    asked: dict[str, Any] = json.loads(parent.tags[Tag.LADDER])
    done = [row for row in rows if row.status == Status.OK]
    metric = Metric.TEST_LOSS if all(Metric.TEST_LOSS in row.metrics for row in done) else Metric.LOSS
    return Ladder(
        name=name,
        unit=f"nats/{parent.tags.get(Tag.UNIT, 'token')}",
        metric=metric,
        target=float(asked["target"]),
        sure=float(asked["sure"]),
        candidates=dict(asked["candidates"]),
        rules=tuple(asked["rules"]),
        trainings=tuple(_training(row, metric) for row in rows),
    )


def _training(row: RunRow, metric: str) -> Training:
    rates = [value for path, value in row.params.items() if path.endswith(".learning_rate")]
    return Training(
        candidate=row.tags[Tag.CANDIDATE],
        rung=int(row.tags[Tag.RUNG]),
        replica=int(row.tags[Tag.REPLICA]),
        number=row.number,
        status=row.status,
        loss=row.metrics.get(metric, math.nan) if row.status == Status.OK else math.nan,
        params=row.metrics.get(Metric.PARAMS, math.nan),
        tokens=row.metrics.get(Metric.TOKENS, math.nan),
        learning_rate=float(rates[0]) if rates else math.nan,
        d_model=int(row.params.get("model.d_model", 0)),
        layers=int(row.params.get("model.layers", 0)),
        seconds=row.metrics.get(Metric.SECONDS, math.nan),
        untuned=row.tags.get(Tag.UNTUNED, ""),
    )


def projections(ladder: Ladder) -> list[Projection]:
    """Every pair of candidates at the target."""
    return [
        project(
            (one, ladder.losses(one), ladder.ended_badly(one)),
            (other, ladder.losses(other), ladder.ended_badly(other)),
            target=ladder.target,
            sure=ladder.sure,
        )
        for one, other in combinations(ladder.candidates, 2)
    ]


def curve_of(ladder: Ladder, candidate: str, wanted: Sequence[float]) -> Mixture | None:
    """What a candidate's own loss is believed to be at other sizes; None with too little to go by."""
    losses = ladder.losses(candidate)
    groups = [list(losses[size].values()) for size in sorted(losses)]
    if len(groups) < LEAST_SIZES or pooled(groups)[1] < 1:
        return None
    return loss_at(measured_at(sorted(losses), groups), wanted)


def gap_of(ladder: Ladder, one: str, other: str, wanted: Sequence[float]) -> tuple[Measured, Mixture] | None:
    """The measured differences, first minus second, and what is believed of them at other sizes."""
    measured = paired(ladder.losses(one), ladder.losses(other))
    if measured is None or len(measured[0].sizes) < LEAST_SIZES:
        return None
    return measured[0], difference_at(*measured, wanted)


def ladder_text(ladder: Ladder, found: Sequence[Projection]) -> str:
    """The verdicts, and what must be known beside them, for a terminal."""
    lines = [projection.text for projection in found]
    for projection in found:
        if projection.check is not None:
            lines.append(check_text(projection))
    lines += cautions(ladder)
    return "\n".join(lines)


def check_text(projection: Projection) -> str:
    """Whether the smaller sizes foretold the largest."""
    check = projection.check
    assert check is not None, "a projection without a check has nothing to tell"
    word = "inside" if check.holds else "OUTSIDE"
    return (
        f"held-out check: from the smaller sizes, {projection.first} minus {projection.second} at "
        f"{size_text(check.size)} was expected in {interval_text(check.low, check.high)} ({CHECKED:.0%}); measured "
        f"{number_text(check.measured)}, {word}"
    ).replace("%", " %")


def cautions(ladder: Ladder) -> list[str]:
    """What makes the ladder less sure than its interval says."""
    untuned = dict.fromkeys(f"{one.candidate}: {one.untuned}" for one in ladder.trainings if one.untuned)
    said = [f"not tuned: {words}" for words in untuned]
    for label in ladder.candidates:
        bad = ladder.ended_badly(label)
        said += [f"{label}: {bad} of its trainings ended badly"] if bad else []
    return said
