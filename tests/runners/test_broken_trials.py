"""Trials that break in every way, in a whole search: each gets its class and reason, and no other trial suffers."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from mlflow.entities import Run
from studied import EXPERIMENT, uri

from runners import cli
from runners.store import Store
from search_space.places import locate
from search_space.records import Metric, Status, Tag

HERE = Path(__file__).parent
SOUND = """
    softmax: {kv_heads: [1, 2], queries_per_kv: [1, 2, 4], head_dim: 8, qk_norm: none}
    sliding_window: {kv_heads: [1, 2], queries_per_kv: [1, 2], head_dim: 8, qk_norm: none, window: [8, 16]}
"""
WAYS = {
    "memory": (Status.OUT_OF_MEMORY, "allocate memory", "FAILED"),
    "nan": (Status.DIVERGED, "the training loss is nan", "FINISHED"),
    "segfault": (Status.FAILED, "SIGSEGV", "FAILED"),
    "hang": (Status.TIMED_OUT, "no answer before its first reading", "KILLED"),
    "raise": (Status.FAILED, "RuntimeError: this mixer always raises", "FAILED"),
    "disk": (Status.FAILED, "OSError: [Errno 28] No space left on device", "FAILED"),
    "late": (Status.TIMED_OUT, "passed while the model was built", "KILLED"),
}


def text_of(mixers: str, *, max_seconds: int = 120) -> str:
    """The small experiment over these mixers, every point once."""
    found = EXPERIMENT.replace("position: [none, rotary]", "position: none").replace("max_seconds: 60", "{seconds}")
    start, end = found.index("  mixer:"), found.index("  position:")
    found = found[:start] + f"  mixer:\n{mixers}" + found[end:]
    return found.replace("{seconds}", f"max_seconds: {max_seconds}") + "\nblocks: [misbehaving]\n"


def drive(folder: Path, text: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run the search in a process of its own, where the misbehaving mixer is registered."""
    file = folder / "small.yaml"
    file.write_text(text)
    asked = ["search.sampler=grid", "optimizer.adamw.learning_rate=0.003", *overrides]
    command = [sys.executable, str(HERE / "drive.py"), str(folder), str(file), *asked]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def runs(folder: Path) -> list[Run]:
    store = Store(locate(f"sqlite:///{folder}/mlflow.db"))
    return store.children(store.parent("small"))


def shown(folder: Path, number: int, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["show", f"small/{number}", "--tracking-uri", f"sqlite:///{folder}/mlflow.db"]) == 0
    return capsys.readouterr().out


@pytest.mark.fault
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_seven_broken_trials_of_twenty_one_are_told_apart_and_fourteen_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    mixers = f"{SOUND}    misbehaving: {{way: [{', '.join(WAYS)}]}}\n"
    drive(tmp_path, text_of(mixers, max_seconds=12), "search.trials=21", "engine.jobs=2", f"engine.kind={engine}")
    found = {run.data.params.get("model.mixer.misbehaving.way", run.info.run_id): run for run in runs(tmp_path)}
    assert len(found) == 21
    for way, (status, reason, state) in WAYS.items():
        run = found.pop(way)
        assert run.data.tags[Tag.STATUS] == status, way
        assert reason in run.data.tags[Tag.REASON], way
        assert run.info.status == state, way
        said = shown(tmp_path, int(run.data.tags[Tag.NUMBER]), capsys)
        assert f"status   {status}" in said
        assert reason in said
        assert Metric.PEAK_BYTES in said
        attempts = run.data.tags.get(Tag.ATTEMPTS, "")
        assert attempts.startswith("1: out_of_memory") if way == "memory" else not attempts, way
        assert ("last lines" in said) == (way not in ("nan", "late")), way
    assert Counter((run.data.tags[Tag.STATUS], run.info.status) for run in found.values()) == {("ok", "FINISHED"): 14}
    assert not list((tmp_path / "small" / "checkpoints").glob("*"))


ONE = "    misbehaving: {way: slow}\n"
"""A mixer that takes a quarter of a second each time."""


def worker_of(driver: int) -> int:
    """A child of the driver that runs trials; 0 when there is none yet."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes()
        except (OSError, IndexError):
            continue
        if parent == driver and b"runners.worker" in command:
            return int(folder.name)
    return 0


def wait_for(header: Path, tokens: int) -> None:
    """Wait until a checkpoint of so many tokens is in place."""
    end = time.monotonic() + 300
    while not (header.exists() and json.loads(header.read_text())["tally"]["tokens"] >= tokens):
        assert time.monotonic() < end, "no checkpoint was written"
        time.sleep(0.02)


@pytest.mark.fault
@pytest.mark.parametrize("whom", ["worker", "driver"])
def test_a_killed_trial_goes_on_in_the_same_run_with_steps_that_strictly_increase(tmp_path: Path, whom: str) -> None:
    """A checkpoint stands at a reading, the kill comes after it: nothing is trained twice, nothing is logged twice."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    asked = ("search.trials=1", "engine.checkpoint_tokens=256", "budget.tokens=2560")
    for folder in (whole, broken):
        folder.mkdir()
        (folder / "small.yaml").write_text(text_of(ONE))
    command = [sys.executable, str(HERE / "drive.py"), str(broken), str(broken / "small.yaml")]
    command += ["search.sampler=grid", "optimizer.adamw.learning_rate=0.003", *asked]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as driver:
        wait_for(broken / "small/checkpoints/search-0-0/checkpoint.json", 768)
        os.kill(driver.pid if whom == "driver" else worker_of(driver.pid), signal.SIGKILL)
        assert driver.wait() == (-signal.SIGKILL if whom == "driver" else 0)
    before = [run.info.run_id for run in runs(broken)]
    if whom == "driver":
        drive(broken, text_of(ONE), *asked)
    drive(whole, text_of(ONE), *asked)
    (again,), (unbroken,) = runs(broken), runs(whole)
    assert [again.info.run_id] == before
    assert (again.data.tags[Tag.STATUS], again.info.status) == ("ok", "FINISHED")
    store, other = (Store(locate(f"sqlite:///{folder}/mlflow.db")) for folder in (broken, whole))
    for metric in (Metric.VALIDATION_CURVE, Metric.TRAIN_CURVE):
        ours = store.client.get_metric_history(again.info.run_id, metric)
        theirs = other.client.get_metric_history(unbroken.info.run_id, metric)
        ours.sort(key=lambda point: point.timestamp)
        steps = [point.step for point in ours]
        assert all(one < after for one, after in itertools.pairwise(steps)), steps
        assert [(p.step, p.value) for p in ours] == [(p.step, p.value) for p in sorted(theirs, key=lambda p: p.step)]
    result = store.result(again)
    assert result.metrics[Metric.LOSS] == other.result(unbroken).metrics[Metric.LOSS]
    attempts = again.data.tags.get(Tag.ATTEMPTS, "")
    assert ("SIGKILL" in attempts) == (whom == "worker")
    assert uri(broken)
