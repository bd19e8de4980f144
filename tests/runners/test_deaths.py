"""The kernel ends a worker for want of memory: the trial is out of memory, not taken away."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from studied import FINITE, experiment

from runners.candidate import make_spec, resolve
from runners.tasks import task_from_plain
from search_space.records import Seeds, Status, result_from_plain, to_plain
from search_space.space import default_point

HERE = Path(__file__).parent
ROOM = 2 * 2**30
SCRIPT = """
import json, os, sys
from pathlib import Path
sys.path[:0] = [{here!r}]
Path({group!r}, "cgroup.procs").write_text(str(os.getpid()))
from given import GivenSource
from runners.engine import Interrupts, Job
from runners.local_engine import LocalEngine
from search_space.records import spec_from_plain, to_plain
from test_local_engine import going_wrong
spec = spec_from_plain(json.loads(sys.stdin.readline()))
jobs = [Job(key=0, spec=going_wrong(spec, "devour")), Job(key=1, spec=spec)]
source = GivenSource(jobs)
with LocalEngine(jobs=1, data=Path({data!r}), folder=Path({folder!r})) as engine, Interrupts() as interrupts:
    engine.drive(source, interrupts)
print(json.dumps([to_plain(source.results[key]) for key in (0, 1)]))
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of this machine with little memory; skips where none can be made."""
    lines = Path("/proc/self/cgroup").read_text().splitlines() if Path("/proc/self/cgroup").exists() else []
    places = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            places["memory.max"] = Path("/sys/fs/cgroup", path.lstrip("/"))
        elif "memory" in controllers.split(","):
            places["memory.limit_in_bytes"] = Path("/sys/fs/cgroup/memory", path.lstrip("/"))
    for limit, parent in places.items():
        made = parent / f"assay-test-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            (made / limit).write_text(str(ROOM))
        except OSError:
            made.rmdir()
            continue
        yield made
        made.rmdir()
        return
    pytest.skip("no control group with a memory limit can be made here")


@pytest.mark.fault
def test_a_worker_that_the_kernel_ended_for_want_of_memory_ran_out_of_it(group: Path, tmp_path: Path) -> None:
    asked = experiment(*FINITE)
    data = task_from_plain(asked.task).prepare()
    data.save(tmp_path / "data.safetensors")
    resolved = resolve(default_point(asked.space), asked, data.shape)
    spec = make_spec(resolved, asked, fingerprint=data.fingerprint, seeds=Seeds(init=1, data=2, dropout=3))
    script = SCRIPT.format(
        here=str(HERE), group=str(group), data=str(tmp_path / "data.safetensors"), folder=str(tmp_path)
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(to_plain(spec)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    devoured, sound = (result_from_plain(plain) for plain in json.loads(done.stdout))
    assert devoured.status is Status.OUT_OF_MEMORY
    assert devoured.reason == "the kernel ended the worker process for want of memory (signal SIGKILL)"
    assert ROOM / 4 < devoured.metrics["peak_bytes"] < ROOM
    assert sound.status is Status.OK
