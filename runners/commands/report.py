"""`assay report`: a page, Markdown and pictures of one search."""

import argparse
import sys
from pathlib import Path

from analysis.load import load_search
from analysis.report import first_answers, write_report
from runners.best import Ended
from runners.connecting import StoreError
from runners.publishing import publish
from runners.store import Store
from search_space.places import file_name, locate
from search_space.records import Metric


def run(arguments: argparse.Namespace) -> int:
    """Write the report, print where it is, and show it in the dashboard too."""
    out = Path(arguments.out) if arguments.out else Path("reports") / file_name(arguments.name)
    place = locate(arguments.tracking_uri)
    page = write_report(place.uri, arguments.name, out)
    print(page)
    try:
        show(Store(place), arguments.name, page)
    except StoreError as error:
        print(error, file=sys.stderr)
    return 0


def show(store: Store, name: str, page: Path) -> None:
    """Put a report that was written into the dashboard; StoreError where the store cannot be written."""
    done = load_search(store.place.uri, name).finished
    ended = map(Ended, done["end"], done["number"], done[Metric.LOSS])
    publish(store, name, page.parent, first_answers(page), ended)
