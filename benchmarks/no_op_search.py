"""Measures one search of trials that do nothing, for overhead.py: `python no_op_search.py KIND TRIALS STUDY STORE`.

KIND is 'nothing', for trials that end as soon as they begin, or 'long', for trials that sleep in a worker. Overrides of
the experiment may follow. Prints JSON.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fake_trials

import runners.search
from blocks import cost as costs
from runners.candidate import full_space
from runners.engine import AbstractEngine, AbstractSource, Interrupts
from runners.finding import Finder
from runners.progress import Progress
from runners.proposing import Proposer
from runners.search import SearchSource
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
LONG_SECONDS = 10.0
Pair = tuple[float, float]
"""Seconds of the clock and of the processor."""


class Clock:
    """Seconds of the clock and of the processor: in the sampler, in measuring new models, and when each trial ended."""

    def __init__(self) -> None:
        self.sampler, self.measured = (0.0, 0.0), (0.0, 0.0)
        self.models = 0
        self.ends: list[dict[str, float]] = []

    def end(self) -> None:
        """A trial has ended."""
        now = {"wall": time.perf_counter(), "cpu": time.process_time()}
        shares = {"sampler": self.sampler, "measured": self.measured}
        apart = {f"{name}_{of}": value for name, pair in shares.items() for of, value in zip(now, pair, strict=True)}
        self.ends.append({**now, **apart})

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Measure every proposal: the whole search for a point less what judging points took."""
        find, judge, cost = Proposer.find, Finder._judge, costs.measure
        judged = (0.0, 0.0)

        def timed_cost(*arguments: Any) -> Any:
            since = _now()
            found = cost(*arguments)
            self.measured = _plus(self.measured, _since(since))
            self.models += 1
            return found

        def timed_judge(self: Finder, point: Any) -> Any:
            nonlocal judged
            since = _now()
            found = judge(self, point)
            judged = _plus(judged, _since(since))
            return found

        def timed_find(proposer: Proposer, *arguments: Any) -> Any:
            nonlocal judged
            since, judged = _now(), (0.0, 0.0)
            found = find(proposer, *arguments)
            self.sampler = _plus(self.sampler, _plus(_since(since), judged, -1.0))
            return found

        Proposer.find, Finder._judge = timed_find, timed_judge  # type: ignore[method-assign]
        costs.measure = timed_cost
        try:
            yield
        finally:
            Proposer.find, Finder._judge = find, judge  # type: ignore[method-assign]
            costs.measure = cost


def _now() -> Pair:
    return time.perf_counter(), time.thread_time()


def _since(then: Pair) -> Pair:
    return _plus(_now(), then, -1.0)


def _plus(one: Pair, other: Pair, times: float = 1.0) -> Pair:
    return one[0] + times * other[0], one[1] + times * other[1]


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
            self._clock.end()
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


def nothing(experiment: Experiment, study: str, tracking: str) -> dict[str, float]:
    """Milliseconds a trial, by part of the search, by who spent them, and of which clock."""
    clock = Clock()
    runners.search.open_engine = lambda *_, **__: NothingEngine(clock, made_up)  # type: ignore[assignment]
    wall, cpu = time.perf_counter(), time.process_time()
    with clock.installed(), open(os.devnull, "w") as nowhere:
        outcome = runners.search.run_search(
            experiment, tracker=Tracker(tracking), study_uri=study, progress=Progress(nowhere)
        )
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    count = len(clock.ends)
    assert outcome.unshown == 0, "the tracking store lacks trials"
    found: dict[str, float] = {"trials": count, "models": clock.models}
    for of, whole, sampler, measured in zip(("wall", "cpu"), (wall, cpu), clock.sampler, clock.measured, strict=True):
        found[f"platform_{of}"] = 1e3 * (whole - sampler) / count
        found[f"sampler_{of}"] = 1e3 * sampler / count
        found[f"new_model_{of}"] = 1e3 * measured / max(clock.models, 1)
        part = max(count // 10, 1)
        for name, first, last in (("first", 0, part), ("last", count - part - 1, count - 1)):
            passed = {key: clock.ends[last][key] - clock.ends[first][key] for key in clock.ends[0]}
            apart = passed[f"sampler_{of}"] + passed[f"measured_{of}"]
            found[f"platform_{name}_{of}"] = 1e3 * (passed[of] - apart) / (last - first)
            found[f"sampler_{name}_{of}"] = 1e3 * passed[f"sampler_{of}"] / (last - first)
    return found


def long(experiment: Experiment, study: str, tracking: str) -> dict[str, float]:
    """What passes between trials that sleep, run by the local engine, as a share of what they sleep.

    The first trial waits for its worker to start; it counts with start and end.
    """
    finish = SearchSource.finish
    ended, slept = list[float](), list[float]()

    def timed_finish(self: SearchSource, key: int, result: TrialResult) -> None:
        finish(self, key, result)
        ended.append(time.perf_counter())
        slept.append(LONG_SECONDS * len(result.curve) * experiment.budget.eval_every / experiment.budget.tokens)

    SearchSource.finish = timed_finish  # type: ignore[method-assign]
    os.environ[fake_trials.SECONDS] = str(LONG_SECONDS)
    wall = time.perf_counter()
    with open(os.devnull, "w") as nowhere:
        runners.search.run_search(
            experiment,
            tracker=Tracker(tracking),
            study_uri=study,
            progress=Progress(nowhere),
            trials="fake_trials:made_up",
        )
    wall = time.perf_counter() - wall
    between = ended[-1] - ended[0] - sum(slept[1:])
    return {"overhead": between / sum(slept[1:]), "start_and_end_seconds": wall - sum(slept) - between}


def main(kind: str, trials: int, study: str, store: str, overrides: list[str]) -> None:
    """Measure, with databases in a temporary folder where none are named."""
    measure = {"nothing": nothing, "long": long}[kind]
    asked = [f"search.trials={trials}", *(["search.pruner=none"] if kind == "long" else []), *overrides]
    experiment = read(EXPERIMENT, full_space=full_space, tasks=TASKS, overrides=asked)
    with tempfile.TemporaryDirectory(prefix="assay-platform-") as folder:
        os.chdir(folder)
        study, store = study or f"sqlite:///{folder}/study.db", store or f"sqlite:///{folder}/mlflow.db"
        print(json.dumps(measure(experiment, study, store)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
