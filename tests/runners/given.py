"""A source whose jobs are given; it notes all it is told, and how many ran at a time."""

from collections import deque
from collections.abc import Callable, Iterable

from runners.engine import AbstractSource, Job
from search_space.records import Reading, Status, TrialResult


class GivenSource(AbstractSource):
    """Runs the jobs in order; one that was preempted is run again, once."""

    def __init__(self, jobs: Iterable[Job], *, pruned: Iterable[int] = (), on_tick: Callable[[], bool] = lambda: True):
        self.waiting = deque(jobs)
        self.running: dict[int, Job] = {}
        self.results: dict[int, TrialResult] = {}
        self.readings: dict[int, list[Reading]] = {}
        self.preempted: dict[int, TrialResult] = {}
        self.pruned = set(pruned)
        self.peak = 0
        self.on_tick = on_tick

    def next(self) -> Job | None:
        if not self.waiting:
            return None
        job = self.waiting.popleft()
        self.running[job.key] = job
        self.readings[job.key] = []
        self.peak = max(self.peak, len(self.running))
        return job

    def report(self, key: int, reading: Reading) -> bool:
        return key not in self.pruned

    def follow(self, key: int, reading: Reading) -> None:
        self.readings[key].append(reading)

    def finish(self, key: int, result: TrialResult) -> None:
        job = self.running.pop(key)
        if result.status is Status.PREEMPTED and key not in self.preempted:
            self.preempted[key] = result
            self.waiting.append(job)
        else:
            self.results[key] = result

    def tick(self) -> bool:
        return self.on_tick()
