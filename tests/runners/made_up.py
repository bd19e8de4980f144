"""Has drivers run trials that train nothing, benchmarks/fake_trials.py."""

import os
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"
TRIALS = "fake_trials:made_up"


def environment(seconds: float, **more: str) -> dict[str, str]:
    """The environment of a driver (drive.py) whose trials take so many seconds each."""
    path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH", ""))))
    given = {"ASSAY_TRIALS": TRIALS, "FAKE_TRIAL_SECONDS": str(seconds), "PYTHONPATH": path}
    return {**os.environ, **given, **more}
