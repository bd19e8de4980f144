"""Runs the search of an experiment file in a process of its own: `python drive.py FOLDER FILE [OVERRIDE ...]`."""

import sys
from pathlib import Path

from runners.candidate import full_space
from runners.search import run_search
from runners.tasks import TASKS
from runners.tracking import Tracker
from search_space.errors import UserError
from search_space.experiment import read


def main(folder: Path, file: Path, overrides: list[str]) -> int:
    """Run or go on with the search kept in the folder; exit code 2 for what the user can mend."""
    experiment = read(file, full_space=full_space, tasks=TASKS, overrides=overrides)
    try:
        outcome = run_search(
            experiment, tracker=Tracker(f"sqlite:///{folder}/mlflow.db"), study_uri=f"sqlite:///{folder}/study.db"
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"ended: {outcome.ended}; running {outcome.running}; interrupted {outcome.interrupted}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
