"""Trials that have ended become trials that run again, under their number; their end is kept as an attempt.

Optuna knows no way back from an end, so its tables are changed here, in one transaction.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from optuna.storages._rdb.models import TrialModel, TrialUserAttributeModel, TrialValueModel
from optuna.trial import TrialState
from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from runners.attempts import asked_again
from runners.generations import study_name
from runners.ledger import ATTEMPTS, RESULT, Entry, Ledger
from runners.study import Study
from runners.telling import directions
from search_space.errors import UserError
from search_space.records import Metric, Stage, Status

FAILED = (Status.FAILED, Status.OUT_OF_MEMORY, Status.TIMED_OUT)
"""Ends that another try may better, on another machine or with code that was mended."""
_ENDED_WELL = (Status.OK, Status.PRUNED)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A trial to be run again."""

    stage: Stage
    number: int


def failed(study: Study) -> list[Wanted]:
    """Every trial of the search that failed, ran out of memory or out of time."""
    return [
        Wanted(stage=stage, number=entry.number)
        for stage in (Stage.SEARCH, Stage.FINAL)
        for entry in _ledger(study, stage).entries()
        if entry.result is not None and entry.result.status in FAILED
    ]


def reopen(study: Study, wanted: Sequence[Wanted]) -> None:
    """Make the trials run again; UserError, with nothing changed, when one of them cannot."""
    ledgers = {stage: _ledger(study, stage) for stage in {each.stage for each in wanted}}
    entries = [(each.stage, _checked(study, ledgers[each.stage], each)) for each in wanted]
    for stage, entry in entries:
        _reopen(study, study.storage.get_study_id_from_name(_name(study, stage)), entry, len(ledgers[stage]))


def _checked(study: Study, ledger: Ledger, wanted: Wanted) -> Entry:
    name = f"{study.experiment.name}/{'' if wanted.stage is Stage.SEARCH else f'{wanted.stage}/'}{wanted.number}"
    if wanted.number >= len(ledger):
        raise UserError(f"{name}: the study holds {len(ledger)} such trials; assay runs lists them")
    entry = ledger[wanted.number]
    if entry.result is None:
        raise UserError(f"{name}: has not ended; the same `assay search` command goes on with it")
    if entry.result.status in _ENDED_WELL:
        raise UserError(
            f"{name}: ended as {entry.result.status}, so there is nothing to try again; assay replay {name}"
        )
    return entry


def _reopen(study: Study, study_id: int, entry: Entry, proposed: int) -> None:
    with Session(study.storage.engine) as session, session.begin():
        found = select(TrialModel.trial_id).where(TrialModel.study_id == study_id, TrialModel.number == entry.number)
        trial = session.execute(found).scalar_one()
        session.execute(delete(TrialValueModel).where(TrialValueModel.trial_id == trial))
        session.execute(
            delete(TrialUserAttributeModel).where(
                TrialUserAttributeModel.trial_id == trial, TrialUserAttributeModel.key.in_([RESULT, ATTEMPTS])
            )
        )
        kept = json.dumps(asked_again(entry, proposed))
        session.add(TrialUserAttributeModel(trial_id=trial, key=ATTEMPTS, value_json=kept))
        # By the table's columns: the model's own names for them vary.
        reopened = update(TrialModel.__table__).where(TrialModel.trial_id == trial)
        session.execute(reopened.values(state=TrialState.RUNNING, datetime_complete=None))


def _ledger(study: Study, stage: Stage) -> Ledger:
    of = study.experiment.objectives if stage is Stage.SEARCH else [Metric.LOSS]
    return Ledger(study.storage, _name(study, stage), directions(of))


def _name(study: Study, stage: Stage) -> str:
    name = study_name(study.experiment.name, study.generation)
    return name if stage is Stage.SEARCH else f"{name}/{stage}"
