"""`assay export`: a trained model that needs no store, and its entry in the store's model registry."""

import argparse
import shlex
import sys

from runners.connecting import StoreError
from runners.export import export, registered


def run(arguments: argparse.Namespace) -> int:
    """Write the model's folder, register it, and say how to load it."""
    folder = export(
        arguments.run,
        arguments.to,
        arguments.tracking_uri,
        arguments.data,
        recorded_blocks=arguments.recorded_blocks,
    )
    loader = shlex.quote(str(folder / "load_model.py"))
    print(f"{folder}\n  load it:  python {loader}   (or: from load_model import load)")
    try:
        model = registered(folder, arguments.tracking_uri)
    except StoreError as error:
        print(error, file=sys.stderr)
    else:
        print(f"  in the registry:  {model}" if model else "  the store has no model registry: not registered")
    return 0
