"""What is known of a trial so far: it survives what ends the trial, and goes on where an earlier attempt stopped."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runners.conditions import peak_bytes
from runners.diagnosing import Checkups
from search_space.checkup import Checkup, checkup_from_plain
from search_space.records import Metric, Reading, Status, TrialResult, TrialSpec, to_plain

MOST_DOCUMENTS = 256
"""Documents whose test losses a final keeps, at most."""


@dataclass
class Tally:
    """Counts and clocks of one trial, over all its attempts."""

    started: float
    earlier_seconds: float = 0.0
    """What earlier attempts took up to the checkpoint that this one goes on from."""
    metrics: dict[str, float] = field(default_factory=dict)
    curve: list[Reading] = field(default_factory=list)
    tokens: int = 0
    first_nonfinite: int = 0
    waited_seconds: float = 0.0  # For answers to readings: the driver's time, not the trial's.
    train_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    checkups: list[Checkup] = field(default_factory=list)
    backends: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    documents: list[tuple[float, int]] = field(default_factory=list)
    """Mean test loss and counted targets of each document."""

    def elapsed(self) -> float:
        """Seconds of the trial's own time."""
        return self.earlier_seconds + time.perf_counter() - self.started - self.waited_seconds

    def look(self, checkups: Checkups) -> None:
        """The checkup that is due now."""
        found = checkups.look(self.tokens)
        if found:
            self.checkups += found
            self.put(Metric.SECONDS_DIAGNOSE, checkups.seconds)

    def take_documents(self, sequences: Sequence[tuple[float, int]]) -> None:
        """Keep the test losses of consecutive sequences, joined until there are at most MOST_DOCUMENTS."""
        per_document = math.ceil(len(sequences) / MOST_DOCUMENTS)
        for first in range(0, len(sequences), max(per_document, 1)):
            part = sequences[first : first + per_document]
            count = sum(counted for _, counted in part)
            if count:
                self.documents.append((float(f"{math.fsum(loss for loss, _ in part) / count:.7g}"), count))

    def put(self, name: str, value: float) -> None:
        """A metric, unless it is NaN or infinite."""
        if math.isfinite(value):
            self.metrics[name] = float(value)

    def plain(self) -> dict[str, Any]:
        """What a later attempt must know, as JSON data."""
        return {
            "metrics": self.metrics,
            "curve": [to_plain(reading) for reading in self.curve],
            "tokens": self.tokens,
            "seconds": self.elapsed(),
            "train_seconds": self.train_seconds,
            "evaluate_seconds": self.evaluate_seconds,
            "checkups": [to_plain(checkup) for checkup in self.checkups],
        }

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Go on from what `plain` said; the time since this attempt began is counted on top."""
        self.metrics = {**self.metrics, **plain["metrics"]}
        self.curve = [Reading(**reading) for reading in plain["curve"]]
        self.tokens = int(plain["tokens"])
        self.earlier_seconds = float(plain["seconds"])
        self.train_seconds += float(plain["train_seconds"])
        self.evaluate_seconds += float(plain["evaluate_seconds"])
        self.checkups = [checkup_from_plain(checkup) for checkup in plain["checkups"]]

    def result(self, spec: TrialSpec, status: Status, reason: str, last_lines: str, baseline: int) -> TrialResult:
        """What the trial came to; `baseline` is what `conditions.begin_peak` returned, 0 where it was not reached."""
        seconds = self.elapsed()
        trained = [reading.loss for reading in self.curve if reading.tokens]
        if trained:
            self.put(Metric.BEST_LOSS, min(trained))
        if self.train_seconds > 0:
            self.put(Metric.TOKENS_PER_SECOND, self.tokens / self.train_seconds)
        if baseline or spec.device == "cuda":
            self.put(Metric.PEAK_BYTES, peak_bytes(spec.device, baseline))
        self.put(Metric.SECONDS, seconds)
        self.put(Metric.SECONDS_TRAIN, self.train_seconds)
        self.put(Metric.SECONDS_EVALUATE, self.evaluate_seconds)
        self.put(Metric.TOKENS, self.tokens)
        return TrialResult(
            status=status,
            reason=reason,
            last_lines=last_lines,
            metrics=self.metrics,
            curve=tuple(self.curve),
            tokens=self.tokens,
            seconds=seconds,
            first_nonfinite_step=self.first_nonfinite,
            device=spec.device,
            backends=self.backends,
            environment=self.environment,
            checkups=tuple(self.checkups),
            remarks=tuple(self.remarks),
            document_losses=tuple(loss for loss, _ in self.documents),
            document_counts=tuple(count for _, count in self.documents),
        )
