"""`assay dashboard`: MLflow on loopback, over the store of this folder."""

import argparse

from runners.dashboard import serve


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    return serve(arguments.tracking_uri, arguments.port)
