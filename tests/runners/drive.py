"""Runs the search of an experiment file in a process of its own: `python drive.py FOLDER FILE [--join] [OVERRIDE ...]`.

Environment variables: ASSAY_STUDY, URI of the study, which otherwise lies in the folder; ASSAY_STORE, of the tracking
store, likewise; ASSAY_TRIALS, import path of what runs trials.
"""

import os
import sys
from pathlib import Path

from runners.candidate import full_space
from runners.search import run_search
from runners.tasks import TASKS
from runners.tracking import Tracker
from runners.trials import TRAINED
from search_space.errors import UserError
from search_space.experiment import read


def main(folder: Path, file: Path, overrides: list[str]) -> int:
    """Run or go on with the search kept in the folder; exit code 2 for what the user can mend."""
    join = "--join" in overrides
    overrides = [override for override in overrides if override != "--join"]
    experiment = read(file, full_space=full_space, tasks=TASKS, overrides=overrides)
    study = os.environ.get("ASSAY_STUDY", f"sqlite:///{folder}/study.db")
    try:
        tracker = Tracker(os.environ.get("ASSAY_STORE", f"sqlite:///{folder}/mlflow.db"), waits=True)
        trials = os.environ.get("ASSAY_TRIALS", TRAINED)
        outcome = run_search(experiment, tracker=tracker, study_uri=study, join=join, trials=trials)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"ended: {outcome.ended}; running {outcome.running}; interrupted {outcome.interrupted}")
    print(f"unshown {outcome.unshown}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
