"""`assay ladder`: candidates of earlier searches at growing sizes, and a verdict at a size that is not trained."""

import argparse
import math
from pathlib import Path

from runners.ladder import LadderOutcome, ladder_name, run_ladder
from runners.ladder_plan import Asked
from runners.store import Store
from runners.tracking import Tracker
from search_space.errors import UserError
from search_space.places import locate, study_uri
from search_space.values import count


def run(arguments: argparse.Namespace) -> int:
    """Train what is lacking, then judge; 1 when the ladder is not whole."""
    asked = Asked(
        runs=tuple(arguments.runs),
        sizes=_sizes(arguments.sizes),
        target=arguments.target,
        seeds=arguments.seeds,
        tokens_per_param=arguments.tokens_per_param,
        name=arguments.name,
        sweep=arguments.sweep,
        depth=arguments.depth,
        batch_tokens=arguments.batch_tokens,
        device=arguments.device,
        sure=arguments.sure,
    )
    place = locate(arguments.tracking_uri)
    store, tracker = Store(place), Tracker(arguments.tracking_uri)
    outcome = run_ladder(
        asked,
        store=store,
        tracker=tracker,
        study_uri=arguments.study or study_uri(place, ladder_name(asked)),
        jobs=arguments.jobs,
        data_path=arguments.data,
        address=arguments.address,
    )
    return _close(outcome, store, tracker)


def _sizes(text: str) -> tuple[int, ...]:
    sizes = []
    for part in text.split(","):
        try:
            size = count()(int(part) if part.strip().isdecimal() else part.strip())
        except ValueError as error:
            raise UserError(f"--sizes {text}: {error}; write sizes with commas between, such as 1M,3M,10M") from error
        sizes.append(math.floor(size))
    return tuple(sizes)


def _close(outcome: LadderOutcome, store: Store, tracker: Tracker) -> int:
    counts = ", ".join(f"{number} {status}" for status, number in outcome.counts.items() if number)
    print(f"\n{outcome.name}: {counts or 'nothing trained'} in {outcome.seconds:.0f} s")
    if outcome.interrupted:
        print(f"interrupted by {outcome.interrupted}: the same command goes on")
        return 1
    if outcome.unshown:
        print(f"the tracking store lacks {outcome.unshown} results; the same command shows them")
        return 1
    from analysis.ladder import ladder_text, projections, read_ladder
    from analysis.report import write_report
    from runners.commands.report import show

    ladder = read_ladder(tracker.place.uri, outcome.name)
    print(f"\n{ladder_text(ladder, projections(ladder))}")
    page = write_report(tracker.place.uri, outcome.name, Path("reports") / outcome.name)
    show(store, outcome.name, page)
    print(f"\nReport: {page}")
    return 0 if outcome.is_whole else 1
