"""What the Ray engine promises: the local engine's results to the bit, and a word about every trial however it ends."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from given import GivenSource
from namespaces import HEAD, PORT, TwoMachines, available
from processes import descendants, wait_for
from ray.cluster_utils import Cluster
from studied import FINITE, experiment

from runners import ray_talk
from runners.candidate import make_spec, resolve
from runners.engine import Interrupts, Job
from runners.local_engine import LocalEngine
from runners.ray_engine import RayEngine, _Actors
from runners.tasks import task_from_plain
from search_space.records import Seeds, Status, TrialResult, TrialSpec, to_plain
from search_space.space import default_point

HERE = Path(__file__).parent


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


def going_wrong(spec: TrialSpec, way: str, max_seconds: float = 60.0) -> TrialSpec:
    """The spec with the mixer of misbehaving.py, which only workers import."""
    model = {**spec.candidate["model"], "mixer": {"kind": "misbehaving", "misbehaving": {"way": way}}}
    return dataclasses.replace(
        spec,
        candidate={**spec.candidate, "model": model},
        blocks=("misbehaving",),
        budget=dataclasses.replace(spec.budget, max_seconds=max_seconds),
    )


def numbers(result: TrialResult) -> tuple[object, ...]:
    """What does not depend on the clock."""
    metrics = {name: value for name, value in result.metrics.items() if "second" not in name and "peak" not in name}
    curve = [(reading.tokens, reading.loss, reading.train_loss) for reading in result.curve]
    return result.status, result.reason, result.tokens, metrics, curve


class Ahead:
    """The clock, so many seconds ahead."""

    seconds = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.seconds


def stop_what_runs(source: GivenSource, clock: Ahead) -> bool:
    """Once the trial has given a reading, stop the processes of all actors, and have its time pass."""
    if source.running and source.readings[0]:
        for pid in descendants(os.getpid()):
            if b"ray::_" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGSTOP)
        clock.seconds = 1000.0
        source.on_tick = lambda: True
    return True


def is_dead(actor: Any) -> bool:
    """True once Ray knows that the actor is gone."""
    try:
        ray.get(actor.alive.remote())
    except ray.exceptions.RayActorError:
        return True
    return False


def ended_together() -> list[Status | None]:
    """What is found out of two actors of Ray when all are ended: one that was killed, and one that is busy."""

    class Sleeper:
        def alive(self) -> None:
            """Returns, once it is not busy."""

        def sleep(self, seconds: float) -> None:
            time.sleep(seconds)

    killed, busy = (ray.remote(num_cpus=0)(Sleeper).remote() for _ in range(2))
    ray.get([killed.alive.remote(), busy.alive.remote()])
    ray.kill(killed)
    wait_for("the end of the one that was killed", lambda: is_dead(killed))
    busy.sleep.remote(60.0)
    return [lost and lost.status for lost in _Actors(remote=False).end_all([killed, busy])]


@pytest.mark.fault
@pytest.mark.skipif(not available(), reason="network namespaces need root and iproute2")
def test_a_machine_out_of_reach_is_given_up_and_one_without_our_files_is_served(
    small: tuple[TrialSpec, Path], tmp_path: Path
) -> None:
    spec, file = small
    folder = tmp_path / "search"
    folder.mkdir()
    data = folder / "data.safetensors"
    data.write_bytes(file.read_bytes())
    with TwoMachines(folder, tmp_path / "ray.log") as machines:
        command = [sys.executable, str(HERE / "ray_drive.py"), f"{HEAD}:{PORT}", str(data), str(folder)]
        with subprocess.Popen(
            machines.inside(0, *command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as driver:
            assert driver.stdin is not None
            assert driver.stdout is not None
            driver.stdin.write(f"{json.dumps(to_plain(going_wrong(spec, 'slow')))}\n")
            driver.stdin.flush()
            assert driver.stdout.readline() == "both\n"
            machines.pull_the_cable()
            told = json.loads(driver.stdout.readline())
    assert told["peak"] == 2
    ((lost, reason),) = told["preempted"].values()
    assert lost > 0
    assert "taken away" in reason
    assert told["results"] == dict.fromkeys("0123", "ok")
    assert {f"{key}" for key in range(4)} <= {path.name for path in folder.iterdir()}


@pytest.mark.fault
def test_a_worker_ended_for_want_of_memory_is_told_so_and_the_next_trial_starts(
    small: tuple[TrialSpec, Path], tmp_path: Path
) -> None:
    greedy = {"memory_usage_threshold": 0.001, "memory_monitor_refresh_ms": 15000}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": greedy})
    slow = going_wrong(small[0], "slow", 120.0)
    longer = dataclasses.replace(slow, budget=dataclasses.replace(slow.budget, tokens=32768))
    source = GivenSource([Job(key=0, spec=longer), Job(key=1, spec=small[0])])
    engine = RayEngine(jobs=1, data=small[1], folder=tmp_path, address=made.address, blocks=("misbehaving",))
    try:
        with Interrupts() as interrupts, engine:
            assert engine.drive(source, interrupts)
    finally:
        made.shutdown()
    assert source.results[0].status is Status.OUT_OF_MEMORY
    assert "running out of memory" in source.results[0].reason
    assert source.results.keys() == {0, 1}


@pytest.mark.fault
def test_every_way_to_end_is_told_as_by_the_local_engine(
    small: tuple[TrialSpec, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Ahead()
    monkeypatch.setattr(ray_talk, "time", clock)
    spec, file = small
    jobs = [
        Job(key=0, spec=spec, weights=tmp_path / "0.safetensors", test=True),
        Job(key=1, spec=spec),
        *(Job(key=2 + k, spec=going_wrong(spec, way)) for k, way in enumerate(("segfault", "raise", "nan", "exit"))),
        Job(key=6, spec=spec),
    ]
    local, far = GivenSource(jobs, pruned={1}), GivenSource(jobs, pruned={1})
    with Interrupts() as interrupts:
        with LocalEngine(jobs=1, data=file, folder=tmp_path / "local") as engine:
            assert engine.drive(local, interrupts)
        (tmp_path / "0.safetensors").unlink()
        with RayEngine(jobs=2, data=file, folder=tmp_path) as engine:
            assert engine.drive(far, interrupts)
            stopped = GivenSource([Job(key=0, spec=going_wrong(spec, "slow", 600.0))])
            stopped.on_tick = lambda: stop_what_runs(stopped, clock)
            assert engine.drive(stopped, interrupts)
            assert ended_together() == [Status.PREEMPTED, None]
            with pytest.raises(ZeroDivisionError):
                engine.drive(GivenSource([Job(key=0, spec=spec)], on_tick=lambda: bool(1 // 0)), interrupts)
    assert stopped.results[0].status is Status.TIMED_OUT
    assert "no word from the worker" in stopped.results[0].reason
    assert far.peak == 2
    assert [far.results[key].status for key in range(7)] == [
        Status.OK,
        Status.PRUNED,
        Status.FAILED,
        Status.FAILED,
        Status.DIVERGED,
        Status.FAILED,
        Status.OK,
    ]
    for key in far.results:
        assert numbers(far.results[key]) == numbers(local.results[key])
    assert "test/loss" in far.results[0].metrics
    assert (tmp_path / "0.safetensors").exists()
    assert "about to segfault" in far.results[2].last_lines
