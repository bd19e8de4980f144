"""What the local engine promises: a broken trial ends alone, with its class and reason; workers never outlive it."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from given import GivenSource
from processes import HANGS_SECONDS, descendants, wait_for
from studied import FINITE, experiment

from runners import local_engine
from runners.candidate import make_spec, resolve
from runners.engine import Ended, EngineError, Interrupts, Job, Progressed
from runners.local_engine import LocalEngine
from runners.tasks import task_from_plain
from search_space.records import Seeds, Status, TrialResult, TrialSpec
from search_space.space import default_point


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrialSpec, Path]:
    """A sound spec and the file of its data."""
    file = tmp_path_factory.mktemp("data") / "data.safetensors"
    asked = experiment(*FINITE)
    data = task_from_plain(asked.task).prepare()
    data.save(file)
    resolved = resolve(default_point(asked.space), asked, data.shape)
    spec = make_spec(resolved, asked, fingerprint=data.fingerprint, seeds=Seeds(init=1, data=2, dropout=3))
    return spec, file


@pytest.fixture
def engine(small: tuple[TrialSpec, Path], tmp_path: Path) -> Iterator[LocalEngine]:
    with LocalEngine(jobs=2, data=small[1], folder=tmp_path / "workers") as made:
        yield made


def going_wrong(spec: TrialSpec, way: str, max_seconds: float = 60.0) -> TrialSpec:
    """The spec with the mixer of misbehaving.py, which only workers import."""
    model = {**spec.candidate["model"], "mixer": {"kind": "misbehaving", "misbehaving": {"way": way}}}
    return dataclasses.replace(
        spec,
        candidate={**spec.candidate, "model": model},
        blocks=("misbehaving",),
        budget=dataclasses.replace(spec.budget, max_seconds=max_seconds),
    )


def run(engine: LocalEngine, jobs: list[Job]) -> dict[int, TrialResult]:
    """Every job's result; no trial is pruned."""
    waiting, results = list(jobs), dict[int, TrialResult]()
    end = time.monotonic() + HANGS_SECONDS
    while len(results) < len(jobs):
        assert time.monotonic() < end, f"only {sorted(results)} of {len(jobs)} ended"
        while waiting and engine.has_room:
            engine.start(waiting.pop(0))
        for event in engine.wait(1.0):
            if isinstance(event, Progressed):
                engine.decide(event.key, True)
            else:
                results[event.key] = event.result
    return results


def test_a_worker_imports_what_it_needs_while_the_first_trial_is_thought_of(engine: LocalEngine) -> None:
    started: list[int] = []

    class Thinking(GivenSource):
        def next(self) -> Job | None:
            started.append(len(descendants(os.getpid())))
            return super().next()

    before = len(descendants(os.getpid()))
    with Interrupts() as interrupts:
        assert engine.drive(Thinking([]), interrupts)
    assert started == [before + 1]
    engine.stop()
    assert len(descendants(os.getpid())) == before


def test_trials_run_side_by_side_and_a_crash_hurts_no_other(engine: LocalEngine, small: tuple[TrialSpec, Path]) -> None:
    spec, _ = small
    ways = ("none", "segfault", "raise", "nan")
    results = run(
        engine, [*(Job(key=k, spec=going_wrong(spec, way)) for k, way in enumerate(ways)), Job(key=9, spec=spec)]
    )
    assert [results[key].status for key in (0, 1, 2, 3, 9)] == [
        Status.OK,
        Status.FAILED,
        Status.FAILED,
        Status.DIVERGED,
        Status.OK,
    ]
    assert "SIGSEGV" in results[1].reason
    assert "about to segfault" in results[1].last_lines
    assert "this mixer always raises" in results[2].reason
    assert "misbehaving.py" in results[2].last_lines
    assert results[9].tokens == spec.budget.tokens
    assert results[9].environment["threads"] == "1"


def test_a_trial_is_pruned_when_the_driver_says_so_and_its_worker_is_used_again(
    small: tuple[TrialSpec, Path], tmp_path: Path
) -> None:
    spec, file = small
    with LocalEngine(jobs=1, data=file, folder=tmp_path) as engine:
        ended: list[Ended] = []
        for key in (0, 1):
            engine.start(Job(key=key, spec=spec, weights=tmp_path / f"{key}.safetensors", test=True))
            while engine.busy:
                for event in engine.wait(1.0):
                    if isinstance(event, Progressed):
                        engine.decide(event.key, event.key == 1)
                    else:
                        ended.append(event)
        assert [event.result.status for event in ended] == [Status.PRUNED, Status.OK]
        assert ended[0].result.tokens == spec.budget.eval_every
        assert "test/loss" in ended[1].result.metrics
        assert (tmp_path / "1.safetensors").exists()
        assert len(list(tmp_path.glob("worker-*.log"))) == 1


def test_workers_that_cannot_start_end_the_engine_with_their_last_words(
    small: tuple[TrialSpec, Path], tmp_path: Path
) -> None:
    broken = {"PYTHONPATH": str(tmp_path)}
    (tmp_path / "ctypes.py").write_text("raise SystemExit('no worker today')")
    engine = LocalEngine(jobs=1, data=small[1], folder=tmp_path, environment=broken)
    with engine, pytest.raises(EngineError, match="no worker today"):
        run(engine, [Job(key=0, spec=small[0])])


@pytest.mark.fault
def test_every_way_to_break_gets_its_own_class(
    small: tuple[TrialSpec, Path], engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_engine, "GRACE_SECONDS", 1.0)
    spec, _ = small
    ways = {"exit": Status.FAILED, "kill": Status.PREEMPTED, "hang": Status.TIMED_OUT, "memory": Status.OUT_OF_MEMORY}
    jobs = [Job(key=k, spec=going_wrong(spec, way, 8.0 if way == "hang" else 60.0)) for k, way in enumerate(ways)]
    results = run(engine, [*jobs, *(Job(key=10 + k, spec=spec) for k in range(3))])
    assert [results[key].status for key in range(len(ways))] == list(ways.values())
    assert "exit code 7" in results[0].reason
    assert "SIGKILL" in results[1].reason
    assert "budget.max_seconds" in results[2].reason
    assert all(results[10 + k].status is Status.OK for k in range(3))


@pytest.mark.slow
def test_a_driver_that_answers_late_times_no_trial_out_but_one_that_hangs(
    small: tuple[TrialSpec, Path], engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, ahead = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock() + ahead)
    engine.start(Job(key=0, spec=small[0]))
    while not isinstance(event := next(iter(engine.wait(1.0)), None), Ended):
        if event is not None:
            ahead += 3600.0
            assert engine.wait(0.0) == []
            engine.decide(event.key, True)
    assert event.result.status is Status.OK

    def hangs() -> bool:
        assert engine.wait(0.0) == []
        return any("about to hang" in log.read_text() for log in tmp_path.glob("workers/worker-*.log"))

    engine.start(Job(key=1, spec=going_wrong(small[0], "hang")))
    wait_for("the trial to hang", hangs)
    ahead += 3600.0
    (ended,) = engine.wait(1.0)
    assert isinstance(ended, Ended)
    assert ended.result.status is Status.TIMED_OUT


DRIVER = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from search_space.records import spec_from_plain
import json
from runners.engine import Job
from runners.local_engine import LocalEngine
engine = LocalEngine(jobs=1, data=Path({data!r}), folder=Path({folder!r}))
engine.start(Job(key=0, spec=spec_from_plain(json.loads(sys.stdin.readline()))))
while "hang" not in Path({folder!r}, "worker-0.log").read_text():
    engine.wait(0.2)
print(engine._workers[0].process.pid, flush=True)
engine.wait(600)
"""


@pytest.mark.fault
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_die_with_their_driver_whatever_they_do(
    small: tuple[TrialSpec, Path], tmp_path: Path, number: signal.Signals
) -> None:
    from search_space.canon import canonical_json
    from search_space.records import to_plain

    script = DRIVER.format(tests=str(Path(__file__).parent), data=str(small[1]), folder=str(tmp_path))
    spec = canonical_json(to_plain(going_wrong(small[0], "hang")))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        driver.stdin.write(f"{spec}\n")
        driver.stdin.flush()
        worker = int(driver.stdout.readline())
        os.kill(driver.pid, number)
        driver.wait()
    wait_for(f"the end of worker {worker}", lambda: not Path(f"/proc/{worker}").exists())
