"""`assay report`: Markdown and pictures of one search."""

import argparse
from pathlib import Path

from analysis.report import write_report
from search_space.places import file_name, locate


def run(arguments: argparse.Namespace) -> int:
    """Write the report and print where it is."""
    out = Path(arguments.out) if arguments.out else Path("reports") / file_name(arguments.name)
    print(write_report(locate(arguments.tracking_uri).uri, arguments.name, out))
    return 0
