"""`assay retry`: run trials again that did not end well, under their numbers, and say what came of them."""

import argparse
import sys

from runners.candidate import full_space
from runners.reopening import Wanted, failed, reopen
from runners.search import run_search
from runners.store import Store
from runners.study import Study
from runners.tasks import TASKS
from runners.tracking import Tracker
from search_space.errors import UserError
from search_space.experiment import Experiment, from_plain
from search_space.places import locate, study_uri
from search_space.records import Artifact, Stage, Status, Tag


def run(arguments: argparse.Namespace) -> int:
    """Reopen the trials and run them; 1 when one of them ends badly again."""
    place = locate(arguments.tracking_uri)
    store = Store(place)
    name, wanted = _wanted(store, arguments)
    parent = store.parent(name)
    experiment = _experiment(store, name)
    study = arguments.study or parent.data.tags.get(Tag.STUDY) or study_uri(place, name)
    with Study.open(study, experiment) as opened:
        wanted = wanted or failed(opened)
        if not wanted:
            print(f"{name}: no trial failed")
            return 0
        reopen(opened, wanted)
    print(f"{name}: {len(wanted)} trial(s) run again", file=sys.stderr)
    run_search(
        experiment,
        tracker=Tracker(arguments.tracking_uri),
        study_uri=study,
        jobs=arguments.jobs,
        data_path=arguments.data,
        address=arguments.address,
        retry=True,
    )
    return _close(store, name, wanted)


def _wanted(store: Store, arguments: argparse.Namespace) -> tuple[str, list[Wanted]]:
    """The search, and the trial that was named; none with --failed, which leaves them to the study."""
    if arguments.failed:
        if "/" in arguments.run:
            raise UserError(f"assay retry {arguments.run} --failed: --failed takes the name of a search, not of a run")
        if Tag.LADDER in store.parent(arguments.run).data.tags:
            raise UserError(f"assay retry {arguments.run}: is a ladder, whose verdicts count what ended badly as that")
        return arguments.run, []
    if arguments.run in store.searches():
        raise UserError(f"assay retry {arguments.run}: is a search; add --failed, or name one of its runs")
    tags = store.find_run(arguments.run).data.tags
    if tags[Tag.STAGE] == Stage.TRAIN:
        raise UserError(f"assay retry {arguments.run}: is a longer training; assay train with --resume goes on with it")
    if tags[Tag.STAGE] == Stage.LADDER:
        raise UserError(f"assay retry {arguments.run}: is of a ladder, whose verdicts count it as having ended badly")
    if tags[Tag.STAGE] == Stage.SWEEP:
        raise UserError(f"assay retry {arguments.run}: a rate of a sweep that ended badly counts as a bad rate")
    return tags[Tag.SEARCH], [Wanted(stage=Stage(tags[Tag.STAGE]), number=int(tags[Tag.NUMBER]))]


def _experiment(store: Store, name: str) -> Experiment:
    return store.record(
        store.parent(name), Artifact.EXPERIMENT_PLAIN, lambda plain: from_plain(plain, full_space, TASKS)
    )


def _close(store: Store, name: str, wanted: list[Wanted]) -> int:
    good = True
    for each in wanted:
        path = f"{name}/{'' if each.stage is Stage.SEARCH else f'{each.stage}/'}{each.number}"
        tags = store.find_run(path).data.tags
        status = tags.get(Tag.STATUS, "running")
        print(": ".join(filter(None, (path, status, tags.get(Tag.REASON, "")))))
        good = good and status in (Status.OK, Status.PRUNED)
    return 0 if good else 1
