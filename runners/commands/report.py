"""`assay report`: a page, Markdown and pictures of one search."""

import argparse
import sys
from pathlib import Path

from analysis.report import first_answers, write_report
from runners.connecting import StoreError
from runners.publishing import publish
from runners.store import Store
from search_space.places import file_name, locate


def run(arguments: argparse.Namespace) -> int:
    """Write the report, print where it is, and show it in the dashboard too."""
    out = Path(arguments.out) if arguments.out else Path("reports") / file_name(arguments.name)
    place = locate(arguments.tracking_uri)
    page = write_report(place.uri, arguments.name, out)
    print(page)
    try:
        publish(Store(place), arguments.name, out, first_answers(page))
    except StoreError as error:
        print(error, file=sys.stderr)
    return 0
