"""`assay finals`: the best candidates of a search against a baseline, trained again until the order is decided."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.contest import JUDGE
from runners.candidate import full_space
from runners.contestants import Baseline
from runners.contesting import ContestOutcome, run_contest
from runners.store import Store
from runners.tasks import TASKS
from runners.tracking import Tracker
from search_space.errors import UserError
from search_space.experiment import ContestSpec, Experiment, from_plain, read
from search_space.places import locate, study_uri
from search_space.points import changed
from search_space.reading import sweep
from search_space.records import Artifact, Tag
from search_space.settings import MOST_FINALISTS
from search_space.space import searched, walk

if TYPE_CHECKING:
    from mlflow.entities import Run

_TOP = 5


def run(arguments: argparse.Namespace) -> int:
    """Run the finals to their end, or go on with them, and print the verdicts; 1 when they were cut off."""
    place = locate(arguments.tracking_uri)
    store = Store(place)
    parent = store.parent(arguments.name)
    experiment = from_plain(json.loads(store.text(parent, Artifact.EXPERIMENT_PLAIN)), full_space, TASKS)
    tracker = Tracker(arguments.tracking_uri)
    outcome = run_contest(
        experiment,
        _spec(arguments, _noted(parent, experiment), experiment),
        JUDGE,
        _baseline(arguments.baseline, experiment, store),
        tracker=tracker,
        study_uri=arguments.study or parent.data.tags.get(Tag.STUDY) or study_uri(place, arguments.name),
        jobs=arguments.jobs,
        data_path=arguments.data,
        address=arguments.address,
    )
    told(outcome, f"assay finals {arguments.name}")
    if outcome.trained and not outcome.unshown:
        _verdicts(place.uri, arguments.name)
    return 0 if outcome.is_over else 1


def after_search(experiment: Experiment, tracker: Tracker, study: str, arguments: argparse.Namespace) -> ContestOutcome:
    """The finals that the experiment's file asks for under `final.top`."""
    return run_contest(
        experiment,
        experiment.final.contest,
        JUDGE,
        own_baseline(experiment),
        tracker=tracker,
        study_uri=study,
        jobs=arguments.jobs,
        data_path=arguments.data,
        address=arguments.address,
        within_hours=True,
    )


def own_baseline(experiment: Experiment) -> Baseline:
    """The baseline that the experiment itself names."""
    return Baseline(point=experiment.baseline, source="baseline of the experiment")


def told(outcome: ContestOutcome, command: str) -> None:
    """Say on stderr how the contest stands, where it is not over or not shown."""
    if not outcome.is_over:
        print(f"cut off by {outcome.interrupted or 'max_hours'}: {command} goes on", file=sys.stderr)
    if outcome.unshown:
        print(
            f"the tracking store could not be written: {outcome.unshown} results are in the study alone; the same "
            f"command shows them",
            file=sys.stderr,
        )


def _verdicts(uri: str, name: str) -> None:
    from analysis.load import load_search
    from analysis.text import verdicts_text

    print(verdicts_text(load_search(uri, name)))
    print(f"\nNext:\n  assay report {name}\n  assay runs {name}")


def _noted(parent: "Run", experiment: Experiment) -> ContestSpec:
    """The terms on which the contest was begun, else those of the file, else the usual ones."""
    noted = json.loads(parent.data.tags.get(Tag.CONTEST, "{}"))
    if noted:
        return ContestSpec(**{field.name: noted[field.name] for field in dataclasses.fields(ContestSpec)})
    contest = experiment.final.contest
    return contest if contest.top else dataclasses.replace(contest, top=_TOP)


def _spec(arguments: argparse.Namespace, begun: ContestSpec, experiment: Experiment) -> ContestSpec:
    """The terms asked for; UserError where one is out of bounds."""
    given: dict[str, Any] = {
        "top": arguments.top or begun.top,
        "delta": begun.delta if arguments.delta is None else arguments.delta,
        "max_seeds": arguments.max_seeds or begun.max_seeds,
        "sweep": begun.sweep if arguments.sweep is None else arguments.sweep,
        "alpha": begun.alpha if arguments.alpha is None else arguments.alpha,
        "at_length": begun.at_length if arguments.at_length is None else arguments.at_length,
    }
    lengths = experiment.task[experiment.task_kind].get("eval_lengths", ())
    rules = [
        (given["top"] <= MOST_FINALISTS, "top", f"takes 1 to {MOST_FINALISTS}"),
        (0 <= given["delta"] < float("inf"), "delta", "takes a finite number from 0, in nats per token"),
        (given["max_seeds"] >= 2, "max-seeds", "takes a whole number from 2"),
        (0 < given["alpha"] <= 0.5, "alpha", "takes a chance above 0 and up to 0.5; 0.05 is usual"),
        (
            not given["at_length"] or given["at_length"] in lengths,
            "at-length",
            f"takes one of {list(lengths) or 'none'}",
        ),
    ]
    for good, option, rule in rules:
        if not good:
            raise UserError(f"assay finals --{option} {given[option.replace('-', '_')]}: {rule}")
    try:
        sweep(given["sweep"])
    except ValueError as error:
        raise UserError(f"assay finals --sweep {given['sweep']}: {error}") from error
    return ContestSpec(**given)


def _baseline(text: str, experiment: Experiment, store: Store) -> Baseline:
    """The baseline named on the command line: a file's baseline or only candidate, or a run's candidate."""
    if not text:
        if not experiment.baseline:
            raise UserError(
                f"search {experiment.name!r}: its experiment names no baseline; give --baseline FILE or a run, such as "
                f"--baseline {experiment.name}/0"
            )
        return own_baseline(experiment)
    if Path(text).is_file():
        return Baseline(point=_in(experiment, _point_of(Path(text))), source=text)
    from analysis.frame import typed

    params = store.find_run(text).data.params
    return Baseline(point=_in(experiment, {path: typed(value) for path, value in params.items()}), source=text)


def _point_of(file: Path) -> dict[str, str | int | float | bool]:
    """The point that a file names as baseline, or the only one of its space."""
    given = read(file, full_space=full_space, tasks=TASKS)
    if given.baseline:
        return dict(given.baseline)
    several = sorted(searched(given.space))
    if several:
        raise UserError(
            f"--baseline {file}: names no `baseline:` and its space holds several candidates ({', '.join(several[:4])} "
            f"are open); fix them, or name a baseline there"
        )
    return walk(given.space, lambda path, domain: domain.default)


def _in(experiment: Experiment, point: dict[str, str | int | float | bool]) -> dict[str, str | int | float | bool]:
    """The point in the space of the experiment."""
    return changed(experiment.full, experiment.space, point, {})
