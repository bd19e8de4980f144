"""A search through Ray goes on after any end of its driver, with the trials that the local engine would have run."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from studied import experiment, uri
from test_kill import stored

from runners.study import Study

HERE = Path(__file__).parent
TRIALS = 12
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


def descendants(pid: int) -> set[int]:
    """Every process below one."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def end_by(number: signal.Signals, folder: Path, trials: int) -> tuple[int, str, set[int]]:
    """Start the search, wait for so many stored trials, send the signal; exit code, output, processes of Ray."""
    with subprocess.Popen(command(folder, "ray"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        end = time.monotonic() + 120
        while stored(folder) < trials and driver.poll() is None:
            assert time.monotonic() < end, "the driver makes no progress"
            time.sleep(0.05)
        assert driver.poll() is None, driver.communicate()
        below = descendants(driver.pid)
        assert any("raylet" in Path(f"/proc/{pid}/cmdline").read_text() for pid in below)
        driver.send_signal(number)
        output, errors = driver.communicate(timeout=60)
    return driver.returncode, output + errors, below


@pytest.mark.fault
def test_a_killed_driver_changes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    local, far = tmp_path / "local", tmp_path / "far"
    subprocess.run(command(local, "local"), check=True, capture_output=True)
    code, text, stopped = end_by(signal.SIGTERM, far, 3)
    assert code == 0
    assert "interrupted SIGTERM" in text
    code, _, orphaned = end_by(signal.SIGKILL, far, 6)
    assert code == -signal.SIGKILL
    assert len(ended(far)) < TRIALS
    done = subprocess.run(command(far, "ray"), check=True, capture_output=True, text=True)
    assert "all 12 trials were run" in done.stdout
    assert done.stdout.count("\n") == 1
    for word in ("ray", "Traceback", "Warning"):
        assert word not in done.stderr
    assert ended(far) == ended(local)
    assert len(ended(far)) == TRIALS
    # Ray's agents look for the cluster that was killed beside them for half a minute.
    end = time.monotonic() + 60
    while left := [pid for pid in stopped | orphaned if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, f"{left} live on"
        time.sleep(0.1)
