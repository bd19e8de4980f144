"""What a source of trials and those who place them on actors tell each other: who runs, what was heard, who is lost."""

import json
import math
import re
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from runners.bench import job_to_text
from runners.engine import AbstractSource, EngineError, Interrupts, Job
from runners.local_engine import GRACE_SECONDS, LAST_LINES, MOST_FAILED_STARTS, START_SECONDS
from search_space.records import Reading, Status, TrialResult, result_from_plain

LOOK_SECONDS = 0.5
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, kw_only=True)
class Lost:
    """What is known of an actor that no longer works."""

    status: Status
    reason: str
    last_words: str


class AbstractActors:
    """What can be done with the actor that runs a trial; actors are opaque."""

    @abstractmethod
    def prune(self, actor: Any) -> None:
        """Answer the reading that it gave last with no."""

    @abstractmethod
    def weights(self, actor: Any) -> bytes | None:
        """What its trial wrote on a machine whose files are not seen here."""

    @abstractmethod
    def why_lost(self, actor: Any) -> "Lost":
        """Why it no longer works; it is ended for good."""

    @abstractmethod
    def end_all(self, actors: Sequence[Any]) -> "list[Lost | None]":
        """End them for good; for each that no longer worked, why, found out in one short wait for all of them."""

    @abstractmethod
    def kill(self, actor: Any) -> None:
        """End it at once, and its trial with it."""


@dataclass
class _Running:
    """A trial that was handed out."""

    job: Job
    since: float
    actor: Any = None
    deadline: float = math.inf
    overdue: bool = False
    curve: list[Reading] = field(default_factory=list)


class Talk:
    """One drive of a source. An error that the source raises is kept, ends the drive, and is the driver's to raise."""

    def __init__(self, source: AbstractSource, interrupts: Interrupts, actors: AbstractActors) -> None:
        self.error: Exception | None = None
        self.cut = False
        """True when the source or a signal cut the drive off; trials may still have been running."""
        self._source = source
        self._interrupts = interrupts
        self._actors = actors
        self._running: dict[str, _Running] = {}
        self._again: deque[Job] = deque()
        self._failed_starts = 0
        self._looked = 0.0

    @property
    def idle(self) -> bool:
        """True when nothing runs."""
        return not self._running

    def suggest(self, trial: str) -> str | None:
        """The job of a new trial, as text."""
        if self._is_over:
            return None
        job = None
        with _Kept(self):
            job = self._again.popleft() if self._again else self._source.next()
        if job is None:
            return None
        self._running[trial] = _Running(job=job, since=time.monotonic())
        return job_to_text(job)

    def started(self, trial: str, actor: Any) -> None:
        """The trial has an actor."""
        running = self._running[trial]
        running.actor, running.since = actor, time.monotonic()
        running.deadline = self._patience(running, START_SECONDS)

    def heard(self, trial: str, word: str) -> None:
        """A reading."""
        running = self._running[trial]
        self._failed_starts, self._looked = 0, 0.0
        reading = Reading(**json.loads(word)["reading"])
        running.curve.append(reading)
        with _Kept(self):
            if not self._source.report(running.job.key, reading):
                self._actors.prune(running.actor)
            running.deadline = self._patience(running, 0.0)
            self._source.follow(running.job.key, reading)

    def ended(self, trial: str, word: str) -> None:
        """The trial's last word."""
        running = self._running.pop(trial)
        if running.actor is None:
            return  # Killed with all others: it is run again.
        told = json.loads(word)
        if "broken" in told:
            self.error = EngineError(told["broken"])
            return
        self._failed_starts, self._looked = 0, 0.0
        with _Kept(self):
            self._bring(running)
            self._source.finish(running.job.key, result_from_plain(told["result"]))

    def failed(self, trial: str, text: str) -> None:
        """The trial's actor raised or is gone; `text` is what is known of it."""
        running = self._running.pop(trial)
        if self._is_over:
            return  # What ends all of them, as a Ctrl-C to the whole group does, is no failure of its own.
        if running.actor is None:
            self._failed_starts += 1
            self._again.append(running.job)
            if self._failed_starts >= MOST_FAILED_STARTS:
                self.error = EngineError(
                    f"{self._failed_starts} workers in a row ended before their first trial: {_tail(text)}"
                )
            return
        self._lose(running, self._actors.why_lost(running.actor), text)

    def settle_all(self, why: str) -> None:
        """Finish what can no longer be heard of, since whatever placed it broke down; sound trials are run again."""
        left, self._running = list(self._running.values()), {}
        if self._is_over:
            return
        self._again.extend(running.job for running in left if running.actor is None)
        placed = [running for running in left if running.actor is not None]
        sound = Lost(status=Status.PREEMPTED, reason=f"stopped in mid-trial: {why}", last_words="")
        for running, lost in zip(placed, self._actors.end_all([each.actor for each in placed]), strict=True):
            self._lose(running, lost or sound, "")

    def over(self) -> bool:
        """True when everything is to be stopped; called again and again."""
        if not self.cut and self.error is None:
            self._look()
        if not self.cut and self.error is None:
            return False
        for running in self._running.values():
            if running.actor is not None:
                self._actors.kill(running.actor)
                running.actor = None
        return True

    @property
    def _is_over(self) -> bool:
        return self.cut or self.error is not None or bool(self._interrupts.asked)

    def _look(self) -> None:
        now = time.monotonic()
        if self._interrupts.asked:
            self.cut = True
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        with _Kept(self):
            self.cut = self.cut or not self._source.tick()
        for running in self._running.values():
            if now > running.deadline and not running.overdue:
                running.overdue = True
                self._actors.kill(running.actor)

    def _lose(self, running: _Running, lost: Lost, text: str) -> None:
        """Finish a trial whose actor is lost; `text` is what the trial itself said last."""
        status, reason = lost.status, lost.reason
        if running.overdue:
            limit = running.job.spec.budget.max_seconds
            status = Status.TIMED_OUT
            reason = f"no word from the worker long after the limit of {limit:g} s (budget.max_seconds); killed"
        curve = tuple(running.curve)
        result = TrialResult(
            status=status,
            reason=reason,
            last_lines=_tail(text or lost.last_words),
            curve=curve,
            tokens=curve[-1].tokens if curve else 0,
            seconds=time.monotonic() - running.since,
            device=running.job.spec.device,
        )
        with _Kept(self):
            self._source.finish(running.job.key, result)

    def _bring(self, running: _Running) -> None:
        """Have the weights where the job wants them."""
        wanted = running.job.weights
        content = None if wanted is None else self._actors.weights(running.actor)
        if wanted is not None and content is not None:
            partial = wanted.with_name(f"{wanted.name}.partial")
            partial.write_bytes(content)
            partial.replace(wanted)

    def _patience(self, running: _Running, extra: float) -> float:
        """When the actor is taken for hung; its own worker's limit lies well before."""
        used = running.curve[-1].seconds if running.curve else 0.0
        return time.monotonic() + extra + running.job.spec.budget.max_seconds - used + 3 * GRACE_SECONDS


class _Kept:
    """Keeps the error that ends its block, for the driver to raise; Ray Tune would make another one of it."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if isinstance(error, Exception) and self._talk.error is None:
            self._talk.error = error
        return isinstance(error, Exception)


def _tail(text: str) -> str:
    """The last lines, without colours."""
    return "\n".join(_COLOUR.sub("", text).rstrip().split("\n")[-LAST_LINES:])
