"""The driver's loop: keeps an engine busy with trials of a source until the source or the user says stop."""

import signal
import threading
from abc import abstractmethod
from types import FrameType, TracebackType
from typing import Any, Self

from runners.local_engine import Ended, Job, LocalEngine, Progressed
from search_space.records import Reading, TrialResult

_LOOK_SECONDS = 0.5


class AbstractSource:
    """Where trials come from and where their results go."""

    @abstractmethod
    def next(self) -> Job | None:
        """A trial to start now; None when there is none, for now (while others run) or for good."""

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


def dispatch(engine: LocalEngine, source: AbstractSource, interrupts: Interrupts) -> bool:
    """Run the source's trials; False when it was cut off, and then trials may still be running."""
    while not interrupts.asked:
        while engine.has_room and not interrupts.asked and (job := source.next()) is not None:
            engine.start(job)
        if not engine.busy:
            return not interrupts.asked
        events = engine.wait(_LOOK_SECONDS)
        # First every answer that a trial waits for, then what a slow tracking store may hold up.
        for event in events:
            if isinstance(event, Progressed):
                engine.decide(event.key, source.report(event.key, event.reading))
        for event in events:
            if isinstance(event, Ended):
                source.finish(event.key, event.result)
            else:
                source.follow(event.key, event.reading)
        if not source.tick():
            return False
    return False
