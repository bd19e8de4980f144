"""What drives trials, wherever they run: a driver's view of an engine, and what engine and driver tell each other."""

import signal
import threading
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from search_space.errors import WorkError
from search_space.records import Reading, TrialResult, TrialSpec


class EngineError(WorkError):
    """Trials cannot be started at all."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One attempt at a trial; `key` is its owner's business."""

    key: int
    spec: TrialSpec
    test: bool = False
    weights: Path | None = None
    micro_batch_tokens: int = 0
    """Of the micro-batch, where it is not that of the spec's budget; 0: as the budget says."""
    checkpoint: Path | None = None
    """Folder of the trial's checkpoint, which it goes on from and keeps; None: it keeps none."""
    checkpoint_tokens: int = 0
    """Training tokens between two checkpoints; 0: at readings, when the last is old enough."""
    checkpoint_bytes: int = 0
    """What a checkpoint may take at most; 0: anything."""
    shared: Path | None = None
    """Folder of states that other trials may go on from; None: it keeps none."""
    shared_tokens: int = 0
    """Training tokens between two of them."""


@dataclass(frozen=True, kw_only=True)
class Progressed:
    """A running trial reports; it waits for an answer."""

    key: int
    reading: Reading


@dataclass(frozen=True, kw_only=True)
class Ended:
    """An attempt is over. A result that is PREEMPTED says that its process or machine was taken away."""

    key: int
    result: TrialResult


Event = Progressed | Ended


class AbstractSource:
    """Where trials come from and where their results go."""

    @abstractmethod
    def next(self) -> Job | None:
        """A trial to start now; None when there is none, for now (while others run) or for good."""

    def waits(self) -> bool:
        """True when there is nothing to start now but there may be, as when another driver of the search dies."""
        return False

    @abstractmethod
    def report(self, key: int, reading: Reading) -> bool:
        """Decide on a reading; False when the trial is to be pruned. The trial waits meanwhile."""

    @abstractmethod
    def follow(self, key: int, reading: Reading) -> None:
        """Show a reading that was decided on; the trial no longer waits."""

    @abstractmethod
    def finish(self, key: int, result: TrialResult) -> None:
        """Take a result."""

    @abstractmethod
    def tick(self) -> bool:
        """Called about twice a second and after every event; False to cut off what runs, as when time is up."""


class Interrupts:
    """Turns the first Ctrl-C or SIGTERM into a wish that the loop honours within a second, the second into an end."""

    def __init__(self) -> None:
        self.asked = ""
        """Name of the signal that asked for an end; empty while none has."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name


@contextmanager
def kept_signals() -> Iterator[None]:
    """Puts back the handlers of SIGINT and SIGTERM that whatever runs inside replaces by its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


class AbstractEngine:
    """Runs trials of a source, a bounded number at a time; leaving its context ends every trial."""

    @abstractmethod
    def drive(self, source: AbstractSource, interrupts: Interrupts) -> bool:
        """Run the source's trials; False when it was cut off, and then trials may still be running."""

    @abstractmethod
    def stop(self) -> None:
        """End every trial that runs; nothing more is heard of them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
