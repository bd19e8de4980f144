"""Makes a search out of the rows of its experiment, the curves and what the parent run keeps."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import load
from analysis.fastread import RunRow, StoreError
from analysis.frame import PARAM, Parent, Search, typed_column
from search_space.batches import is_settled
from search_space.records import Artifact, Metric, Tag

_READING = ["run_id", "tokens", "loss", "train_loss", "seconds"]
_TAGS = {
    "candidate": Tag.CANDIDATE,
    "same_as": Tag.SAME_AS,
    "reason": Tag.REASON,
    "warnings": Tag.WARNINGS,
    "arch_id": Tag.ARCH,
    "point_id": Tag.POINT,
    "spec_id": Tag.SPEC,
    "space_id": Tag.SPACE,
    "first_nonfinite_step": Tag.FIRST_NONFINITE,
}


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """The curves of an earlier reading, and the shards that they came from."""

    curves: pd.DataFrame
    shards: frozenset[str]


def assemble(uri: str, name: str, rows: Sequence[RunRow], earlier: Earlier | None = None) -> tuple[Search, Earlier]:
    """The search made of the rows of its experiment, and what a later reading may start from."""
    parents = [row for row in rows if row.tags.get(Tag.KIND) == "search"]
    children = [row for row in rows if row.is_trial]
    if not parents:
        raise StoreError(f"search {name!r}: the store {uri} holds no parent run for it; it was not written by a search")
    if not children:
        raise StoreError(f"search {name!r}: has no trial yet; wait for the first, or start it: assay search FILE")
    parent = parents[-1]
    curves, shards = _curves(uri, parent, children, earlier or Earlier(curves=_no_curves(), shards=frozenset()))
    search = Search(
        uri=uri,
        name=name,
        frame=_frame(children),
        curves=curves,
        parent=Parent(
            run=parent,
            experiment=_json(load.artifact(uri, parent, Artifact.EXPERIMENT_PLAIN)),
            environment=_json(load.artifact(uri, parent, Artifact.ENVIRONMENT)),
        ),
    )
    return search, Earlier(curves=curves, shards=shards)


def _frame(children: Sequence[RunRow]) -> pd.DataFrame:
    records: list[dict[str, Any]] = []
    for row in children:
        record: dict[str, Any] = {
            "number": row.number,
            "run_id": row.run_id,
            "name": row.name,
            "stage": row.stage,
            "generation": row.generation,
            "status": row.status,
            "replica": int(row.tags.get(Tag.REPLICA, "0")),
            "is_baseline": row.tags.get(Tag.BASELINE, "").lower() == "true",
            "start": row.start,
            "end": row.end,
        }
        record.update({column: row.tags.get(tag, "") for column, tag in _TAGS.items()})
        records.append(record)
    frame = pd.DataFrame(records)
    metrics = sorted({key for row in children for key in row.metrics} | {Metric.LOSS, Metric.TOKENS, Metric.PARAMS})
    settings = [settings_of(row) for row in children]
    paths = list(dict.fromkeys(key for row in children for key in row.params))
    numbers = pd.DataFrame(
        [[row.metrics.get(key) for key in metrics] for row in children], columns=metrics, dtype=float
    )
    columns = {PARAM + path: typed_column([each.get(path) for each in settings]) for path in paths}
    params = pd.DataFrame(columns, dtype=object, index=frame.index)
    return pd.concat([frame, numbers, params], axis=1)


def settings_of(row: RunRow) -> Mapping[str, str]:
    """A trial's settings without those that it changed on its way: its loss says nothing of their first value."""
    changed = row.tags.get(Tag.MUTATIONS, "")
    return {path: value for path, value in row.params.items() if f" {path} " not in changed} if changed else row.params


def _no_curves() -> pd.DataFrame:
    return pd.DataFrame(columns=_READING)


def _curves(
    uri: str, parent: RunRow, children: Sequence[RunRow], earlier: Earlier
) -> tuple[pd.DataFrame, frozenset[str]]:
    """All readings: those read earlier, from the parent's shards, and from metric histories for runs those lack."""
    settled = [row.run_id for row in children if is_settled(row.state, row.tags)]
    held, shards = earlier.curves[_READING], earlier.shards
    held = held[held["run_id"].isin(settled)] if len(held) else held
    lacking = _lacking(children, held)
    if lacking:
        files, shards = load.new_files(uri, parent, Artifact.CURVES, shards)
        tables = [
            table.rename(columns={"run": "run_id"})[_READING] for table in map(_shard, files) if table is not None
        ]
        parts = [part for part in (held, *tables) if len(part)]
        held = pd.concat(parts, ignore_index=True) if parts else held
        lacking = _lacking(children, held)
    if lacking:
        others = held[~held["run_id"].isin([row.run_id for row in lacking])]
        parts = [part for part in (others, _from_histories(uri, lacking)) if len(part)]
        held = pd.concat(parts, ignore_index=True) if parts else others
    curves = held.drop_duplicates(["run_id", "tokens"], keep="last")
    heads = pd.DataFrame([{"run_id": row.run_id, "number": row.number, "stage": row.stage} for row in children])
    curves = heads.merge(curves, on="run_id").astype({"tokens": "int64", "loss": float, "train_loss": float})
    return curves.sort_values(["stage", "number", "tokens"]).reset_index(drop=True), shards


def _lacking(children: Sequence[RunRow], held: pd.DataFrame) -> list[RunRow]:
    """The runs of which readings are missing."""
    seen = held.groupby("run_id")["tokens"].max().to_dict()
    return [
        row
        for row in children
        if Metric.VALIDATION_CURVE in row.metrics and seen.get(row.run_id, 0) < row.metrics.get(Metric.TOKENS, 1)
    ]


def _shard(file: Path) -> pd.DataFrame | None:
    """What a shard holds; None when it is damaged, and then the metric histories hold the same points."""
    try:
        return pd.read_parquet(file)
    except ValueError:  # Of which Arrow's own errors are.
        return None


def _from_histories(uri: str, rows: Sequence[RunRow]) -> pd.DataFrame:
    if not rows:
        return pd.DataFrame()
    names: Mapping[str, str] = {Metric.VALIDATION_CURVE: "loss", Metric.TRAIN_CURVE: "train_loss"}
    points = pd.DataFrame(load.histories(uri, rows, list(names)), columns=["run_id", "key", "tokens", "value"])
    wide = points.drop_duplicates(["run_id", "key", "tokens"], keep="last").pivot(
        index=["run_id", "tokens"], columns="key", values="value"
    )
    wide = wide.rename(columns=dict(names)).reindex(columns=list(names.values())).reset_index()
    return wide.assign(seconds=float("nan"))


def _json(path: Path | None) -> dict[str, Any]:
    try:
        return {} if path is None else dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise StoreError(f"{path}: is damaged ({error}); bring back an intact copy of it") from error
