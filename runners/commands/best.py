"""`assay best` and `assay compare`: the winner of a search, and two runs side by side."""

import argparse
import json
import math
from typing import Any

from analysis.fastread import RunRow
from analysis.load import artifact, find_run, histories, list_runs
from analysis.tables import aligned
from runners.commands.runs import number, path_of, run_plain
from search_space.errors import UserError
from search_space.places import locate
from search_space.records import Artifact, Metric, Stage, Status, Tag
from search_space.space import unknown

_COSTS = (
    Metric.LOSS,
    Metric.BEST_LOSS,
    Metric.ACCURACY,
    Metric.PARAMS,
    Metric.BODY_PARAMS,
    Metric.FLOPS,
    Metric.STATE_BYTES,
    Metric.TOKENS_PER_SECOND,
    Metric.PEAK_BYTES,
    Metric.TOKENS,
    Metric.SECONDS,
)


def run(arguments: argparse.Namespace) -> int:
    """Print the winner, or a comparison."""
    uri = locate(arguments.tracking_uri).uri
    if arguments.command == "compare":
        rows = find_run(uri, arguments.run), find_run(uri, arguments.other)
        compared = _compare(*rows) | _at_equal_tokens(uri, *rows)
        print(json.dumps(compared, indent=2) if arguments.json else _compare_text(compared))
        return 0
    winner = _winner(list_runs(uri, arguments.name), arguments)
    if arguments.as_file:
        print(_as_file(uri, winner, arguments.name), end="")
    elif arguments.json:
        print(json.dumps(run_plain(winner), indent=2))
    else:
        print(_winner_text(winner, arguments))
    return 0


def _winner(rows: list[RunRow], arguments: argparse.Namespace) -> RunRow:
    where = f"assay best {arguments.name}"
    sign, metric = (-1.0, arguments.by[1:]) if arguments.by.startswith("-") else (1.0, arguments.by)
    done = [row for row in rows if row.stage == Stage.SEARCH and row.status == Status.OK]
    if not done:
        raise UserError(f"{where}: no trial has finished; `assay runs {arguments.name}` shows their states")
    known = sorted({name for row in done for name in row.metrics})
    if metric not in known:
        raise UserError(f"{where} --by {arguments.by}: {metric!r} {unknown('metric', metric, known)}")
    limit = arguments.max_params or math.inf
    small = [row for row in done if row.metrics.get(Metric.PARAMS, math.inf) <= limit and metric in row.metrics]
    if not small:
        least = min(row.metrics.get(Metric.PARAMS, math.inf) for row in done)
        raise UserError(
            f"{where} --max-params {limit:,}: the smallest finished model has {least:,.0f}; raise the limit"
        )
    return min(small, key=lambda row: (sign * row.metrics[metric], row.number))


def _winner_text(winner: RunRow, arguments: argparse.Namespace) -> str:
    lines = [f"{path_of(winner)}  {winner.name}"]
    lines += [f"  {name:<24} {winner.metrics[name]:,.6g}" for name in _COSTS if name in winner.metrics]
    lines += [
        "  lowest of the finished trials by one seed; `assay report` says what is decided and what is not",
        f"  its file:   assay best {arguments.name} --as-file",
        f"  once more:  assay replay {path_of(winner)}",
        f"  the model:  assay export {path_of(winner)} --to model",
    ]
    return "\n".join(lines)


def _as_file(uri: str, winner: RunRow, name: str) -> str:
    from analysis.frame import typed
    from search_space.candidate_file import write_candidate
    from search_space.experiment import changed
    from search_space.stored import space_from_plain

    if Tag.MUTATIONS in winner.tags:
        raise UserError(
            f"assay best {name} --as-file: {path_of(winner)} went on from other trials' states with settings that "
            f"changed on the way, which no file says; assay replay {path_of(winner)} trains it again, assay show "
            f"{path_of(winner)} lists the changes"
        )
    plain = _parent_plain(uri, winner)
    values = {path: typed(text) for path, text in winner.params.items()}
    point = changed(space_from_plain(plain["full"]), space_from_plain(plain["space"]), values, {})
    return write_candidate(point, plain, name=f"{name[:90]}-{winner.number}")


def _parent_plain(uri: str, winner: RunRow) -> dict[str, Any]:
    parent = find_run(uri, winner.tags["mlflow.parentRunId"])
    held = artifact(uri, parent, Artifact.EXPERIMENT_PLAIN)
    assert held is not None, f"the parent of {winner.run_id} keeps no {Artifact.EXPERIMENT_PLAIN}"
    try:
        plain: dict[str, Any] = json.loads(held.read_text())
    except ValueError as error:
        raise UserError(f"{held}: is damaged ({error}); bring back an intact copy of it") from error
    return plain


def _compare(one: RunRow, other: RunRow) -> dict[str, Any]:
    paths = sorted(one.params.keys() | other.params.keys())
    metrics = sorted(one.metrics.keys() | other.metrics.keys())
    return {
        "runs": [path_of(one), path_of(other)],
        "names": [one.name, other.name],
        "statuses": [one.status, other.status],
        "params": {
            path: [one.params.get(path), other.params.get(path)]
            for path in paths
            if one.params.get(path) != other.params.get(path)
        },
        "metrics": {name: [one.metrics.get(name), other.metrics.get(name)] for name in metrics},
    }


def _at_equal_tokens(uri: str, one: RunRow, other: RunRow) -> dict[str, Any]:
    """The validation losses of both after the most training tokens that both have a reading at; empty without any."""
    curves: dict[str, dict[int, float]] = {one.run_id: {}, other.run_id: {}}
    for run_id, _, tokens, loss in histories(uri, [one, other], [Metric.VALIDATION_CURVE]):
        curves[run_id][tokens] = loss
    common = curves[one.run_id].keys() & curves[other.run_id].keys() - {0}
    if not common:
        return {}
    tokens = max(common)
    return {"at_equal_tokens": {"tokens": tokens, "losses": [curves[row.run_id][tokens] for row in (one, other)]}}


def _compare_text(compared: dict[str, Any]) -> str:
    first, second = compared["runs"]
    differing = [[path, *(str(value or "-") for value in values)] for path, values in compared["params"].items()]
    measured = [
        [
            name,
            number(a, ",.6g"),
            number(b, ",.6g"),
            number(b - a if a is not None and b is not None else None, "+,.6g"),
        ]
        for name, (a, b) in compared["metrics"].items()
    ]
    return "\n".join(
        [
            f"{first} {compared['names'][0]} ({compared['statuses'][0]})",
            f"{second} {compared['names'][1]} ({compared['statuses'][1]})",
            "",
            aligned(["setting", first, second], differing) if differing else "the same settings",
            "",
            aligned(["metric", first, second, "difference"], measured),
            "",
            *_equal_text(compared),
            "one run each: a difference in loss here is no verdict; paired finals decide (see `assay report`)",
        ]
    )


def _equal_text(compared: dict[str, Any]) -> list[str]:
    held = compared.get("at_equal_tokens")
    if not held:
        return []
    first, second = held["losses"]
    said = f"{number(first, ',.6g')} and {number(second, ',.6g')}, difference {number(second - first, '+,.6g')}"
    return [f"validation loss after {held['tokens']:,} tokens, the most that both read at: {said}", ""]
