"""Runs written to a database of MLflow's several at once, in one transaction of a dozen statements.

MLflow's client takes nine transactions and some fifty statements for each trial. The rows are those that it would
write; a test compares every table. Where the tables are not those that are known here, the client is used.
"""

import functools
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mlflow.entities import DatasetInput, LifecycleStage, Metric, Param, Run, RunData, RunInfo, RunInputs, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_DOES_NOT_EXIST
from mlflow.store.tracking.dbmodels import models
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NAME
from mlflow.utils.uri import append_to_uri_path
from sqlalchemy import Executable, Table, bindparam, insert, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite

from runners.artifacts import write

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient
    from sqlalchemy.orm import Session

Row = dict[str, Any]

_KNOWN = {
    "datasets": "dataset_profile dataset_schema dataset_source dataset_source_type dataset_uuid digest experiment_id "
    "name",
    "input_tags": "input_uuid name value",
    "inputs": "destination_id destination_type input_uuid source_id source_type step",
    "latest_metrics": "is_nan key run_uuid step timestamp value",
    "metrics": "is_nan key run_uuid step timestamp value",
    "params": "key run_uuid value",
    "runs": "artifact_uri deleted_time end_time entry_point_name experiment_id lifecycle_stage name run_uuid "
    "source_name source_type source_version start_time status user_id",
    "tags": "key run_uuid value",
}
"""The columns of the tables that are written here."""
_TABLES: Mapping[str, Table] = models.Base.metadata.tables
_INSERTS: Mapping[str, Callable[[Table], sqlite.Insert | postgresql.Insert]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}
_NOBODY = "unknown"


def is_known(client: "MlflowClient") -> bool:
    """True when the client's store is a database whose tables can be written here."""
    store = client._tracking_client.store
    columns = {name: " ".join(sorted(_TABLES[name].columns.keys())) for name in _KNOWN if name in _TABLES}
    return isinstance(store, SqlAlchemyStore) and columns == _KNOWN and store.engine.dialect.name in _INSERTS


class Batch:
    """Takes what MLflow's client takes, under the same names, for runs of one experiment; `commit` writes it."""

    def __init__(self, client: "MlflowClient", artifact_location: str) -> None:
        """`artifact_location` is the experiment's."""
        store = client._tracking_client.store
        assert isinstance(store, SqlAlchemyStore), "is_known() was not asked"
        self._store = store
        self._location = artifact_location
        self._runs: dict[str, Row] = {}
        self._inputs: list[tuple[str, DatasetInput]] = []
        self._tags: dict[tuple[str, str], Row] = {}
        self._params: list[Row] = []
        self._metrics: list[Row] = []
        self._ends: dict[str, Row] = {}
        self._then: list[Callable[[], None]] = []

    @property
    def created(self) -> Collection[str]:
        """The ids of its new runs."""
        return self._runs.keys()

    def create_run(
        self, experiment_id: str, start_time: int, tags: Mapping[str, str], run_name: str, run_id: str = ""
    ) -> Run:
        """A new run, as it will be; with `run_id` where one under this id was to be written before."""
        run_id = run_id or uuid.uuid4().hex
        where = append_to_uri_path(self._location, run_id, SqlAlchemyStore.ARTIFACTS_FOLDER_NAME)
        self._runs[run_id] = {
            "run_uuid": run_id,
            "name": run_name,
            "source_type": "UNKNOWN",
            "source_name": "",
            "entry_point_name": "",
            "user_id": _NOBODY,
            "status": "RUNNING",
            "start_time": start_time,
            "end_time": None,
            "deleted_time": None,
            "source_version": "",
            "lifecycle_stage": LifecycleStage.ACTIVE,
            "artifact_uri": where,
            "experiment_id": int(experiment_id),
        }
        named = [RunTag(key, value) for key, value in {**tags, MLFLOW_RUN_NAME: run_name}.items()]
        self.log_batch(run_id, tags=named)
        info = RunInfo(
            run_id, experiment_id, _NOBODY, "RUNNING", start_time, None, LifecycleStage.ACTIVE, where, run_name
        )
        return Run(info, RunData(tags=named), RunInputs(dataset_inputs=[]))

    def log_inputs(self, run_id: str, datasets: Sequence[DatasetInput]) -> None:
        """Datasets of a run that has none."""
        self._inputs += [(run_id, each) for each in datasets]

    def log_batch(
        self, run_id: str, metrics: Sequence[Metric] = (), params: Sequence[Param] = (), tags: Sequence[RunTag] = ()
    ) -> None:
        """Finite metrics, parameters that the run lacks, and tags."""
        self._tags.update(((run_id, tag.key), {"run_uuid": run_id, "key": tag.key, "value": tag.value}) for tag in tags)
        self._params += [{"run_uuid": run_id, "key": param.key, "value": param.value} for param in params]
        self._metrics += [
            {
                "run_uuid": run_id,
                "key": metric.key,
                "value": metric.value,
                "timestamp": metric.timestamp,
                "step": metric.step,
                "is_nan": False,
            }
            for metric in metrics
        ]

    def set_terminated(self, run_id: str, status: str, end_time: int) -> None:
        """Close a run."""
        self._ends[run_id] = {"status": status, "end_time": end_time}

    def then(self, call: Callable[[], None]) -> None:
        """Make a call once all is written."""
        self._then.append(call)

    def commit(self) -> None:
        """Write all of it or, where this raises, nothing."""
        named = {row["run_uuid"] for row in (*self._tags.values(), *self._params, *self._metrics)}
        named.update(self._ends, (run for run, _ in self._inputs))
        if named:
            write(lambda: self._write(sorted(named - self._runs.keys())))
        for call in self._then:
            call()

    def _write(self, earlier: list[str]) -> None:
        """`earlier` are the runs that should be there."""
        into = _statements(self._store.engine.dialect.name)
        ends = [{"run": run, **end} for run, end in self._ends.items() if run not in self._runs]
        with self._store.ManagedSessionMaker(read_only=False) as session:
            _check(session, {row["experiment_id"] for row in self._runs.values()}, earlier)
            for statement, rows in (
                (into.runs, [{**row, **self._ends.get(run, {})} for run, row in self._runs.items()]),
                (into.tags, list(self._tags.values())),
                (into.params, self._params),
                (into.metrics, self._metrics),
                (into.latest, _latest(self._metrics)),
                (into.ends, ends),
            ):
                if rows:
                    session.execute(statement, rows)
            if self._inputs:
                self._write_inputs(session, into)

    def _write_inputs(self, session: "Session", into: "_Statements") -> None:
        edges, marks, known = [], [], dict[tuple[int, str, str], str]()
        for run, each in self._inputs:
            key = (self._runs[run]["experiment_id"], each.dataset.name, each.dataset.digest)
            if key not in known:
                known[key] = _dataset(session, into, key, each)
            edge = uuid.uuid4().hex
            ends = {"source_type": "DATASET", "source_id": known[key], "destination_type": "RUN", "destination_id": run}
            edges.append({"input_uuid": edge, **ends})
            marks += [{"input_uuid": edge, "name": tag.key, "value": tag.value} for tag in each.tags]
        session.execute(into.inputs, edges)
        if marks:
            session.execute(into.input_tags, marks)


class Direct:
    """Writes what a run is given at once, in one transaction, where MLflow's client takes several."""

    def __init__(self, client: "MlflowClient") -> None:
        self._client = client

    def log_batch(
        self, run_id: str, metrics: Sequence[Metric] = (), params: Sequence[Param] = (), tags: Sequence[RunTag] = ()
    ) -> None:
        """As `Batch` takes it."""
        batch = Batch(self._client, "")
        batch.log_batch(run_id, metrics, params, tags)
        batch.commit()


def _dataset(session: "Session", into: "_Statements", key: tuple[int, str, str], given: DatasetInput) -> str:
    """The id of a dataset, stored now where it was not."""
    experiment, name, digest = key
    table = _TABLES["datasets"].c
    found = select(table.dataset_uuid).where(
        table.experiment_id == experiment, table.name == name, table.digest == digest
    )
    stored = session.execute(found).scalar()
    if stored is None:
        session.execute(
            into.datasets,
            {
                "dataset_uuid": uuid.uuid4().hex,
                "experiment_id": experiment,
                "name": name,
                "digest": digest,
                "dataset_source_type": given.dataset.source_type,
                "dataset_source": given.dataset.source,
                "dataset_schema": given.dataset.schema,
                "dataset_profile": given.dataset.profile,
            },
        )
        stored = session.execute(found).scalar_one()
    return str(stored)


def _check(session: "Session", experiments: Collection[int], runs: Collection[str]) -> None:
    """MlflowException where MLflow's client would raise it: for what is not there, or was deleted."""
    for what, table, key, wanted in (
        ("experiment", _TABLES["experiments"], "experiment_id", experiments),
        ("run", _TABLES["runs"], "run_uuid", runs),
    ):
        if not wanted:
            continue
        rows = session.execute(select(table.c[key], table.c.lifecycle_stage).where(table.c[key].in_(wanted)))
        stages = {row[0]: row[1] for row in rows}
        for one in wanted:
            if one not in stages:
                raise MlflowException(f"{what} {one}: is not in the store", RESOURCE_DOES_NOT_EXIST)
            if stages[one] != LifecycleStage.ACTIVE:
                raise MlflowException(
                    f"{what} {one}: was deleted, so nothing is written to it", INVALID_PARAMETER_VALUE
                )


def _latest(metrics: Iterable[Row]) -> list[Row]:
    """Of each run and metric the point that MLflow takes for the latest."""
    found: dict[tuple[str, str], Row] = {}
    for row in metrics:
        key = (row["run_uuid"], row["key"])
        if key not in found or _age(row) > _age(found[key]):
            found[key] = row
    return list(found.values())


def _age(row: Row) -> tuple[int, int, float]:
    return row["step"], row["timestamp"], row["value"]


class _Statements(NamedTuple):
    """Statements that take rows, by the table that they write."""

    runs: Executable
    tags: Executable
    params: Executable
    metrics: Executable
    latest: Executable
    ends: Executable
    datasets: Executable
    inputs: Executable
    input_tags: Executable


@functools.cache
def _statements(dialect: str) -> _Statements:
    new = _INSERTS[dialect]
    tags, metrics, latest = (new(_TABLES[name]) for name in ("tags", "metrics", "latest_metrics"))
    held, runs, age = _TABLES["latest_metrics"].c, _TABLES["runs"], ("step", "timestamp", "value")
    tags = tags.on_conflict_do_update(index_elements=["key", "run_uuid"], set_={"value": tags.excluded.value})
    # A point that was written before, by a transaction whose end was not heard of, stays.
    metrics = metrics.on_conflict_do_nothing()
    latest = latest.on_conflict_do_update(
        index_elements=["key", "run_uuid"],
        set_={name: latest.excluded[name] for name in (*age, "is_nan")},
        where=tuple_(*(latest.excluded[name] for name in age)) > tuple_(*(held[name] for name in age)),
    )

    def many(statement: sqlite.Insert | postgresql.Insert) -> Executable:
        # Of what has a conflict to settle, SQLAlchemy sends many rows at a time only where something comes back.
        return statement.returning(statement.table.c.key) if dialect == "postgresql" else statement

    return _Statements(
        runs=insert(runs),
        tags=many(tags),
        params=insert(_TABLES["params"]),
        metrics=many(metrics),
        latest=many(latest),
        ends=update(runs).where(runs.c.run_uuid == bindparam("run")),
        datasets=new(_TABLES["datasets"]).on_conflict_do_nothing(),
        inputs=insert(_TABLES["inputs"]),
        input_tags=insert(_TABLES["input_tags"]),
    )
