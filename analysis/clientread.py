"""Runs through the tracking client: for stores that no other reader of this package knows."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from analysis.fastread import RunRow
from analysis.server import by_id, check_answers
from search_space.places import driver_uri

_PAGE = 10_000
_FEW = 100
"""How many runs one query names."""
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
}
"""Environment under which the client neither calls home nor draws nor waits for minutes; set unless the user set it."""


def experiments(uri: str) -> dict[str, str]:
    """Name to id of every live experiment."""
    return {entry.name: str(entry.experiment_id) for entry in _client(uri).search_experiments(max_results=_PAGE)}


def runs(uri: str, experiment_ids: Sequence[str]) -> list[RunRow]:
    """Every live run of the experiments, oldest first: one query per 10,000 runs."""
    return _search(uri, experiment_ids, "") if experiment_ids else []


def runs_by_id(uri: str, run_ids: Sequence[str]) -> list[RunRow]:
    """The live runs with these ids."""
    everywhere = list(experiments(uri).values())
    parts = [run_ids[first : first + _FEW] for first in range(0, len(run_ids), _FEW)]
    return [row for part in parts for row in _search(uri, everywhere, by_id(part))]


def _search(uri: str, experiment_ids: Sequence[str], wanted: str) -> list[RunRow]:
    client, names = _client(uri), {key: name for name, key in experiments(uri).items()}
    entries: list[Any] = []
    token = None
    while True:
        page = client.search_runs(list(experiment_ids), wanted, max_results=_PAGE, page_token=token)
        entries += page
        token = page.token
        if not token:
            break
    return sorted((_row(entry, names) for entry in entries), key=lambda row: (row.start, row.run_id))


def histories(uri: str, rows: Sequence[RunRow], keys: Sequence[str]) -> list[tuple[str, str, int, float]]:
    """(run id, metric, step, value) of whole metric histories, steps increasing within a run and metric."""
    client = _client(uri)
    return [
        (row.run_id, key, int(point.step), float(point.value))
        for row in rows
        for key in keys
        if key in row.metrics
        for point in sorted(client.get_metric_history(row.run_id, key), key=lambda point: (point.step, point.timestamp))
    ]


def download(uri: str, row: RunRow, path: str, into: Path) -> Path | None:
    """A file or folder that the run keeps, copied into a folder; None when it keeps no such thing."""
    import mlflow.artifacts

    client = _client(uri)
    parent, _, leaf = path.rpartition("/")
    if not any(entry.path.rpartition("/")[2] == leaf for entry in client.list_artifacts(row.run_id, parent or None)):
        return None
    place = tempfile.mkdtemp(dir=into)
    return Path(
        mlflow.artifacts.download_artifacts(run_id=row.run_id, artifact_path=path, dst_path=place, tracking_uri=uri)
    )


def _row(entry: Any, names: dict[str, str]) -> RunRow:
    return RunRow(
        run_id=entry.info.run_id,
        name=entry.info.run_name or "",
        state=entry.info.status,
        start=(entry.info.start_time or 0) / 1000,
        end=(entry.info.end_time or 0) / 1000,
        artifact_uri=entry.info.artifact_uri or "",
        experiment_id=str(entry.info.experiment_id),
        search=names[str(entry.info.experiment_id)],
        params=dict(entry.data.params),
        metrics={key: value for key, value in entry.data.metrics.items() if abs(value) < float("inf")},
        tags=dict(entry.data.tags),
    )


def _client(uri: str) -> Any:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if urlsplit(uri).scheme in ("http", "https"):
        check_answers(uri)
    from mlflow.tracking import MlflowClient

    return MlflowClient(driver_uri(uri))
