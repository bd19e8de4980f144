"""`assay replay`: train a run again from the store alone; 0 when it comes out as recorded."""

import argparse
import json
import sys

from runners.replay import replay


def run(arguments: argparse.Namespace) -> int:
    """Replay and say whether the numbers agree."""
    report = replay(
        arguments.run,
        arguments.tracking_uri,
        arguments.data,
        recorded_blocks=arguments.recorded_blocks,
        begins=lambda: print(f"training {arguments.run} again under its recorded conditions ...", file=sys.stderr),
    )
    print(json.dumps(report.plain(), indent=2) if arguments.json else report.text())
    return 0 if report.good else 1
