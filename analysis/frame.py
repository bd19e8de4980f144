"""A search as tables: one DataFrame row a child run, all learning curves, and what the parent run holds."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import load
from analysis.fastread import RunRow, StoreError
from search_space.domains import Domain, Scalar
from search_space.records import Artifact, Metric, Stage, Status, Tag
from search_space.space import OneOf, Space, searched
from search_space.stored import space_from_plain

PARAM = "param/"
"""Prefix of the columns that hold searched or fixed paths."""
TRAINED = (str(Status.OK), str(Status.PRUNED))
"""Statuses whose readings count as an outcome."""
ENDED_BADLY = (str(Status.DIVERGED), str(Status.OUT_OF_MEMORY), str(Status.TIMED_OUT), str(Status.FAILED))
"""Statuses that count as a rate, never as a loss."""

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
class Parent:
    """What the parent run holds for all its trials."""

    run: RunRow
    experiment: dict[str, Any]
    """The experiment as plain data; empty when the store lost it."""
    environment: dict[str, Any]
    """Machine, versions, commit; empty when the store lost it."""

    @property
    def bigram_loss(self) -> float | None:
        """Validation loss of the task's bigram model, where it has one."""
        return self.run.metrics.get(Metric.BASELINE_BIGRAM)


@dataclass(frozen=True, kw_only=True)
class Search:
    """Everything analysis needs of one search."""

    uri: str
    name: str
    frame: pd.DataFrame
    """One row per child run: number, run_id, name, stage, generation, status, reason, candidate, replica, ids, start,
    end, every metric under its name, and every path under param/<path> (missing where the path is not live)."""
    curves: pd.DataFrame
    """run_id, number, stage, tokens, loss, train_loss, seconds: one row per validation reading, tokens increasing."""
    parent: Parent

    @cached_property
    def trials(self) -> pd.DataFrame:
        """The search stage, by number."""
        return self.frame[self.frame["stage"] == Stage.SEARCH].sort_values("number").reset_index(drop=True)

    @cached_property
    def finals(self) -> pd.DataFrame:
        """The finals of the newest generation that has any, by candidate and replica; their numbers restart in each."""
        chosen = self.frame[self.frame["stage"] == Stage.FINAL]
        chosen = chosen[chosen["generation"] == chosen["generation"].max()]
        return chosen.sort_values(["candidate", "replica"]).reset_index(drop=True)

    @cached_property
    def trainings(self) -> pd.DataFrame:
        """Every trial and final that was trained: copies of another final are left out."""
        return self.frame[(self.frame["same_as"] == "") & self.frame["stage"].isin([Stage.SEARCH, Stage.FINAL])]

    @property
    def finished(self) -> pd.DataFrame:
        """Search trials that used their whole budget, best first."""
        return self.trials[(self.trials["status"] == Status.OK) & self.trials[Metric.LOSS].notna()].sort_values(
            Metric.LOSS
        )

    @property
    def baseline(self) -> "pd.Series[Any] | None":
        """The trial the experiment names as baseline, or None."""
        marked = self.trials[self.trials["is_baseline"]]
        return marked.iloc[0] if len(marked) else None

    @property
    def task(self) -> str:
        """The name of the task."""
        return str(self.parent.experiment.get("task", {}).get("kind", ""))

    @property
    def unit(self) -> str:
        """The unit of the losses."""
        return f"nats/{self.parent.run.tags.get(Tag.UNIT, 'token')}"

    @cached_property
    def choices(self) -> frozenset[str]:
        """Every path of the search space; what is not among them was solved, or came from the task."""
        stored = self.parent.experiment.get("space")
        if stored:
            return frozenset(_paths(space_from_plain(stored)))
        return frozenset(str(column).removeprefix(PARAM) for column in self.frame if str(column).startswith(PARAM))

    @cached_property
    def domains(self) -> dict[str, Domain]:
        """The domain of each searched path; empty when the store lost the experiment."""
        stored = self.parent.experiment.get("space")
        return searched(space_from_plain(stored)) if stored else {}

    @cached_property
    def open_families(self) -> frozenset[str]:
        """The path of the kind of each family of which the file left several variants open."""
        stored = self.parent.experiment.get("space")
        return (
            frozenset(path for path, node in _families(space_from_plain(stored)) if len(node.variants) > 1)
            if stored
            else frozenset()
        )

    @cached_property
    def usual_kinds(self) -> dict[str, str]:
        """The variant that each family has where a file says nothing of it, by the path of its kind."""
        stored = self.parent.experiment.get("full")
        return {path: node.default for path, node in _families(space_from_plain(stored))} if stored else {}

    @cached_property
    def varied(self) -> list[str]:
        """Paths of the space that took more than one value where they were live, in order of first appearance."""
        paths = [str(column).removeprefix(PARAM) for column in self.trials if str(column).startswith(PARAM)]
        return [path for path in paths if path in self.choices and self.trials[PARAM + path].nunique() > 1]


def assemble(uri: str, name: str, rows: Sequence[RunRow]) -> Search:
    """The search made of the rows of its experiment."""
    parents = [row for row in rows if row.tags.get(Tag.KIND) == "search"]
    children = [row for row in rows if row.is_trial]
    if not parents:
        raise StoreError(f"search {name!r}: the store {uri} holds no parent run for it; it was not written by a search")
    if not children:
        raise StoreError(f"search {name!r}: has no trial yet; wait for the first, or start it: assay search FILE")
    parent = parents[-1]
    return Search(
        uri=uri,
        name=name,
        frame=_frame(children),
        curves=_curves(uri, parent, children),
        parent=Parent(
            run=parent,
            experiment=_json(load.artifact(uri, parent, Artifact.EXPERIMENT_PLAIN)),
            environment=_json(load.artifact(uri, parent, Artifact.ENVIRONMENT)),
        ),
    )


def typed(text: str) -> Scalar:
    """The scalar that a parameter's text stands for."""
    if text in ("True", "False"):
        return text == "True"
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def short_path(path: str) -> str:
    """The path as people say it: model.mixer.kind is mixer, optimizer.adamw.learning_rate is learning_rate."""
    parts = path.split(".")
    if parts[-1] == "kind":
        return parts[-2]
    if parts[0] != "model" or len(parts) <= 2:
        return parts[-1]
    return ".".join(parts[-2:])


def short_value(value: Scalar) -> str:
    """The value in few characters."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def describe(search: Search, row: "pd.Series[Any]") -> str:
    """What sets this trial apart within its search: softmax(kv_heads=2)+rotary layers=3 learning_rate=0.003."""
    live = {path: row[PARAM + path] for path in search.varied if not _absent(row[PARAM + path])}
    kinds = {path.removesuffix(".kind"): str(value) for path, value in live.items() if path.endswith(".kind")}
    inner: dict[str, list[str]] = {family: [] for family in kinds}
    words: list[str] = []
    for path, value in live.items():
        if path.endswith(".kind"):
            continue
        family = next((family for family in kinds if path.startswith(f"{family}.")), "")
        inner.get(family, words).append(_setting(path.rpartition(".")[2] if family else short_path(path), value))
    blocks = [f"{kind}({', '.join(inner[family])})" if inner[family] else kind for family, kind in kinds.items()]
    return " ".join([*(["+".join(blocks)] if blocks else []), *words]) or str(row["name"])


def _setting(name: str, value: Scalar) -> str:
    if isinstance(value, bool):
        return name if value else f"not {name}"
    return f"{name}={short_value(value)}"


def _paths(space: Space, prefix: str = "") -> Iterator[str]:
    for name, node in space.fields.items():
        path = f"{prefix}{name}"
        if isinstance(node, Space):
            yield from _paths(node, f"{path}.")
        elif isinstance(node, OneOf):
            yield f"{path}.kind"
            for kind, variant in node.variants.items():
                yield from _paths(variant, f"{path}.{kind}.")
        else:
            yield path


def _families(space: Space, prefix: str = "") -> Iterator[tuple[str, OneOf]]:
    for name, node in space.fields.items():
        path = f"{prefix}{name}"
        if isinstance(node, Space):
            yield from _families(node, f"{path}.")
        elif isinstance(node, OneOf):
            yield f"{path}.kind", node


def _absent(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)


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
    paths = list(dict.fromkeys(key for row in children for key in row.params))
    numbers = pd.DataFrame(
        [[row.metrics.get(key) for key in metrics] for row in children], columns=metrics, dtype=float
    )
    typed_params = [[typed(row.params[path]) if path in row.params else None for path in paths] for row in children]
    params = pd.DataFrame(typed_params, columns=[PARAM + path for path in paths], dtype=object)
    return pd.concat([frame, numbers, params], axis=1)


def _curves(uri: str, parent: RunRow, children: Sequence[RunRow]) -> pd.DataFrame:
    """All readings: from the parent's shards, and from metric histories for runs the shards lack."""
    columns = ["run_id", "tokens", "loss", "train_loss", "seconds"]
    folder = load.artifact(uri, parent, Artifact.CURVES)
    shards = sorted(folder.glob("*.parquet")) if folder is not None else []
    tables = [pd.read_parquet(shard).rename(columns={"run": "run_id"})[columns] for shard in shards]
    held = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns)
    seen = held.groupby("run_id")["tokens"].max().to_dict()
    lacking = [
        row
        for row in children
        if Metric.VALIDATION_CURVE in row.metrics and seen.get(row.run_id, 0) < row.metrics.get(Metric.TOKENS, 1)
    ]
    parts = [held[~held["run_id"].isin([row.run_id for row in lacking])], _from_histories(uri, lacking)]
    curves = pd.concat([part for part in parts if len(part)] or [held], ignore_index=True)
    curves = curves.drop_duplicates(["run_id", "tokens"], keep="last")
    heads = pd.DataFrame([{"run_id": row.run_id, "number": row.number, "stage": row.stage} for row in children])
    curves = heads.merge(curves, on="run_id").astype({"tokens": "int64", "loss": float, "train_loss": float})
    return curves.sort_values(["stage", "number", "tokens"]).reset_index(drop=True)


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
    return {} if path is None else dict(json.loads(path.read_text(encoding="utf-8")))
