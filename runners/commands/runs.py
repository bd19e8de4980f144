"""`assay runs` and `assay show`: what ran, how it ended, what it cost and what came of it."""

import argparse
import json
from datetime import UTC, datetime
from typing import Any

from analysis.fastread import RunRow
from analysis.load import SearchRow, artifact, find_run, list_runs, list_searches
from analysis.tables import aligned
from runners.driver import is_dead
from search_space.places import locate
from search_space.records import Artifact, Metric, Stage, Tag


def run(arguments: argparse.Namespace) -> int:
    """List searches, the runs of one search, or one run."""
    uri = locate(arguments.tracking_uri).uri
    if arguments.command == "show":
        row = find_run(uri, arguments.run)
        _print(arguments.json, run_plain(row) | {"last_lines": _last_lines(uri, row)}, _run_text)
    elif arguments.name:
        _print(arguments.json, [run_plain(row) for row in list_runs(uri, arguments.name)], _runs_text)
    else:
        _print(arguments.json, [_search_plain(row) for row in list_searches(uri)], _searches_text)
    return 0


def _print(as_json: bool, plain: Any, text: Any) -> None:
    print(json.dumps(plain, indent=2) if as_json else text(plain))


def run_plain(row: RunRow) -> dict[str, Any]:
    """A run as plain JSON data."""
    return {
        "run": path_of(row),
        "run_id": row.run_id,
        "name": row.name,
        "stage": row.stage,
        "state": row.state,
        "status": row.status,
        "reason": row.tags.get(Tag.REASON, ""),
        "start": _moment(row.start),
        "end": _moment(row.end),
        "warnings": row.tags.get(Tag.WARNINGS, "").splitlines(),
        "metrics": row.metrics,
        "params": row.params,
        "tags": {key: value for key, value in row.tags.items() if key.startswith("assay.")},
    }


def path_of(row: RunRow) -> str:
    """NAME/NUMBER of a trial, NAME/final/NUMBER of a final."""
    stage = "" if row.stage == Stage.SEARCH else f"{row.stage}/"
    return f"{row.search}/{stage}{row.number}"


def _search_plain(row: SearchRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "run_id": row.run_id,
        "state": "STOPPED" if row.state == "RUNNING" and is_dead(row.driver) else row.state,
        "start": _moment(row.start),
        "end": _moment(row.end),
        "trials": row.trials,
        "finals": row.finals,
        "best": row.best,
        "best_loss": row.best_loss,
    }


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds") if seconds else ""


def _last_lines(uri: str, row: RunRow) -> str:
    held = artifact(uri, row, Artifact.TRACEBACK)
    return held.read_text(errors="replace") if held else ""


def number(value: float | None, form: str = ".4f") -> str:
    """The number, or a dash where there is none."""
    return "-" if value is None else format(value, form)


def _searches_text(searches: list[dict[str, Any]]) -> str:
    if not searches:
        return "no search in this store; start one with: assay search quickstart"
    rows = [
        [
            entry["name"],
            entry["state"].lower(),
            ", ".join(f"{count} {status}" for status, count in entry["trials"].items()),
            str(entry["finals"]),
            number(entry["best_loss"]),
            entry["best"] or "-",
            entry["start"],
        ]
        for entry in searches
    ]
    lines = [aligned(["search", "state", "trials", "finals", "best loss", "best", "started"], rows)]
    lines += [
        f"  {entry['name']}: its driver is gone; the same `assay search` command goes on with it"
        for entry in searches
        if entry["state"] == "STOPPED"
    ]
    return "\n".join(lines)


def _runs_text(runs: list[dict[str, Any]]) -> str:
    if not runs:
        return "no run yet"
    rows = []
    for entry in runs:
        metrics = entry["metrics"]
        rows.append(
            [
                entry["run"],
                entry["status"],
                number(metrics.get(Metric.LOSS)),
                number(metrics.get(Metric.PARAMS), ",.0f"),
                number(metrics.get(Metric.TOKENS), ",.0f"),
                number(metrics.get(Metric.SECONDS), ".1f"),
                entry["name"],
                entry["reason"][:80],
            ]
        )
    return aligned(["run", "status", "loss", "params", "tokens", "seconds", "name", "reason"], rows)


def _run_text(entry: dict[str, Any]) -> str:
    lines = [
        f"{entry['run']}  {entry['name']}",
        f"  status   {entry['status']} ({entry['state'].lower()})",
        f"  run id   {entry['run_id']}",
        f"  started  {entry['start']}   ended {entry['end'] or '-'}",
    ]
    if entry["reason"]:
        lines.append(f"  reason   {entry['reason']}")
    for word, tag in (
        ("attempt", Tag.ATTEMPTS),
        ("mutation", Tag.MUTATIONS),
        ("remark", Tag.REMARKS),
        ("weights", Tag.WEIGHTS),
    ):
        lines += [f"  {word.ljust(8)} {line}" for line in entry["tags"].get(tag, "").splitlines()]
    lines += [f"  caution  {caution}" for caution in entry["tags"].get(Tag.CAUTIONS, "").splitlines()]
    lines += [f"  warning  {warning}" for warning in entry["warnings"]]
    for heading, values in (("result and cost", entry["metrics"]), ("parameters", entry["params"])):
        lines.append(f"  {heading}")
        width = max((len(key) for key in values), default=0)
        lines += [f"    {key.ljust(width)}  {_plain_number(value)}" for key, value in sorted(values.items())]
    if entry["last_lines"]:
        lines += ["  last lines", *(f"    {line}" for line in entry["last_lines"].splitlines()[-20:])]
    lines.append(f"  again: assay replay {entry['run']}")
    return "\n".join(lines)


def _plain_number(value: Any) -> str:
    return (
        f"{value:,.6g}"
        if isinstance(value, float) and abs(value) < 1e6
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )
