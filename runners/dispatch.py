"""The local engine's loop: keeps workers busy with trials of a source until the source or the user says stop."""

from typing import TYPE_CHECKING

from runners.engine import AbstractSource, Ended, Interrupts, Progressed

if TYPE_CHECKING:
    from runners.local_engine import LocalEngine

_LOOK_SECONDS = 0.5


def dispatch(engine: "LocalEngine", source: AbstractSource, interrupts: Interrupts) -> bool:
    """Run the source's trials; False when it was cut off, and then trials may still be running."""
    engine.warm()
    while not interrupts.asked:
        while engine.has_room and not interrupts.asked and (job := source.next()) is not None:
            engine.start(job)
        if not engine.busy and not source.waits():
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
