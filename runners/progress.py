"""What a person sees while a search runs: one refreshed line on a terminal, a line every few seconds elsewhere."""

import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TextIO

from search_space.records import Status

_LINE_SECONDS = {True: 0.25, False: 5.0}
"""By whether the stream is a terminal."""
_BROKEN = (Status.FAILED, Status.OUT_OF_MEMORY, Status.TIMED_OUT, Status.DIVERGED, Status.INFEASIBLE)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Where a search stands."""

    what: str
    """'trials' or 'finals'."""
    total: int
    counts: Mapping[Status, int]
    running: int
    best: str
    """The best so far in words; empty while there is none."""
    eta_seconds: float | None
    """None while nothing is known."""

    @property
    def done(self) -> int:
        """How many have ended, however they did."""
        return sum(self.counts.values())

    def line(self) -> str:
        """One line without control characters."""
        counts = Counter(self.counts)
        broken = sum(counts[status] for status in _BROKEN)
        parts = [
            f"{self.what} {self.done}/{self.total}",
            f"{self.running} running",
            f"{broken} failed",
            f"{counts[Status.PRUNED]} pruned",
        ]
        if self.best:
            parts.append(f"best {self.best}")
        if self.eta_seconds is not None and self.done < self.total:
            parts.append(f"about {in_words(self.eta_seconds)} left")
        return "  ".join(parts)


class OneLine(Protocol):
    """What can be shown as one line."""

    def line(self) -> str:
        """One line without control characters."""
        ...


class Progress:
    """Writes snapshots to a stream, not too often."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._next = 0.0
        self._last = ""
        self._open = False

    def show(self, snapshot: OneLine, *, now: bool = False) -> None:
        """Show where the work stands; calls in quick succession are dropped unless `now`."""
        if time.monotonic() < self._next and not now:
            return
        self._next = time.monotonic() + _LINE_SECONDS[self._terminal]
        line = snapshot.line()
        if self._terminal:
            self._stream.write(f"\r\x1b[K{line}")
            self._open = True
        elif line != self._last:
            self._stream.write(f"{line}\n")
        self._last = line
        self._stream.flush()

    def note(self, text: str) -> None:
        """A line that stays."""
        self.end()
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def end(self) -> None:
        """Leave the refreshed line as it is and go on below it."""
        if self._open:
            self._stream.write("\n")
            self._open = False


def in_words(seconds: float) -> str:
    """'40 s', '3 min', '2.5 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
