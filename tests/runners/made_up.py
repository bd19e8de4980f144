"""Has drivers run trials that train nothing, benchmarks/fake_trials.py."""

import os
from pathlib import Path

import gated_trials

FOLDER = Path(__file__).parents[2] / "benchmarks"
TRIALS = "fake_trials:made_up"


def environment(seconds: float, gate: Path | None = None, **more: str) -> dict[str, str]:
    """The environment of a driver (drive.py) whose trials take so many seconds each, and wait at a gate if there is."""
    path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH", ""))))
    held = {"ASSAY_TRIALS": gated_trials.TRIALS, gated_trials.GATE: str(gate)} if gate else {"ASSAY_TRIALS": TRIALS}
    return {**os.environ, **held, "FAKE_TRIAL_SECONDS": str(seconds), "PYTHONPATH": path, **more}
