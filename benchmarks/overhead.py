"""What the platform itself costs a trial: a search of trials that do nothing, with the real study and tracking store.

    python benchmarks/overhead.py [--trials 5000] [--study postgresql://...] [--tracking-uri postgresql://...]

Prints milliseconds a trial over the first and the last tenth of the search: all, the sampler's own share (choosing
what it sees, drawing, vetoing), and the rest, which is the platform. The end, when the store has shown everything, is
part of the whole. The space holds 64 models; measuring a model that was not seen before is a cost of its own, stated
apart.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import runners.search
from blocks import cost as costs
from runners.candidate import full_space
from runners.engine import AbstractEngine, AbstractSource, Interrupts
from runners.finding import Finder
from runners.progress import Progress
from runners.proposing import Proposer
from runners.tasks import TASKS
from runners.tracking import Tracker
from search_space.canon import seed_from
from search_space.experiment import Experiment, read
from search_space.records import Reading, Status, TrialResult

EXPERIMENT = """
name: nothing
description: Trials that do nothing
task: {mqar: {seq_len: 32, pairs: 4, vocabulary: 32, examples: 64, held_out: 16}}
budget: {tokens: 1024, batch_tokens: 128, eval_tokens: 128, eval_every: 256}
model:
  d_model: [16, 32]
  layers: [1, 2]
  mixer:
    softmax: {kv_heads: 1, queries_per_kv: [1, 2], head_dim: 8, qk_norm: none}
    sliding_window: {kv_heads: 1, queries_per_kv: 1, head_dim: 8, window: [8, 16], qk_norm: none}
  position: [none, rotary]
  ffn: {gelu: {expansion: 2.0}, swiglu: {expansion: 2.0}}
  tied: true
  norm: rmsnorm
  placement: pre
  init: scaled_normal
optimizer:
  adamw:
    learning_rate: {low: 1e-4, high: 1e-1, log: true}
    weight_decay: {low: 1e-3, high: 1.0, log: true}
search: {sampler: tpe, pruner: {asha: {grace_tokens: 256, factor: 2}}}
engine: {device: cpu}
"""


class Clock:
    """Seconds spent in the sampler, and when each trial ended."""

    def __init__(self) -> None:
        self.sampler = 0.0
        self.measured, self.models = 0.0, 0
        self.ends: list[tuple[float, float]] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Measure every proposal: the whole search for a point less what judging points took."""
        find, judge, cost = Proposer.find, Finder._judge, costs.measure
        judged = 0.0

        def timed_cost(*arguments: Any) -> Any:
            since = time.perf_counter()
            found = cost(*arguments)
            self.measured += time.perf_counter() - since
            self.models += 1
            return found

        def timed_judge(self: Finder, point: Any) -> Any:
            nonlocal judged
            since = time.perf_counter()
            found = judge(self, point)
            judged += time.perf_counter() - since
            return found

        def timed_find(proposer: Proposer, *arguments: Any) -> Any:
            nonlocal judged
            since, judged = time.perf_counter(), 0.0
            found = find(proposer, *arguments)
            self.sampler += time.perf_counter() - since - judged
            return found

        Proposer.find, Finder._judge = timed_find, timed_judge  # type: ignore[method-assign]
        costs.measure = timed_cost
        try:
            yield
        finally:
            Proposer.find, Finder._judge = find, judge  # type: ignore[method-assign]
            costs.measure = cost


class NothingEngine(AbstractEngine):
    """Ends every trial as soon as it is started, one at a time."""

    def __init__(self, clock: Clock, trial: Callable[[int], TrialResult]) -> None:
        self._clock = clock
        self._trial = trial

    def drive(self, source: AbstractSource, interrupts: Interrupts) -> bool:
        while not interrupts.asked and (job := source.next()) is not None:
            result = self._trial(job.key)
            for reading in result.curve:
                source.report(job.key, reading)
                source.follow(job.key, reading)
            source.finish(job.key, result)
            source.tick()
            self._clock.ends.append((time.perf_counter(), self._clock.sampler))
        return not interrupts.asked

    def stop(self) -> None:
        """Nothing runs."""


def made_up(number: int) -> TrialResult:
    """A result with four readings, as a real trial of this budget has."""
    loss = 2.0 + seed_from("loss", number) % 1000 / 1000
    curve = tuple(
        Reading(tokens=tokens, loss=loss + (1024 - tokens) / 1024, train_loss=1.0, seconds=tokens / 1e5)
        for tokens in range(256, 1025, 256)
    )
    metrics = {"loss": loss, "tokens_per_second": 1.0, "seconds": 0.01}
    return TrialResult(status=Status.OK, metrics=metrics, curve=curve, tokens=1024, seconds=0.01)


def measure(experiment: Experiment, study: str, tracking: str) -> dict[str, float]:
    """Milliseconds a trial, by part of the search and by who spent them."""
    clock = Clock()
    open_engine = runners.search.open_engine
    runners.search.open_engine = lambda *_, **__: NothingEngine(clock, made_up)  # type: ignore[assignment]
    began = time.perf_counter()
    try:
        with clock.installed(), open(os.devnull, "w") as nowhere:
            outcome = runners.search.run_search(
                experiment, tracker=Tracker(tracking), study_uri=study, progress=Progress(nowhere)
            )
    finally:
        runners.search.open_engine = open_engine
    whole = time.perf_counter() - began
    count = len(clock.ends)
    part = max(count // 10, 1)
    assert outcome.unshown == 0, "the tracking store lacks trials"

    def milliseconds(first: int, last: int) -> tuple[float, float]:
        seconds = clock.ends[last][0] - clock.ends[first][0]
        sampler = clock.ends[last][1] - clock.ends[first][1]
        return 1e3 * seconds / (last - first), 1e3 * sampler / (last - first)

    first, last = milliseconds(0, part), milliseconds(count - part - 1, count - 1)
    return {
        "trials": count,
        "new_model_ms": 1e3 * clock.measured / max(clock.models, 1),
        "whole_ms": 1e3 * whole / count,
        "sampler_ms": 1e3 * clock.sampler / count,
        "platform_ms": 1e3 * (whole - clock.sampler) / count,
        "platform_first_ms": first[0] - first[1],
        "platform_last_ms": last[0] - last[1],
        "sampler_first_ms": first[1],
        "sampler_last_ms": last[1],
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=5000)
    parser.add_argument("--study", default="", help="study storage; default a SQLite file")
    parser.add_argument("--tracking-uri", default="", help="tracking store; default a SQLite file")
    parser.add_argument("--set", action="append", default=[], help="overrides, such as search.sampler=random")
    given = parser.parse_args()
    overrides = [f"search.trials={given.trials}", *given.set]
    experiment = read(EXPERIMENT, full_space=full_space, tasks=TASKS, overrides=overrides)
    with tempfile.TemporaryDirectory(prefix="assay-platform-") as folder:
        os.chdir(folder)
        study = given.study or f"sqlite:///{Path(folder)}/study.db"
        tracking = given.tracking_uri or f"sqlite:///{Path(folder)}/mlflow.db"
        print(
            json.dumps(
                {name: round(value, 2) for name, value in measure(experiment, study, tracking).items()}, indent=1
            )
        )


if __name__ == "__main__":
    main()
