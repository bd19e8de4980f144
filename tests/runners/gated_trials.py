"""The trials of benchmarks/fake_trials.py, of which each worker runs only as many as a file says: then it waits.

Tests decide so how far a search gets before something happens to it, however fast the machine is.
"""

import os
import time
from pathlib import Path
from typing import Any

from runners.trials import Report, RunJob
from search_space.records import TrialResult

TRIALS = "gated_trials:made_up"
GATE = "TRIALS_GATE"
"""Environment variable: the file."""
ALL = 1_000_000


def allow(gate: Path, trials: int) -> None:
    """Let each worker run so many trials in all."""
    partial = gate.with_suffix(".partial")
    partial.write_text(str(trials))
    partial.replace(gate)


def made_up() -> RunJob:
    """What a worker runs instead of training."""
    import fake_trials

    gate, begun, run = Path(os.environ[GATE]), 0, fake_trials.made_up()

    def run_job(job: dict[str, Any], report: Report) -> TrialResult:
        nonlocal begun
        begun += 1
        while begun > int(gate.read_text()):
            time.sleep(0.01)
        return run(job, report)

    return run_job
