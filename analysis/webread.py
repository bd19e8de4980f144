"""Runs straight from a tracking server's REST interface: no tracking client to import, large searches in parallel.

Every other way to sign in than a user with a password or a token is left to the tracking client.
"""

import base64
import json
import math
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from analysis.fastread import RunRow, StoreError

_FIRST = 500
"""Runs in the first answer; when there are more, the rest comes in parallel."""
_PAGE = 5_000
_PARTS = 4
_SECONDS = 120.0
_LEFT_TO_CLIENT = ("MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4", "MLFLOW_TRACKING_CLIENT_CERT_PATH")


def speaks_to(uri: str) -> bool:
    """True for the address of a server to which this module can sign in."""
    return urlsplit(uri).scheme in ("http", "https") and not any(os.environ.get(name) for name in _LEFT_TO_CLIENT)


def experiments(uri: str) -> dict[str, str]:
    """Name to id of every live experiment."""
    found: dict[str, str] = {}
    token = ""
    while True:
        answer = _ask(uri, "experiments/search", {"max_results": 1000, "view_type": "ACTIVE_ONLY", "page_token": token})
        found |= {entry["name"]: str(entry["experiment_id"]) for entry in answer.get("experiments", ())}
        token = answer.get("next_page_token", "")
        if not token:
            return found


def runs(uri: str, experiment_ids: Sequence[str], names: Mapping[str, str]) -> list[RunRow]:
    """Every live run of the experiments, oldest first; `names` gives the name of an experiment by its id."""
    if not experiment_ids:
        return []
    first = _search(uri, experiment_ids, "", max_results=_FIRST)
    entries = list(first.get("runs", ()))
    if first.get("next_page_token"):
        newest = _search(uri, experiment_ids, "", max_results=1, newest="start_time")["runs"]
        low, high = _start(entries[-1]), _start(newest[0])
        cuts = [low + (high - low) * part // _PARTS for part in range(_PARTS)]
        filters = [f"attributes.start_time >= {cut}" for cut in cuts]
        filters = [
            *(f"{one} AND attributes.start_time < {end}" for one, end in zip(filters, cuts[1:], strict=False)),
            filters[-1],
        ]
        with ThreadPoolExecutor(_PARTS) as pool:
            for part in pool.map(lambda wanted: _pages(uri, experiment_ids, wanted), filters):
                entries += part
    rows = {row.run_id: row for row in (_row(entry, names) for entry in entries)}
    return sorted(rows.values(), key=lambda row: (row.start, row.run_id))


def state(uri: str, experiment_id: str) -> str:
    """What changes when a run is begun, ended or deleted: the newest runs, those that run, and the deleted ones."""
    asked = [
        _search(uri, [experiment_id], "", max_results=2, newest="start_time"),
        _search(uri, [experiment_id], "", max_results=2, newest="end_time"),
        _search(uri, [experiment_id], "attributes.status = 'RUNNING'", max_results=100),
        _search(uri, [experiment_id], "tags.`assay.kind` = 'search'", max_results=10),
    ]
    deleted = _search(uri, [experiment_id], "", max_results=1000, view="DELETED_ONLY")
    gone = [entry["info"]["run_id"] for entry in deleted.get("runs", ())]
    return json.dumps([[answer.get("runs", []) for answer in asked], gone], sort_keys=True)


def _pages(uri: str, experiment_ids: Sequence[str], wanted: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    token = ""
    while True:
        answer = _search(uri, experiment_ids, wanted, max_results=_PAGE, token=token)
        found += answer.get("runs", ())
        token = answer.get("next_page_token", "")
        if not token:
            return found


def _search(
    uri: str,
    experiment_ids: Sequence[str],
    wanted: str,
    *,
    max_results: int,
    newest: str = "",
    view: str = "ACTIVE_ONLY",
    token: str = "",
) -> dict[str, Any]:
    order = [f"attributes.{newest} DESC"] if newest else ["attributes.start_time ASC"]
    return _ask(
        uri,
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


def _ask(uri: str, what: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{uri.rstrip('/')}/api/2.0/mlflow/{what}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **_signed_in()},
    )
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS, context=_trust(uri)) as answer:
            found: dict[str, Any] = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:500]
        raise StoreError(
            f"tracking store {uri}: {what} was answered with {error.code} ({said}); see that the address is that of a "
            "tracking server and that MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or _TOKEN, let you in"
        ) from error
    except (OSError, ValueError) as error:
        raise StoreError(
            f"tracking store {uri}: nothing answers there ({error}); start the server, or name another --tracking-uri"
        ) from error
    return found


def _signed_in() -> dict[str, str]:
    user, password = (os.environ.get(f"MLFLOW_TRACKING_{name}", "") for name in ("USERNAME", "PASSWORD"))
    token = os.environ.get("MLFLOW_TRACKING_TOKEN", "")
    if user and password:
        return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}
    return {"Authorization": f"Bearer {token}"} if token else {}


def _trust(uri: str) -> ssl.SSLContext | None:
    if not uri.startswith("https"):
        return None
    context = ssl.create_default_context(cafile=os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or None)
    if os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() == "true":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
