"""The only reader of the tracking store: searches, their runs as plain rows, artifacts, and one DataFrame row a trial.

A SQLite store is read by analysis.fastread, a server by analysis.webread, any other by the tracking client; all give
the same rows. The client and pandas are imported where they are needed, so that a listing answers at once.
"""

import atexit
import os
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from analysis import fastread, webread
from analysis.fastread import RunRow, StoreError
from search_space.places import database_file, driver_uri, locate, present_path
from search_space.records import Metric, Stage, Status, Tag
from search_space.space import unknown

if TYPE_CHECKING:
    import pandas as pd

    from analysis.frame import Search

_PAGE = 10_000
_ANSWER_SECONDS = 5.0
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
}
"""Environment under which the client neither calls home nor draws nor waits for minutes; set unless the user set it."""


@dataclass(frozen=True, kw_only=True)
class SearchRow:
    """One search in a listing."""

    name: str
    run_id: str
    state: str
    start: float
    end: float
    trials: dict[str, int]
    """Search trials by status."""
    finals: int
    """Finals of the newest generation that has any."""
    best_loss: float | None
    """Lowest final validation loss of a finished trial, or None when none has finished."""
    best: str
    """NAME/NUMBER of that trial, or ''."""
    driver: str
    """The process that runs or ran it, as it was recorded."""


def list_searches(uri: str) -> list[SearchRow]:
    """Every search of a store, newest first."""
    names = _experiments(uri)
    rows = _runs(uri, list(names.values()))
    found = [_summary(parent, rows) for parent in rows if parent.tags.get(Tag.KIND) == "search"]
    return sorted(found, key=lambda row: -row.start)


def list_runs(uri: str, name: str) -> list[RunRow]:
    """The trials of one search: search stage first, then finals and replays, each by number."""
    rows = [row for row in _runs(uri, [_experiment(uri, name)]) if row.is_trial]
    order = [str(stage) for stage in Stage]
    return sorted(rows, key=lambda row: (order.index(row.stage), row.number, row.generation, row.start))


def find_run(uri: str, text: str) -> RunRow:
    """The run named NAME/NUMBER, NAME/best, NAME/final/NUMBER, or by its id or a unique beginning of it.

    Of a number that several generations hold, the newest one's.
    """
    if "/" not in text:
        return _by_prefix(uri, text)
    name, *stage, which = text.split("/")
    rows = list_runs(uri, name)
    if which == "best":
        done = [row for row in rows if _has_finished(row)]
        if not done:
            raise StoreError(f"{text}: no trial of {name!r} has finished yet; `assay runs {name}` shows their states")
        return min(done, key=lambda row: row.metrics[Metric.LOSS])
    wanted = stage[0] if stage else str(Stage.SEARCH)
    found = sorted((row for row in rows if row.stage == wanted), key=lambda row: row.generation)
    held = {str(row.number): row for row in found}
    if which not in held:
        span = f"0 to {max(map(int, held))}" if held else "none"
        raise StoreError(f"{text}: search {name!r} has no {wanted} run number {which!r}; it has {span}")
    return held[which]


def trials(name: str, tracking_uri: str = "") -> "pd.DataFrame":
    """The search stage of a search: one row a trial, with every path, metric, id and status."""
    return search(name, tracking_uri).trials


def search(name: str, tracking_uri: str = "") -> "Search":
    """A whole search from the store at the URI, else at MLFLOW_TRACKING_URI, else in mlruns/ of the working folder."""
    return load_search(locate(tracking_uri).uri, name)


def load_search(uri: str, name: str) -> "Search":
    """A whole search: one row per child run, the curves, and what the parent holds."""
    from analysis import cache
    from analysis.assembling import assemble

    experiment = _experiment(uri, name)
    state = cache.state_of(uri, experiment)
    held = cache.recall(uri, name, state)
    if held is None:
        held = assemble(uri, name, _runs(uri, [experiment]))
        cache.keep(held, state)
    return held


def artifact(uri: str, row: RunRow, path: str) -> Path | None:
    """A file or folder that the run keeps, found from the store's present place; None when it keeps no such thing."""
    root = present_path(row.artifact_uri, locate(uri))
    if root is None:
        return _download(uri, row, path)
    return root / path if (root / path).exists() else None


def histories(uri: str, rows: Sequence[RunRow], keys: Sequence[str]) -> list[tuple[str, str, int, float]]:
    """(run id, metric, step, value) of whole metric histories."""
    store = database_file(uri)
    if store is not None and _connected(store):
        return fastread.histories(store, [row.run_id for row in rows], keys)
    client = _client(uri)
    return [
        (row.run_id, key, int(point.step), float(point.value))
        for row in rows
        for key in keys
        if key in row.metrics
        for point in sorted(client.get_metric_history(row.run_id, key), key=lambda point: (point.step, point.timestamp))
    ]


def _connected(store: Path) -> bool:
    connection = fastread.connect(store)
    if connection is not None:
        connection.close()
    return connection is not None


def _has_finished(row: RunRow) -> bool:
    return row.stage == Stage.SEARCH and row.status == Status.OK and Metric.LOSS in row.metrics


def _summary(parent: RunRow, rows: list[RunRow]) -> SearchRow:
    trials = [row for row in rows if row.is_trial and row.experiment_id == parent.experiment_id]
    done = [row for row in trials if _has_finished(row)]
    best = min(done, key=lambda row: row.metrics[Metric.LOSS], default=None)
    finals = [row.generation for row in trials if row.stage == Stage.FINAL]
    return SearchRow(
        name=parent.search,
        run_id=parent.run_id,
        state=parent.state,
        start=parent.start,
        end=parent.end,
        trials=dict(Counter(row.status for row in trials if row.stage == Stage.SEARCH)),
        finals=finals.count(max(finals, default=0)),
        best_loss=best.metrics[Metric.LOSS] if best else None,
        best=f"{parent.search}/{best.number}" if best else "",
        driver=parent.tags.get(Tag.DRIVER, ""),
    )


def _experiment(uri: str, name: str) -> str:
    names = _experiments(uri)
    if name in names:
        return names[name]
    known = {row.name: row for row in list_searches(uri)}
    if not known:
        raise StoreError(f"search {name!r}: the store {uri} holds no search yet; run one: assay search quickstart")
    raise StoreError(f"search {name!r}: {unknown('search', name, known)} (store {uri})")


def _experiments(uri: str) -> dict[str, str]:
    store = database_file(uri)
    if store is not None:
        connection = fastread.connect(store)
        if connection is not None:
            with closing(connection):
                return fastread.experiments(connection)
    if webread.speaks_to(uri):
        _check_answers(uri)
        return webread.experiments(uri)
    return client_experiments(uri)


def _runs(uri: str, experiment_ids: list[str]) -> list[RunRow]:
    store = database_file(uri)
    if store is not None:
        connection = fastread.connect(store)
        if connection is not None:
            with closing(connection):
                return fastread.runs(connection, experiment_ids)
    if webread.speaks_to(uri):
        _check_answers(uri)
        return webread.runs(uri, experiment_ids, {key: name for name, key in webread.experiments(uri).items()})
    return client_runs(uri, experiment_ids)


def _by_prefix(uri: str, prefix: str) -> RunRow:
    store = database_file(uri)
    connection = fastread.connect(store) if store is not None else None
    if connection is not None:
        with closing(connection):
            found = fastread.runs_by_prefix(connection, prefix)
    else:
        rows = _runs(uri, list(_experiments(uri).values()))
        found = [row for row in rows if row.run_id.startswith(prefix)]
    if len(found) == 1 and prefix:
        return found[0]
    if not found:
        raise StoreError(f"run {prefix!r}: no run id starts so; name a run as NAME/NUMBER (`assay runs` lists them)")
    ids = ", ".join(row.run_id[:12] for row in found[:5])
    raise StoreError(f"run {prefix!r}: {len(found)} run ids start so ({ids}, ...); give more of the id, or NAME/NUMBER")


def client_experiments(uri: str) -> dict[str, str]:
    """Name to id of every live experiment, through the tracking client."""
    return {entry.name: str(entry.experiment_id) for entry in _client(uri).search_experiments(max_results=_PAGE)}


def client_runs(uri: str, experiment_ids: Sequence[str]) -> list[RunRow]:
    """Every live run of the experiments, oldest first, through the tracking client: one query per 10,000 runs."""
    if not experiment_ids:
        return []
    client = _client(uri)
    names = {key: name for name, key in client_experiments(uri).items()}
    entries: list[Any] = []
    token = None
    while True:
        page = client.search_runs(list(experiment_ids), max_results=_PAGE, page_token=token)
        entries += page
        token = page.token
        if not token:
            break
    rows = [
        RunRow(
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
        for entry in entries
    ]
    return sorted(rows, key=lambda row: (row.start, row.run_id))


def _client(uri: str) -> Any:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if urlsplit(uri).scheme in ("http", "https"):
        _check_answers(uri)
    from mlflow.tracking import MlflowClient

    return MlflowClient(driver_uri(uri))


def _check_answers(uri: str) -> None:
    place = urlsplit(uri)
    port = place.port or (443 if place.scheme == "https" else 80)
    try:
        socket.create_connection((place.hostname or "", port), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        raise StoreError(
            f"tracking store {uri}: nothing answers there ({error}); start the server, or name another --tracking-uri"
        ) from error


def _download(uri: str, row: RunRow, path: str) -> Path | None:
    import mlflow.artifacts

    client = _client(uri)
    parent, _, leaf = path.rpartition("/")
    if not any(entry.path.rpartition("/")[2] == leaf for entry in client.list_artifacts(row.run_id, parent or None)):
        return None
    folder = tempfile.mkdtemp(prefix="assay-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(
        mlflow.artifacts.download_artifacts(run_id=row.run_id, artifact_path=path, dst_path=folder, tracking_uri=uri)
    )
