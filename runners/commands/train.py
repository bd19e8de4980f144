"""`assay train`: a candidate of a search trained longer, on one or several devices, and what came of it."""

import argparse
import sys

from runners.long_plan import Asked
from runners.long_training import train_longer
from runners.store import Store
from search_space.places import locate
from search_space.records import Metric, Status


def run(arguments: argparse.Namespace) -> int:
    """Train to the end, or go on; 1 unless it ends well."""
    asked = Asked(
        run=arguments.run,
        tokens=arguments.tokens,
        devices=arguments.devices,
        strategy=arguments.strategy,
        resume=arguments.resume,
        data_path=arguments.data,
        name=arguments.name,
        device=arguments.device,
        checkpoint_tokens=arguments.checkpoint_tokens,
    )
    trained = train_longer(Store(locate(arguments.tracking_uri)), asked)
    result = trained.result
    if result.status is Status.OK:
        print(f"{trained.path}: loss {result.metrics[Metric.LOSS]:.4f} after {result.tokens:,} tokens")
        print(f"  assay show {trained.path}\n  assay export {trained.path} --to FOLDER")
    else:
        print(f"{trained.path}: {result.status}: {result.reason}")
    if not trained.is_shown:
        print("the tracking store could not be written; the same command with --resume does it", file=sys.stderr)
    return 0 if result.status is Status.OK and trained.is_shown else 1
