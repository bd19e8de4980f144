"""Random SIGKILLs over drivers, workers and a tracking server change nothing: the short form of benchmarks/chaos.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"
SEED = "ASSAY_KILL_SEED"
"""Environment variable that holds the seed of the kills; otherwise it is new, and printed where they fail."""


@pytest.mark.fault
@pytest.mark.parametrize(("engine", "kills", "trials"), [("local", 20, 25), ("ray", 8, 16)])
def test_random_kills_change_nothing(engine: str, kills: int, trials: int) -> None:
    words = [
        sys.executable,
        str(CHAOS),
        "--engine",
        engine,
        "--kills",
        str(kills),
        "--trials",
        str(trials),
        "--verbose",
    ]
    given = ["--seed", os.environ[SEED]] if SEED in os.environ else []
    done = subprocess.run([*words, *given], capture_output=True, text=True, timeout=600, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert f"engine {engine}: {kills} SIGKILLs" in last
    assert re.search(r" 0 lost, 0 doubled, 0 runs RUNNING", last)
    assert last.endswith("0 faults")
