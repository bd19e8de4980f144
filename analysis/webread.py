"""Runs, histories and artifacts from a tracking server: large searches in parallel, a few requests for many runs."""

import json
import math
import tempfile
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from analysis.fastread import RunRow
from analysis.server import Server, by_id

_FIRST = 500
"""Runs in the first answer; when there are more, the rest comes in parallel."""
_PAGE = 5_000
_PARTS = 4
_FEW = 100
"""Runs that one request may name; the server's own limit for histories."""
_MOST_POINTS = 25_000
"""Points that one answer of histories holds at most."""


def experiments(uri: str) -> dict[str, str]:
    """Name to id of every live experiment."""
    with Server(uri) as server:
        return _experiments(server)


def runs(uri: str, experiment_ids: Sequence[str]) -> list[RunRow]:
    """Every live run of the experiments, oldest first."""
    if not experiment_ids:
        return []
    with Server(uri) as server:
        names = {key: name for name, key in _experiments(server).items()}
        first = _page(server, experiment_ids, "", max_results=_FIRST)
        entries = list(first.get("runs", ()))
        if first.get("next_page_token"):
            newest = _page(server, experiment_ids, "", max_results=1, newest="start_time")["runs"]
            low, high = _start(entries[-1]), _start(newest[0])
            cuts = [low + (high - low) * part // _PARTS for part in range(_PARTS)]
            filters = [f"attributes.start_time >= {cut}" for cut in cuts]
            filters = [
                *(f"{one} AND attributes.start_time < {end}" for one, end in zip(filters, cuts[1:], strict=False)),
                filters[-1],
            ]
            for part in server.each(partial(_pages, server, experiment_ids), filters):
                entries += part
    rows = {row.run_id: row for row in (_row(entry, names) for entry in entries)}
    return sorted(rows.values(), key=lambda row: (row.start, row.run_id))


def runs_by_id(uri: str, run_ids: Sequence[str]) -> list[RunRow]:
    """The live runs with these ids."""
    with Server(uri) as server:
        names = {key: name for name, key in _experiments(server).items()}
        return ask(server, names, *(by_id(run_ids[first : first + _FEW]) for first in range(0, len(run_ids), _FEW)))


def ask(server: Server, names: Mapping[str, str], *filters: str, deleted: bool = False) -> list[RunRow]:
    """The runs of the named experiments that meet any of the filters; one query after the other, as each is small."""
    view = "DELETED_ONLY" if deleted else "ACTIVE_ONLY"
    answers = (_pages(server, list(names), wanted, view=view) for wanted in filters)
    return [_row(entry, names) for answer in answers for entry in answer]


def counts(server: Server, experiment_id: str, expected: int) -> bool:
    """True when the experiment holds exactly so many live runs: the last of them is there, and none after it."""
    token = b64encode(json.dumps({"offset": expected - 1}).encode()).decode() if expected > 1 else ""
    last = _page(server, [experiment_id], "", max_results=1, token=token)
    return len(last.get("runs", ())) == min(expected, 1) and not last.get("next_page_token")


def state(uri: str, experiment_id: str) -> str:
    """What changes when a run is begun, ended or deleted: the newest runs, those that run, and the deleted ones."""
    with Server(uri) as server:
        page = partial(_page, server, [experiment_id])
        answers = [
            page("", max_results=2, newest="start_time"),
            page("", max_results=2, newest="end_time"),
            page("attributes.status = 'RUNNING'", max_results=100),
            page("tags.`assay.kind` = 'search'", max_results=10),
        ]
        deleted = page("", max_results=1000, view="DELETED_ONLY")
    gone = [entry["info"]["run_id"] for entry in deleted.get("runs", ())]
    return json.dumps([[answer.get("runs", []) for answer in answers], gone], sort_keys=True)


def histories(uri: str, rows: Sequence[RunRow], keys: Sequence[str]) -> list[tuple[str, str, int, float]] | None:
    """(run id, metric, step, value) of whole metric histories; None where the server tells no histories in bulk."""
    asked = []
    for key in keys:
        held = [row.run_id for row in rows if key in row.metrics]
        asked += [(key, held[first : first + _FEW]) for first in range(0, len(held), _FEW)]
    with Server(uri) as server:
        parts = server.each(lambda one: _history(server, *one), asked)
    found = [point for part in parts if part is not None for point in part]
    return None if None in parts else sorted(found, key=lambda point: point[:3])


def download(uri: str, row: RunRow, path: str, into: Path) -> Path | None:
    """A file or folder of a run, copied into a folder.

    FileNotFoundError when the run keeps no such thing; None when the server does not hand it out itself.
    """
    parent, _, leaf = path.rpartition("/")
    with Server(uri) as server:
        entry = {PurePosixPath(one["path"]).name: one for one in listed(server, row.run_id, parent)}.get(leaf)
        if entry is None:
            raise FileNotFoundError(path)
        inside = listed(server, row.run_id, path) if entry.get("is_dir") else [entry]
        files = [one["path"] for one in inside if not one.get("is_dir")]
        place = Path(tempfile.mkdtemp(dir=into)) / leaf
        place.mkdir() if entry.get("is_dir") else None
        whole = fetched(server, row.run_id, files)
    for file, content in zip(files, whole, strict=True):
        if content is None:
            return None
        (place / PurePosixPath(file).name if entry.get("is_dir") else place).write_bytes(content)
    return place


def listed(server: Server, run_id: str, path: str) -> list[dict[str, Any]]:
    """What lies in a folder of a run's artifacts: path and is_dir of each."""
    found: list[dict[str, Any]] = []
    token = ""
    while True:
        query = {"run_id": run_id, **({"path": path} if path else {}), **({"page_token": token} if token else {})}
        answer = server.look_up("artifacts/list", query)
        found += answer.get("files", ())
        token = answer.get("next_page_token", "")
        if not token:
            return found


def fetched(server: Server, run_id: str, paths: Sequence[str]) -> list[bytes | None]:
    """What files of a run hold; None for one that the server does not hand out."""
    return server.each(lambda path: server.file("get-artifact", {"run_id": run_id, "path": path}), paths)


def _experiments(server: Server) -> dict[str, str]:
    found: dict[str, str] = {}
    token = ""
    while True:
        asked = {"max_results": 1000, "view_type": "ACTIVE_ONLY", "page_token": token}
        answer = server.ask("experiments/search", asked)
        found |= {entry["name"]: str(entry["experiment_id"]) for entry in answer.get("experiments", ())}
        token = answer.get("next_page_token", "")
        if not token:
            return found


def _history(server: Server, key: str, run_ids: Sequence[str]) -> list[tuple[str, str, int, float]] | None:
    query = {"metric_key": key, "run_id": list(run_ids)}
    said = server.file("ajax-api/2.0/mlflow/metrics/get-history-bulk", query)
    if said is None:
        return None
    points = json.loads(said)["metrics"]
    if len(points) >= _MOST_POINTS:
        if len(run_ids) == 1:
            return None
        halves = [_history(server, key, half) for half in (run_ids[::2], run_ids[1::2])]
        return None if None in halves else [point for half in halves if half is not None for point in half]
    points.sort(key=lambda point: (point["run_id"], int(point["step"]), int(point["timestamp"])))
    found = [(point["run_id"], key, int(point["step"]), float(point["value"])) for point in points]
    return [point for point in found if not math.isnan(point[3])]


def _pages(
    server: Server, experiment_ids: Sequence[str], wanted: str, *, view: str = "ACTIVE_ONLY"
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    token = ""
    while True:
        answer = _page(server, experiment_ids, wanted, max_results=_PAGE, view=view, token=token)
        found += answer.get("runs", ())
        token = answer.get("next_page_token", "")
        if not token:
            return found


def _page(
    server: Server,
    experiment_ids: Sequence[str],
    wanted: str,
    *,
    max_results: int,
    newest: str = "",
    view: str = "ACTIVE_ONLY",
    token: str = "",
) -> dict[str, Any]:
    order = [f"attributes.{newest} DESC"] if newest else ["attributes.start_time ASC"]
    return server.ask(
        "runs/search",
        {
            "experiment_ids": list(experiment_ids),
            "filter": wanted,
            "run_view_type": view,
            "max_results": max_results,
            "order_by": order,
            "page_token": token,
        },
    )


def _row(entry: dict[str, Any], names: Mapping[str, str]) -> RunRow:
    info, data = entry["info"], entry.get("data", {})
    experiment = str(info["experiment_id"])
    # A server writes what is not finite as a text.
    metrics = {one["key"]: float(one.get("value", 0.0)) for one in data.get("metrics", ())}
    return RunRow(
        run_id=info["run_id"],
        name=info.get("run_name", ""),
        state=info["status"],
        start=_start(entry) / 1000,
        end=int(info.get("end_time", 0)) / 1000,
        artifact_uri=info.get("artifact_uri", ""),
        experiment_id=experiment,
        search=names[experiment],
        params={one["key"]: one.get("value", "") for one in data.get("params", ())},
        metrics={key: value for key, value in metrics.items() if math.isfinite(value)},
        tags={one["key"]: one.get("value", "") for one in data.get("tags", ())},
    )


def _start(entry: dict[str, Any]) -> int:
    return int(entry["info"].get("start_time", 0))
