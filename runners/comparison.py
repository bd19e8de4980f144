"""Whether two trainings of one spec are the same, number by number, and what to make of it when they are not."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from search_space.records import Metric, Status, TrialResult, TrialSpec

CLOCK = frozenset(
    {
        Metric.SECONDS,
        Metric.SECONDS_BUILD,
        Metric.SECONDS_TRAIN,
        Metric.SECONDS_EVALUATE,
        Metric.SECONDS_DIAGNOSE,
        Metric.TOKENS_PER_SECOND,
        Metric.PEAK_BYTES,
    }
)
"""Metrics that the clock or the memory allocator decides; no training repeats them."""
CURVE_ONLY = (Status.TIMED_OUT, Status.PREEMPTED, Status.OUT_OF_MEMORY, Status.FAILED)
"""Statuses whose closing metrics depend on when the outside world struck; only readings are compared."""
SPREADS = 2.0 * math.sqrt(2.0)
"""Standard deviations of one run within which two runs of one recipe may differ."""


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """One number that came out differently; an absent number is None."""

    name: str
    tokens: int
    recorded: float | None
    replayed: float | None

    @property
    def size(self) -> float:
        """Absolute difference; infinite where one side is absent."""
        if self.recorded is None or self.replayed is None:
            return math.inf
        return abs(self.recorded - self.replayed)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How much final losses of one candidate vary in a search."""

    deviation: float | None
    """Pooled standard deviation over seeds; None when the search has no repeated finals."""
    replicas: int


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """What a replay came to."""

    run: str
    recorded_status: str
    replayed_status: str
    deterministic: bool
    """Whether the record promises bit-equality."""
    bit_equal: bool
    compared: int
    """Numbers compared: readings and closing metrics that no clock decides."""
    deviations: tuple[Deviation, ...]
    recorded_loss: float | None
    replayed_loss: float | None
    spread: Spread
    within_spread: bool | None
    """Whether the final losses agree within the seed-to-seed spread; None when that is unknown."""
    code: tuple[str, ...]
    """Differences of code and packages between the record and here."""
    machine: tuple[str, ...]
    """Differences of the conditions under which the two trainings ran."""

    @property
    def good(self) -> bool:
        """Bit-equal, or within the spread where the record does not promise more."""
        return self.bit_equal or (not self.deterministic and self.within_spread is True)

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        plain = asdict(self)
        plain["good"] = self.good
        plain["deviations"] = [asdict(deviation) for deviation in self.deviations]
        return plain

    def text(self) -> str:
        """For a person: the verdict first, then what differs and by how much."""
        lines = [f"{self.run}: {self.verdict()}"]
        if self.recorded_status != self.replayed_status:
            lines.append(f"  status: recorded {self.recorded_status}, replayed {self.replayed_status}")
        for deviation in self.deviations[:5]:
            at = f" at {deviation.tokens:,} tokens" if deviation.tokens >= 0 else ""
            lines.append(f"  {deviation.name}{at}: recorded {deviation.recorded!r}, replayed {deviation.replayed!r}")
        if len(self.deviations) > 5:
            worst = max(self.deviations, key=lambda deviation: deviation.size)
            lines.append(f"  ... {len(self.deviations)} numbers differ, the largest by {worst.size:.3g} ({worst.name})")
        for title, differences in (("code and packages", self.code), ("conditions", self.machine)):
            lines.append(f"  {title}: {'as recorded' if not differences else ''}".rstrip())
            lines += [f"    {difference}" for difference in differences]
        return "\n".join(lines)

    def verdict(self) -> str:
        """The outcome in one line."""
        if self.bit_equal:
            return f"bit-equal in all {self.compared} numbers"
        wanted = "the record is deterministic, so this is a failure" if self.deterministic else "the record allows that"
        if self.recorded_status != self.replayed_status:
            return f"did not end as recorded ({wanted})"
        if self.within_spread is None:
            return f"not bit-equal ({wanted}); the run-to-run spread is unknown: the search has no repeated finals"
        relation = "within" if self.within_spread else "beyond"
        return (
            f"not bit-equal ({wanted}); the final loss is {relation} the spread of {self.spread.replicas} finals "
            f"(standard deviation {self.spread.deviation:.3g})"
        )


def compare(
    *,
    run: str,
    spec: TrialSpec,
    recorded: TrialResult,
    replayed: TrialResult,
    spread: Spread,
    code: Sequence[str],
) -> ReplayReport:
    """The report on a recorded and a repeated training."""
    pairs = list(_pairs(recorded, replayed))
    deviations = tuple(pair for pair in pairs if pair.recorded != pair.replayed)
    stopped = recorded.status in (Status.TIMED_OUT, Status.PREEMPTED) and replayed.status == Status.PRUNED
    same_end = recorded.status == replayed.status or stopped
    losses = recorded.metrics.get(Metric.LOSS), replayed.metrics.get(Metric.LOSS)
    return ReplayReport(
        run=run,
        recorded_status=str(recorded.status),
        replayed_status=str(recorded.status if stopped else replayed.status),
        deterministic=spec.deterministic,
        bit_equal=not deviations and same_end,
        compared=len(pairs),
        deviations=deviations,
        recorded_loss=losses[0],
        replayed_loss=losses[1],
        spread=spread,
        within_spread=_within(losses, spread) if same_end else False,
        code=tuple(code),
        machine=tuple(_conditions(recorded.environment, replayed.environment)),
    )


def _within(losses: tuple[float | None, float | None], spread: Spread) -> bool | None:
    if spread.deviation is None:
        return None
    if losses[0] is None or losses[1] is None:
        return losses[0] == losses[1]
    return abs(losses[0] - losses[1]) <= SPREADS * spread.deviation


def _pairs(recorded: TrialResult, replayed: TrialResult) -> Iterator[Deviation]:
    before = {reading.tokens: reading for reading in recorded.curve}
    after = {reading.tokens: reading for reading in replayed.curve}
    for tokens in sorted(before.keys() | after.keys()):
        one, two = before.get(tokens), after.get(tokens)
        for name, field in ((Metric.VALIDATION_CURVE, "loss"), (Metric.TRAIN_CURVE, "train_loss")):
            yield Deviation(
                name=name,
                tokens=tokens,
                recorded=getattr(one, field, None),
                replayed=getattr(two, field, None),
            )
    looks = {checkup.tokens: checkup for checkup in recorded.checkups}
    again = {checkup.tokens: checkup for checkup in replayed.checkups}
    for tokens in sorted(looks.keys() | again.keys()):
        numbers, others = (held[tokens].metrics if tokens in held else {} for held in (looks, again))
        for name in sorted(numbers.keys() | others.keys()):
            yield Deviation(name=name, tokens=tokens, recorded=numbers.get(name), replayed=others.get(name))
    if recorded.status in CURVE_ONLY:
        return
    for name in sorted((recorded.metrics.keys() | replayed.metrics.keys()) - CLOCK):
        yield Deviation(name=name, tokens=-1, recorded=recorded.metrics.get(name), replayed=replayed.metrics.get(name))


def _conditions(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        if before.get(name, "") != after.get(name, "") and not name.startswith("env/"):
            yield f"{name}: recorded {before.get(name) or 'none'}, here {after.get(name) or 'none'}"


def spread_of(losses: Mapping[str, Sequence[float]]) -> Spread:
    """The pooled standard deviation of repeated final losses, by candidate."""
    groups = [values for values in losses.values() if len(values) > 1]
    if not groups:
        return Spread(deviation=None, replicas=0)
    squares = sum(statistics.variance(values) * (len(values) - 1) for values in groups)
    freedom = sum(len(values) - 1 for values in groups)
    return Spread(deviation=math.sqrt(squares / freedom), replicas=sum(len(values) for values in groups))
