"""A running trial in one transaction of few statements, into the tables of Optuna's storage.

Optuna's own way asks the database about every parameter and counts all trials, which grows with the search. What it
checks holds by construction: numbers are given under the study's turn, choice sets are fixed within a generation.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import sqlalchemy
from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.storages._rdb import models
from optuna.trial import TrialState
from sqlalchemy import insert

from search_space.domains import Scalar


def store_running(
    engine: sqlalchemy.Engine,
    study_id: int,
    number: int,
    started: datetime,
    point: Mapping[str, Scalar],
    distributions: Mapping[str, BaseDistribution],
    attributes: Mapping[str, Any],
) -> int:
    """The id of the stored trial."""
    with engine.begin() as connection:
        trial = insert(models.TrialModel.__table__).values(
            study_id=study_id, number=number, state=TrialState.RUNNING, datetime_start=started
        )
        key = connection.execute(trial).inserted_primary_key
        assert key is not None, "the database gave the trial no id"
        trial_id = int(key[0])
        if distributions:
            connection.execute(
                insert(models.TrialParamModel.__table__),
                [
                    {
                        "trial_id": trial_id,
                        "param_name": path,
                        "param_value": held.to_internal_repr(point[path]),
                        "distribution_json": distribution_to_json(held),
                    }
                    for path, held in distributions.items()
                ],
            )
        connection.execute(
            insert(models.TrialUserAttributeModel.__table__),
            [{"trial_id": trial_id, "key": key, "value_json": json.dumps(value)} for key, value in attributes.items()],
        )
    return trial_id
