"""A search through Ray goes on after any end of its driver, with the trials that the local engine would have run."""

import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from namespaces import QUICK
from processes import descendants
from ray.cluster_utils import Cluster
from studied import experiment, uri
from test_kill import stored

from runners.ledger import RESULT
from runners.study import Study
from search_space.records import Status

HERE = Path(__file__).parent
TRIALS = 10
ASKED = (f"search.trials={TRIALS}", "search.pruner={asha: {grace_tokens: 256, factor: 2}}")


def command(folder: Path, engine: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    file = folder / "small.yaml"
    file.write_text(experiment().text)
    return [sys.executable, str(HERE / "drive.py"), str(folder), str(file), *ASKED, f"engine.kind={engine}"]


def ended(folder: Path) -> list[tuple[object, ...]]:
    """Point, status, curve and metrics of every trial that ended, without what depends on the clock."""
    found: list[tuple[object, ...]] = []
    if not (folder / "study.db").exists():
        return found
    with Study.open(uri(folder), experiment(*ASKED)) as study:
        for entry in study.trials():
            if entry.result is not None:
                curve = [(reading.tokens, reading.loss, reading.train_loss) for reading in entry.result.curve]
                metrics = {
                    name: value
                    for name, value in entry.result.metrics.items()
                    if "second" not in name and "peak" not in name
                }
                found.append((dict(entry.point), entry.spec.id, entry.result.status, curve, metrics))
    return found


def kill_after(trials: int, folder: Path) -> set[int]:
    """Start the search, wait for so many stored trials, kill it; the processes that it had started."""
    with subprocess.Popen(command(folder, "ray"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        wait_for(folder, trials, driver)
        assert driver.poll() is None, driver.communicate()
        below = descendants(driver.pid)
        assert any("raylet" in Path(f"/proc/{pid}/cmdline").read_text() for pid in below)
        driver.kill()
    return below


@pytest.mark.slow
def test_an_interpreter_in_a_folder_with_a_space_runs_trials(tmp_path: Path) -> None:
    environment = tmp_path / "a b"
    environment.symlink_to(sys.prefix)
    asked = command(tmp_path / "small", "ray")
    asked[0] = str(environment / "bin" / Path(sys.executable).name)
    done = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=200)
    assert f"all {TRIALS} trials were run" in done.stdout


@pytest.mark.fault
def test_a_killed_driver_changes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    local, far = tmp_path / "local", tmp_path / "far"
    subprocess.run(command(local, "local"), check=True, capture_output=True)
    orphaned = kill_after(5, far)
    assert len(ended(far)) < TRIALS
    done = subprocess.run(command(far, "ray"), check=True, capture_output=True, text=True)
    assert f"all {TRIALS} trials were run" in done.stdout
    assert done.stdout.count("\n") == 1
    for word in ("ray", "Traceback", "Warning"):
        assert word not in done.stderr
    assert ended(far) == ended(local)
    assert len(ended(far)) == TRIALS
    # Ray's agents look for the cluster that was killed beside them for half a minute.
    end = time.monotonic() + 60
    while left := [pid for pid in orphaned if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, f"{left} live on"
        time.sleep(0.1)


@pytest.mark.fault
def test_a_machine_dies_then_the_driver_stops_and_no_trial_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": QUICK})
    lost = cluster.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    longer = ("search.pruner=none", "search.trials=7", "engine.jobs=2", "budget.tokens=32768", "budget.eval_every=2048")
    asked = [*command(tmp_path, "ray"), *longer]
    try:
        with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as driver:
            wait_for(tmp_path, 4, driver)
            cluster.remove_node(lost, allow_graceful=False)
            cluster.add_node(num_cpus=1)
            wait_for(tmp_path, 6, driver)
            driver.terminate()
            assert driver.stdout is not None
            assert "interrupted SIGTERM" in driver.stdout.read()
            assert driver.wait() == 0
        assert running(tmp_path) <= 2
        with subprocess.Popen(asked, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as driver:
            wait_for(tmp_path, 8, driver)
            assert driver.stderr is not None
            assert driver.wait() == 0, driver.stderr.read()
    finally:
        cluster.shutdown()
    with Study.open(uri(tmp_path), experiment(*ASKED, *longer)) as study:
        entries = study.trials()
        assert len(entries) == 7
        assert {entry.result.status for entry in entries if entry.result} <= {Status.OK, Status.PRUNED}
    by_machine = [each for entry in entries for each in entry.attempts if "taken away" in each["reason"]]
    assert [each["status"] for each in by_machine] in ([], ["preempted"])


def wait_for(folder: Path, trials: int, driver: "subprocess.Popen[str]") -> None:
    """Wait for so many stored trials or the driver's end; never do more than two run."""
    end = time.monotonic() + 240
    while stored(folder) < trials and driver.poll() is None:
        assert time.monotonic() < end, "the driver makes no progress"
        assert running(folder) <= 2
        time.sleep(0.05)


def running(folder: Path) -> int:
    """How many trials run, as the study's storage has it: those that have no result."""
    if not stored(folder):
        return 0
    query = (
        "SELECT count(*) FROM trials WHERE state = 'RUNNING' AND trial_id NOT IN "
        "(SELECT trial_id FROM trial_user_attributes WHERE key = ?)"
    )
    with sqlite3.connect(folder / "study.db", timeout=30) as connection:
        return int(connection.execute(query, (RESULT,)).fetchone()[0])
