"""`assay search`: run a search to its end, then say what came of it."""

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

from runners.commands.reading import read_experiment
from runners.connecting import StoreError
from runners.search import SearchOutcome, run_search
from runners.store import Store
from runners.tracking import Tracker
from search_space.errors import UserError
from search_space.experiment import Experiment
from search_space.places import locate, study_uri
from search_space.records import Status


def run(arguments: argparse.Namespace) -> int:
    """Search, report, and print what to type next; 1 when no trial came to a result."""
    overrides = [f"search.trials={arguments.trials}"] if arguments.trials else []
    overrides += [f"search.seed={arguments.seed}"] if arguments.seed is not None else []
    overrides += [f"engine.retries={arguments.retries}"] if arguments.retries is not None else []
    overrides += [f"engine.kind={arguments.engine}"] if arguments.engine else []
    overrides += [f"search.warm_start=[{', '.join(arguments.warm_start)}]"] if arguments.warm_start else []
    experiment = read_experiment(arguments, tuple(overrides))
    place = locate(arguments.tracking_uri)
    print(_opening(experiment, arguments.jobs), file=sys.stderr)
    tracker = Tracker(arguments.tracking_uri, waits=True)
    study = arguments.study or study_uri(place, experiment.name)
    outcome = run_search(
        experiment,
        tracker=tracker,
        study_uri=study,
        jobs=arguments.jobs,
        data_path=arguments.data,
        address=arguments.address,
        extend=arguments.extend,
        join=arguments.join,
    )
    if experiment.final.contest.top and not (outcome.interrupted or outcome.unshown or arguments.join):
        _contest(experiment, tracker, study, arguments)
    _close(outcome, tracker, arguments)
    return 0 if outcome.counts.get(Status.OK, 0) and not outcome.interrupted else 1


def _opening(experiment: Experiment, jobs: int) -> str:
    return (
        f"{experiment.name}: {experiment.search.trials} trials of up to {experiment.budget.tokens:,} tokens, "
        f"{experiment.search.sampler} + {experiment.search.pruner.kind}, {jobs or experiment.engine.jobs} job(s), "
        f"seed {experiment.search.seed}"
    )


def _contest(experiment: Experiment, tracker: Tracker, study: str, arguments: argparse.Namespace) -> None:
    """The finals of the best candidates, where there are any."""
    from runners.commands.finals import after_search, told

    try:
        told(after_search(experiment, tracker, study, arguments), "the same command")
    except UserError as error:
        print(f"no finals of the best candidates: {error}", file=sys.stderr)


def _close(outcome: SearchOutcome, tracker: Tracker, arguments: argparse.Namespace) -> None:
    counts = ", ".join(f"{count} {status}" for status, count in outcome.counts.items() if count)
    print(f"\n{outcome.name}: {counts or 'no trial'} in {outcome.seconds:.0f} s; {outcome.ended}")
    if outcome.interrupted:
        print(f"interrupted by {outcome.interrupted}: the same command goes on; {outcome.running} trial(s) run again")
    if outcome.unshown:
        print(
            f"the tracking store could not be written: {outcome.unshown} ends are in the study alone; the same command "
            f"shows them, and so does: assay sync {outcome.name}"
        )
        return
    if not outcome.counts.get(Status.OK, 0):
        why = (
            f"assay runs {outcome.name} tells why"
            if outcome.counts
            else "nothing was trained; assay check FILE says more"
        )
        print(f"no trial came to a result: {why}")
        return
    _verdicts(outcome, tracker, arguments)


def _verdicts(outcome: SearchOutcome, tracker: Tracker, arguments: argparse.Namespace) -> None:
    from analysis.load import load_search
    from analysis.text import effects_text, leaderboard_text, verdicts_text

    search = load_search(tracker.place.uri, outcome.name)
    for text in (leaderboard_text(search), effects_text(search), verdicts_text(search)):
        print(f"\n{text}")
    store = f" --tracking-uri {shlex.quote(arguments.tracking_uri)}" if arguments.tracking_uri else ""
    if not arguments.no_report and not outcome.interrupted:
        print(f"\nReport: {_report(outcome.name, tracker)}")
    following = (f"best {outcome.name}", f"replay {outcome.name}/best", "dashboard")
    program = "assay" if shutil.which("assay") else os.path.relpath(Path(sys.executable).with_name("assay"))
    print("\nNext:", *(f"  {shlex.quote(program)} {command}{store}" for command in following), sep="\n")


def _report(name: str, tracker: Tracker) -> Path:
    from analysis.report import write_report
    from runners.commands.report import show

    page = write_report(tracker.place.uri, name, Path("reports") / name)
    try:
        show(Store(tracker.place), name, page)
    except StoreError as error:
        print(error, file=sys.stderr)
    return page
