"""The trials of a search read from a database of MLflow's in four statements.

MLflow's client makes an object of its mapper for every row, which takes most of the end of a large search.
"""

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from mlflow.entities import LifecycleStage, Metric, Param, Run, RunData, RunInfo, RunTag
from mlflow.store.tracking.dbmodels import models
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from sqlalchemy import Table, select

from search_space.records import Tag

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_RUNS: Table = models.SqlRun.__table__
_TAGS: Table = models.SqlTag.__table__


def trials(client: "MlflowClient", experiment_id: str) -> list[Run]:
    """Every active trial of an experiment as the client finds them, the newest first, without their inputs.

    For stores that `runners.bulk` knows.
    """
    store = client._tracking_client.store
    assert isinstance(store, SqlAlchemyStore), "runners.bulk.is_known() was not asked"
    kinds = (_TAGS.c.run_uuid == _RUNS.c.run_uuid, _TAGS.c.key == Tag.KIND, _TAGS.c.value == "trial")
    wanted = (_RUNS.c.experiment_id == int(experiment_id), _RUNS.c.lifecycle_stage == LifecycleStage.ACTIVE)
    found: dict[str, dict[str, list[Any]]] = {}
    with store.ManagedSessionMaker() as session:
        order = (_RUNS.c.start_time.desc(), _RUNS.c.run_uuid)
        infos = session.execute(select(_RUNS).join(_TAGS, kinds[0]).where(*kinds[1:], *wanted).order_by(*order)).all()
        for name, make in _PARTS.items():
            table = models.Base.metadata.tables[name]
            rows = select(table).join(_RUNS, table.c.run_uuid == _RUNS.c.run_uuid).where(*wanted)
            found[name] = defaultdict(list)
            for row in session.execute(rows):
                found[name][row.run_uuid].append(make(row))
    return [
        Run(
            RunInfo(
                info.run_uuid,
                str(info.experiment_id),
                info.user_id,
                info.status,
                info.start_time,
                info.end_time,
                info.lifecycle_stage,
                info.artifact_uri,
                info.name,
            ),
            RunData(*(found[name][info.run_uuid] for name in _PARTS)),
        )
        for info in infos
    ]


def _metric(row: Any) -> Metric:
    return Metric(row.key, math.nan if row.is_nan else row.value, row.timestamp, row.step)


_PARTS = {
    "latest_metrics": _metric,
    "params": lambda row: Param(row.key, row.value),
    "tags": lambda row: RunTag(row.key, row.value),
}
"""What makes the parts of a run's data, in order, of rows of which table."""
