"""`assay audit`: prove that every trial of a search followed from what had been told when it was proposed."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from runners.audit import Audited, audit
from runners.study import Study
from runners.sync import stored_experiment
from runners.tasks import task_from_plain
from runners.warm import FINGERPRINT
from search_space.places import locate, study_uri

_MOST_SHOWN = 20


def run(arguments: argparse.Namespace) -> int:
    """Repeat every proposal and compare; 1 when one differs. What could not be audited is counted apart."""
    uri = arguments.study or study_uri(locate(arguments.tracking_uri), arguments.name)
    experiment = stored_experiment(uri, arguments.name)
    with Study.open(uri, experiment, join=True) as study:
        study.bind(task_from_plain(experiment.task).shape(), study.noted(FINGERPRINT, ""))
        found = []
        for each in audit(study):
            found.append(each)
            if len(found) % 100 == 0:
                print(f"{len(found)} of {len(study.trials())} trials audited", file=sys.stderr)
    wrong = [each for each in found if each.holds is False]
    if arguments.json:
        print(json.dumps([dataclasses.asdict(each) for each in found], indent=1))
    else:
        skipped = [each for each in found if each.drawn and each.holds is None]
        for each in (*wrong, *skipped)[:_MOST_SHOWN]:
            print(f"trial {each.number}: {each.why}")
        print(f"{arguments.name}: {_summary(found)}")
    return 1 if wrong else 0


def _summary(found: Sequence[Audited]) -> str:
    """How many trials were audited, how many of those hold, and how many were not audited."""
    drawn = sum(each.drawn for each in found)
    audited = sum(each.holds is not None for each in found)
    good = sum(each.holds is True for each in found)
    parts = [f"{good} of {drawn} drawn trials follow from what had been told when they were proposed"]
    if audited > good:
        parts.append(f"{audited - good} do not")
    if drawn > audited:
        parts.append(f"{drawn - audited} could not be audited, and nothing is said of them")
    if len(found) > drawn:
        parts.append(f"{len(found) - drawn} trials that no sampler drew were left out")
    return "; ".join(parts)
