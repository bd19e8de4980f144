"""A driver killed at any moment, again and again, ends up with the trials of one that was never killed."""

import itertools
import os
import random
import signal
import sqlite3
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from drivers import Driver
from mlflow.entities import Run
from processes import wait_for
from sqlalchemy import Engine, event
from studied import experiment, uri
from tracked import store_uri

from runners.store import Store
from runners.study import Study
from search_space.places import locate
from search_space.records import Metric, Tag

TRIALS = 36
FIRST_KILL = 12
"""Trials stored before the first kill: past the sampler's start-up."""
KILLS = 10
SEED = "ASSAY_KILL_SEED"
"""Environment variable that holds the seed of the kills' moments, printed where they fail; otherwise it is new."""
ASKED = (f"search.trials={TRIALS}", "search.pruner={asha: {grace_tokens: 256, factor: 2}}")


def dies_before_storing() -> None:
    """Has this process die between the proposal of its second trial and its storing."""
    stored = 0

    @event.listens_for(Engine, "before_cursor_execute")
    def dies(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        nonlocal stored
        stored += statement.startswith("INSERT INTO trials ")
        if stored == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def kept_in(folder: Path) -> dict[str, str]:
    """The environment of a driver whose store lies in the folder."""
    return {**os.environ, "ASSAY_STORE": store_uri(folder)}


def stored(folder: Path) -> int:
    """How many trials the study holds, as another process sees it."""
    if not (folder / "study.db").exists():
        return 0
    with sqlite3.connect(folder / "study.db", timeout=30) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'trials'").fetchone():
            return 0
        return int(connection.execute("SELECT count(*) FROM trials").fetchone()[0])


def driven(folder: Path) -> None:
    """Run the search, or go on with it, to its end."""
    Driver(folder, *ASKED, given=kept_in(folder)).finish()


def kill_after(folder: Path, trials: int, delay: float) -> None:
    """Start the driver and kill it once so many trials are stored and a moment has passed, or one more is stored."""
    driver = Driver(folder, *ASKED, given=kept_in(folder))
    wait_for("progress of the driver", lambda: stored(folder) >= trials or driver.ended)
    end = time.monotonic() + delay
    while time.monotonic() < end and stored(folder) <= trials:
        time.sleep(0.001)
    assert driver.kill() == -signal.SIGKILL, driver.err


def seconds_of_a_trial(folder: Path) -> float:
    """The median time between the beginnings of two trials."""
    with Study.open(uri(folder), experiment(*ASKED)) as study:
        began = [entry.started for entry in study.trials()]
    return statistics.median(after - before for before, after in itertools.pairwise(began))


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
    store = Store(locate(store_uri(folder)))
    (parent,) = store.searches().values()
    return list(store.client.search_runs([parent.info.experiment_id], max_results=1000))


@pytest.mark.fault
def test_ten_kills_change_nothing(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    driven(whole)
    seed = int(os.environ.get(SEED) or time.time_ns())
    print(f"the moments of the kills are drawn from this seed; to repeat them: {SEED}={seed}")
    rng, longest = random.Random(seed), seconds_of_a_trial(whole)
    for kill in range(KILLS - 1):
        kill_after(broken, stored(broken) + 1 if kill else FIRST_KILL, rng.uniform(0.0, longest))
    died = Driver(broken, *ASKED, given=kept_in(broken), first=dies_before_storing)
    assert died.wait() == -signal.SIGKILL, died.err
    assert stored(broken) < TRIALS
    driven(broken)

    assert trials(broken) == trials(whole)
    assert len(trials(whole)) == TRIALS
    children = [run for run in runs(broken) if run.data.tags[Tag.KIND] == "trial"]
    assert Counter(run.data.tags[Tag.NUMBER] for run in children) == Counter(map(str, range(TRIALS)))
    assert {run.info.status for run in runs(broken)} == {"FINISHED"}
    losses = {run.data.tags[Tag.NUMBER]: run.data.metrics.get(Metric.LOSS) for run in children}
    other = [run for run in runs(whole) if run.data.tags[Tag.KIND] == "trial"]
    assert losses == {run.data.tags[Tag.NUMBER]: run.data.metrics.get(Metric.LOSS) for run in other}
