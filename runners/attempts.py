"""Attempts at trials: what is to happen after each has ended, and the record of them, which the study keeps.

A trial whose process or machine was taken away goes on from its last checkpoint. One that ran out of memory is run once
more with half the micro-batch, which gives the same loss up to rounding. One that failed is run again as often as
engine.retries says. Every other end is the trial's own.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runners.checkpoints import CheckpointRefused, discard, find
from runners.engine import Job
from runners.heirlooms import Heirlooms
from runners.ledger import Entry
from runners.mutations import own_curve, present_spec, spliced
from search_space.records import Metric, Reading, Stage, Status, Tag, TrialResult, TrialSpec
from search_space.settings import EngineSpec

CHECKPOINTS = "checkpoints"
"""Folder of a search in which trials keep their checkpoints."""
MOST_WITHOUT_PROGRESS = 5
"""How often in a row a trial may be taken away without having got to a further checkpoint."""
_LINES = 10
_SHARE = 4
"""A trial's checkpoint may take the quota over jobs over this: an old and a new one are there at once, and half of the
quota is for trained models."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt that was not the trial's last."""

    status: Status
    reason: str
    began: int
    """Training tokens it went on from; 0: it began anew."""
    reached: int
    """Training tokens it is known to have got to."""
    kept: int
    """Training tokens of the checkpoint it left."""
    micro_batch_tokens: int
    seconds: float
    peak_bytes: float = 0.0
    last_lines: str = ""
    asked: bool = False
    """True when this was the trial's end until somebody asked for another try."""
    proposed: int = 0
    """How many trials had been proposed by then: those saw this end, later ones do not; 0 where it was not noted."""

    @property
    def line(self) -> str:
        """In words: what a reader of the trial's page sees."""
        memory = f", peak memory {self.peak_bytes:,.0f} bytes" if self.peak_bytes else ""
        start = f" from {self.began:,}" if self.began else ""
        return (
            f"{self.status}{start} at {self.reached:,} tokens, micro-batch {self.micro_batch_tokens:,}{memory}: "
            f"{self.reason}"
        )


def attempts_of(entry: Entry) -> tuple[Attempt, ...]:
    """The earlier attempts at a stored trial."""
    return tuple(Attempt(**{**plain, "status": Status(plain["status"])}) for plain in entry.attempts)


def attempts_tag(entry: Entry) -> dict[str, str]:
    """The tag that says how earlier attempts ended, a line each; none where there were none."""
    lines = [f"{number}: {each.line}" for number, each in enumerate(attempts_of(entry), start=1)]
    return {Tag.ATTEMPTS: "\n".join(lines)} if lines else {}


def plain(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    """Attempts as JSON data."""
    return [{**dataclasses.asdict(each), "status": str(each.status)} for each in attempts]


def micro_batch(spec: TrialSpec, attempts: Sequence[Attempt]) -> int:
    """The micro-batch of the next attempt: that of the budget, or half of it after it ran out of memory."""
    short = any(each.status is Status.OUT_OF_MEMORY for each in _current(attempts))
    return (halved(spec) if short else 0) or spec.budget.micro_batch_tokens


def halved(spec: TrialSpec) -> int:
    """The largest micro-batch of at most half of the budget's that fits whole into a batch; 0 for none."""
    length = int(spec.candidate["model"]["train_len"])
    rows, batch = spec.budget.micro_batch_tokens // length, spec.budget.batch_tokens // length
    fitting = (part for part in range(rows // 2, 0, -1) if batch % part == 0)
    return next(fitting, 0) * length


def verdict(spec: TrialSpec, before: Sequence[Attempt], now: Attempt, retries: int) -> Status | None:
    """How the trial has ended with this attempt; None when it is to be run again."""
    current = _current(before)
    if now.status is Status.PREEMPTED:
        row = 1
        for each in reversed(current):
            if each.status is not Status.PREEMPTED or each.kept > each.began:
                break
            row += 1
        stuck = now.kept <= now.began and row >= MOST_WITHOUT_PROGRESS
        return Status.FAILED if stuck else None
    if now.status is Status.OUT_OF_MEMORY:
        tried = any(each.status is Status.OUT_OF_MEMORY for each in current)
        return Status.OUT_OF_MEMORY if tried or not halved(spec) else None
    if now.status is Status.FAILED:
        failures = sum(each.status is Status.FAILED for each in current)
        return Status.FAILED if failures >= retries else None
    return now.status


def _current(attempts: Sequence[Attempt]) -> Sequence[Attempt]:
    """The attempts since somebody last asked for another try."""
    last = max((number for number, each in enumerate(attempts, start=1) if each.asked), default=0)
    return attempts[last:]


@dataclass(frozen=True, kw_only=True)
class Start:
    """An attempt that begins."""

    job: Job
    curve: tuple[Reading, ...]
    """Readings of earlier attempts, up to the checkpoint that it goes on from."""
    began: int
    remarks: tuple[str, ...]
    own: tuple[Reading, ...] = ()
    """What the trial itself had read before it went on from another one's state."""


class Attempts:
    """The attempts at the trials of one stage; `store` keeps them in the study."""

    def __init__(
        self,
        folder: Path,
        stage: Stage,
        engine: EngineSpec,
        store: Callable[[int, list[dict[str, Any]]], None],
        heirlooms: Heirlooms | None = None,
    ) -> None:
        """`folder` is where trials' checkpoints lie, `heirlooms` the states that trials take over from each other."""
        self._heirlooms = heirlooms
        self._folder = folder
        self._stage = stage
        self._engine = engine
        self._store = store
        self._started: dict[int, Start] = {}

    def start(self, entry: Entry, *, weights: Path | None, test: bool) -> Start:
        """The next attempt at a trial, from its checkpoint when it has one that is whole."""
        budgeted = entry.spec.budget.micro_batch_tokens
        used = micro_batch(entry.spec, attempts_of(entry))
        folder, spec, own = self.folder_of(entry), present_spec(entry), own_curve(entry)
        remarks: tuple[str, ...] = ()
        found = None
        if self._heirlooms is not None:
            remark = self._heirlooms.hand_over(entry, folder, used)
            remarks = (remark,) if remark else ()
        try:
            found = find(folder, spec.id, used)
        except CheckpointRefused as refusal:
            remarks = (*remarks, f"{refusal}; trained from the start")
            discard(folder)
        job = Job(
            key=entry.number,
            spec=spec,
            test=test,
            weights=weights,
            micro_batch_tokens=0 if used == budgeted else used,
            checkpoint=folder,
            checkpoint_tokens=self._engine.checkpoint_tokens,
            checkpoint_bytes=self._most_bytes(),
            shared=self._heirlooms.folder_of(entry.generation, entry.number) if self._heirlooms else None,
            shared_tokens=self._heirlooms.interval_tokens if self._heirlooms else 0,
        )
        curve = spliced(found.curve if found else (), own)
        start = Start(job=job, curve=curve, began=found.tokens if found else 0, remarks=remarks, own=own)
        self._started[entry.number] = start
        return start

    def end(self, entry: Entry, result: TrialResult) -> TrialResult | None:
        """What the trial has come to; None when it is to be run again, and then the attempt is stored."""
        start = self._started.pop(entry.number)
        whole = _joined(start, result)
        before = attempts_of(entry)
        now = self._attempt(entry, start, whole)
        status = verdict(entry.spec, before, now, self._engine.retries)
        folder = self.folder_of(entry)
        if status is not None:
            discard(folder)
            return _ended(whole, status, now)
        if now.status is Status.OUT_OF_MEMORY:
            discard(folder)
        self._store(entry.number, plain([*before, now]))
        return None

    def goes_on_elsewhere(self, entry: Entry, result: TrialResult) -> bool:
        """True when an attempt stopped so that its trial goes on from another one's state; the next one does."""
        changed = self._started[entry.number].job.spec != present_spec(entry)
        if not changed or result.status is not Status.PRUNED:
            return False
        del self._started[entry.number]
        return True

    def forget(self, number: int) -> None:
        """Let go of an attempt that is not this driver's any more; its checkpoint is left to the other's."""
        self._started.pop(number, None)

    def _most_bytes(self) -> int:
        """What one checkpoint may take."""
        jobs = max(self._engine.jobs, 1)
        shared = 2 * (self._heirlooms.most + jobs) if self._heirlooms else 0
        return max(self._engine.disk_bytes // (_SHARE * jobs + shared), 1)

    def tidy(self, entries: Sequence[Entry]) -> None:
        """Delete the checkpoints of trials that have ended, which a driver that was killed may have left."""
        running = {self.folder_of(entry).name for entry in entries if entry.result is None}
        for folder in self._folder.glob(f"{self._stage}-*"):
            if folder.name not in running:
                discard(folder)
        if self._heirlooms is not None:
            self._heirlooms.tidy(entries)

    def folder_of(self, entry: Entry) -> Path:
        """Where a trial's checkpoint lies."""
        return self._folder / f"{self._stage}-{entry.generation}-{entry.number}"

    def _attempt(self, entry: Entry, start: Start, result: TrialResult) -> Attempt:
        used = start.job.micro_batch_tokens or entry.spec.budget.micro_batch_tokens
        found = None
        if result.status is Status.PREEMPTED:
            # What a later attempt would refuse is no progress.
            with suppress(CheckpointRefused):
                found = find(self.folder_of(entry), start.job.spec.id, used)
        return Attempt(
            status=result.status,
            reason=result.reason,
            began=start.began,
            reached=max(result.tokens, start.began),
            kept=found.tokens if found else 0,
            micro_batch_tokens=used,
            seconds=result.seconds,
            peak_bytes=result.metrics.get(Metric.PEAK_BYTES, 0.0),
            last_lines="\n".join(result.last_lines.splitlines()[-_LINES:]),
        )


def asked_again(entry: Entry, proposed: int) -> list[dict[str, Any]]:
    """The attempts of an ended trial that somebody wants run again, after so many proposals: its end is one of them."""
    result = entry.result
    assert result is not None, f"trial {entry.number} has not ended"
    last = Attempt(
        status=result.status,
        reason=result.reason,
        began=0,
        reached=result.tokens,
        kept=0,
        micro_batch_tokens=int(result.metrics.get(Metric.MICRO_BATCH_TOKENS, entry.spec.budget.micro_batch_tokens)),
        seconds=result.seconds,
        peak_bytes=result.metrics.get(Metric.PEAK_BYTES, 0.0),
        last_lines="\n".join(result.last_lines.splitlines()[-_LINES:]),
        asked=True,
        proposed=proposed,
    )
    return plain([*attempts_of(entry), last])


def _joined(start: Start, result: TrialResult) -> TrialResult:
    """The result with what the attempt itself could not tell: a worker that died knows no earlier readings."""
    first = result.curve[0].tokens if result.curve else 1 << 62
    earlier = tuple(reading for reading in start.curve if reading.tokens < first)
    curve = spliced((*earlier, *result.curve), start.own)
    remarks = (*start.remarks, *(words for words in result.remarks if words not in start.remarks))
    metrics: Mapping[str, float] = result.metrics
    if start.job.micro_batch_tokens:
        metrics = {**metrics, Metric.MICRO_BATCH_TOKENS: float(start.job.micro_batch_tokens)}
    if start.own:
        metrics = {**metrics, Metric.BEST_LOSS: min(reading.loss for reading in curve if reading.tokens)}
    tokens = max(result.tokens, curve[-1].tokens if curve else 0)
    return dataclasses.replace(result, curve=curve, remarks=remarks, metrics=dict(metrics), tokens=tokens)


def _ended(result: TrialResult, status: Status, now: Attempt) -> TrialResult:
    if now.status is Status.PREEMPTED:
        reason = (
            f"taken away {MOST_WITHOUT_PROGRESS} times in a row without getting to a checkpoint; the last time: "
            f"{result.reason}"
        )
        return dataclasses.replace(result, status=status, reason=reason)
    if now.status is Status.OUT_OF_MEMORY:
        reason = f"{result.reason} (with micro-batches of {now.micro_batch_tokens} tokens)"
        return dataclasses.replace(result, status=status, reason=reason)
    return dataclasses.replace(result, status=status)
