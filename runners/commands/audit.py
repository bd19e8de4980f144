"""`assay audit`: prove that every trial of a search followed from what had been told when it was proposed."""

import argparse
import dataclasses
import json
import sys

from runners.audit import audit
from runners.study import Study
from runners.sync import stored_experiment
from runners.tasks import task_from_plain
from runners.warm import FINGERPRINT
from search_space.places import locate, study_uri

_MOST_SHOWN = 20


def run(arguments: argparse.Namespace) -> int:
    """Repeat every proposal and compare; 1 when one differs."""
    uri = arguments.study or study_uri(locate(arguments.tracking_uri), arguments.name)
    experiment = stored_experiment(uri, arguments.name)
    with Study.open(uri, experiment, join=True) as study:
        study.bind(task_from_plain(experiment.task).shape(), study.noted(FINGERPRINT, ""))
        found = []
        for each in audit(study):
            found.append(each)
            if len(found) % 100 == 0:
                print(f"{len(found)} of {len(study.trials())} trials audited", file=sys.stderr)
    wrong = [each for each in found if not each.holds]
    skipped = [each for each in found if each.holds and each.why]
    drawn = sum(each.drawn for each in found)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(each) for each in found], indent=1))
        return 1 if wrong else 0
    for each in (*wrong, *skipped)[:_MOST_SHOWN]:
        print(f"trial {each.number}: {each.why}")
    good = drawn - len(wrong) - len(skipped)
    print(
        f"{arguments.name}: {good} of {drawn} drawn trials follow from what had been told when they were proposed"
        + (f", {len(skipped)} not audited" if skipped else "")
    )
    return 1 if wrong else 0
