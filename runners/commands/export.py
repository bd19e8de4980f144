"""`assay export`: a trained model that needs no store."""

import argparse
import shlex

from runners.export import export


def run(arguments: argparse.Namespace) -> int:
    """Write the model's folder and say how to load it."""
    folder = export(
        arguments.run,
        arguments.to,
        arguments.tracking_uri,
        arguments.data,
        recorded_blocks=arguments.recorded_blocks,
    )
    print(
        f"{folder}\n  load it:  python {shlex.quote(str(folder / 'load_model.py'))}   (or: from load_model import load)"
    )
    return 0
