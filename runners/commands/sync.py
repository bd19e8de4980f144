"""`assay sync`: show in a tracking store what a study holds."""

import argparse
import sys
from pathlib import Path

from runners.store import Store
from runners.sync import sync
from runners.tracking import Tracker
from search_space.errors import UserError
from search_space.places import SQLITE, locate, study_uri


def run(arguments: argparse.Namespace) -> int:
    """Write what the store lacks, and say what was written."""
    folder = Path(arguments.source).absolute()
    if not arguments.study and not (folder / "studies").is_dir():
        raise UserError(
            f"--from {arguments.source}: holds no folder studies/; name a copy of an mlruns folder, or --study URI"
        )
    source = locate(f"{SQLITE}{folder}/mlflow.db")
    tracker = Tracker(arguments.tracking_uri)
    done = sync(
        arguments.name,
        study_uri=arguments.study or study_uri(source, arguments.name),
        source=Store(source) if source.database is not None and source.database.is_file() else None,
        tracker=tracker,
        progress=lambda text: print(text, file=sys.stderr),
    )
    print(f"{done.name}: {done.written} trials written to {tracker.place.uri}, {done.present} were there")
    if done.unfinished:
        print(f"{done.unfinished} have no end yet; the search runs them when it goes on")
    if done.without_weights:
        print(f"{done.without_weights} without trained parameters, which are not in {folder}")
    return 0
