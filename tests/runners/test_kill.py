"""A driver killed at any moment, again and again, ends up with the trials of one that was never killed."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from mlflow.entities import Run
from studied import experiment, uri

from runners.store import Store
from runners.study import Study
from search_space.places import locate
from search_space.records import Metric, Tag

HERE = Path(__file__).parent
TRIALS = 30
FIRST_KILL = 12
"""Trials stored before the first kill: past the sampler's start-up."""
KILLS = 10
SEED = "ASSAY_KILL_SEED"
"""Environment variable that holds the seed of the kills' moments, printed where they fail; otherwise it is new."""
ASKED = (f"search.trials={TRIALS}", "search.pruner={asha: {grace_tokens: 256, factor: 2}}")

DIES_BEFORE_STORING = """
import os, signal, sys
sys.path.insert(0, {here!r})
from optuna.storages import RDBStorage
inner = RDBStorage.create_new_trial
calls = 0
def dies(self, *arguments, **named):
    global calls
    calls += 1
    if calls == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return inner(self, *arguments, **named)
RDBStorage.create_new_trial = dies
from pathlib import Path
from drive import main
main(Path({folder!r}), Path({file!r}), {asked!r})
"""


def command(folder: Path) -> list[str]:
    file = folder / "small.yaml"
    file.write_text(experiment().text)
    return [sys.executable, str(HERE / "drive.py"), str(folder), str(file), *ASKED]


def stored(folder: Path) -> int:
    """How many trials the study holds, as another process sees it."""
    if not (folder / "study.db").exists():
        return 0
    with sqlite3.connect(folder / "study.db", timeout=30) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'trials'").fetchone():
            return 0
        return int(connection.execute("SELECT count(*) FROM trials").fetchone()[0])


def kill_after(folder: Path, trials: int, delay: float) -> None:
    """Start the driver, wait for so many stored trials and a moment, and kill it."""
    with subprocess.Popen(command(folder), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as driver:
        end = time.monotonic() + 120
        while stored(folder) < trials and driver.poll() is None:
            assert time.monotonic() < end, "the driver makes no progress"
            time.sleep(0.02)
        time.sleep(delay)
        driver.kill()
        assert driver.wait() == -signal.SIGKILL


def trials(folder: Path) -> list[tuple[object, ...]]:
    """Point, spec, status and curve of every trial; times are left out."""
    found: list[tuple[object, ...]] = []
    with Study.open(uri(folder), experiment(*ASKED)) as study:
        for entry in study.trials():
            assert entry.result is not None
            assert entry.settled
            curve = [(reading.tokens, reading.loss, reading.train_loss) for reading in entry.result.curve]
            redraws, history = entry.marks["redraws"], entry.marks["history"]
            found.append((dict(entry.point), entry.spec.id, entry.result.status, curve, redraws, history))
    return found


def runs(folder: Path) -> list[Run]:
    store = Store(locate(f"sqlite:///{folder}/mlflow.db"))
    (parent,) = store.searches().values()
    return list(store.client.search_runs([parent.info.experiment_id], max_results=1000))


@pytest.mark.fault
def test_ten_kills_change_nothing(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    subprocess.run(command(whole), check=True, capture_output=True)
    seed = int(os.environ.get(SEED) or time.time_ns())
    print(f"the moments of the kills are drawn from this seed; to repeat them: {SEED}={seed}")
    rng = random.Random(seed)
    for kill in range(KILLS - 1):
        kill_after(broken, FIRST_KILL + kill, rng.uniform(0.0, 0.4))
    last = [*command(broken)[2:]]
    script = DIES_BEFORE_STORING.format(here=str(HERE), folder=last[0], file=last[1], asked=list(ASKED))
    died = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    assert stored(broken) < TRIALS
    subprocess.run(command(broken), check=True, capture_output=True)

    assert trials(broken) == trials(whole)
    assert len(trials(whole)) == TRIALS
    children = [run for run in runs(broken) if run.data.tags[Tag.KIND] == "trial"]
    assert Counter(run.data.tags[Tag.NUMBER] for run in children) == Counter(map(str, range(TRIALS)))
    assert {run.info.status for run in runs(broken)} == {"FINISHED"}
    losses = {run.data.tags[Tag.NUMBER]: run.data.metrics.get(Metric.LOSS) for run in children}
    other = [run for run in runs(whole) if run.data.tags[Tag.KIND] == "trial"]
    assert losses == {run.data.tags[Tag.NUMBER]: run.data.metrics.get(Metric.LOSS) for run in other}
