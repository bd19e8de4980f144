"""A search as tables: one DataFrame row a child run, all learning curves, and what the parent run holds."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd

from analysis.fastread import RunRow
from search_space.domains import Domain, Scalar
from search_space.records import Metric, Stage, Status, Tag
from search_space.space import OneOf, Space, searched
from search_space.stored import space_from_plain

PARAM = "param/"
"""Prefix of the columns that hold searched or fixed paths."""
MOST_OPTIONS = 8
"""Values up to which a choice is told apart by colour."""
NOT_LIVE = "not there"
"""The option of a trial for which the choice does not exist."""
TRAINED = (str(Status.OK), str(Status.PRUNED))
"""Statuses whose readings count as an outcome."""
ENDED_BADLY = (str(Status.DIVERGED), str(Status.OUT_OF_MEMORY), str(Status.TIMED_OUT), str(Status.FAILED))
"""Statuses that count as a rate, never as a loss."""


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
        """Every trial, sweep and final that was trained: copies of another final are left out."""
        return self.frame[
            (self.frame["same_as"] == "") & self.frame["stage"].isin([Stage.SEARCH, Stage.SWEEP, Stage.FINAL])
        ]

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

    @cached_property
    def described(self) -> dict[str, str]:
        """What sets each search trial apart, by run id: softmax(kv_heads=2)+rotary layers=3 learning_rate=0.003."""
        return dict(zip(self.trials["run_id"], _descriptions(self.trials, self.varied), strict=True))

    @cached_property
    def options(self) -> dict[str, pd.Series]:
        """The varied choices of few values by path, kinds first: each trial's value in words, by run id."""
        held = {path: self.trials[PARAM + path] for path in sorted(self.varied, key=lambda p: not p.endswith(".kind"))}
        return {
            path: pd.Series([words or NOT_LIVE for words in _told(values, short_value)], index=self.trials["run_id"])
            for path, values in held.items()
            if values.nunique() <= MOST_OPTIONS
        }

    @cached_property
    def readings(self) -> pd.DataFrame:
        """The finite validation readings of ok and pruned search trials, after training began."""
        chosen = self.trials[self.trials["status"].isin(TRAINED)]["run_id"]
        begun = self.curves[np.isfinite(self.curves["loss"]) & (self.curves["tokens"] > 0)]
        return begun[begun["run_id"].isin(chosen)]


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


def typed_column(texts: Sequence[str | None]) -> list[Scalar | None]:
    """The scalars that the texts of one parameter stand for, None where there is none."""
    known: dict[str | None, Scalar | None] = {text: typed(text) for text in set(texts) if text is not None}
    return [known.get(text) for text in texts]


def as_texts(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with its parameters as texts, which a column of one type can hold."""
    held = frame.copy()
    for column in _params(frame):
        held[column] = [None if _absent(value) else str(value) for value in frame[column]]
    return held


def retyped(frame: pd.DataFrame) -> pd.DataFrame:
    """The inverse of as_texts."""
    texts = frame[_params(frame)].astype(object)
    columns = {column: typed_column([None if _absent(v) else v for v in texts[column]]) for column in texts}
    return pd.concat(
        [frame.drop(columns=list(columns)), pd.DataFrame(columns, dtype=object, index=frame.index)], axis=1
    )


def _params(frame: pd.DataFrame) -> list[str]:
    return [str(column) for column in frame if str(column).startswith(PARAM)]


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


def _descriptions(trials: pd.DataFrame, varied: Sequence[str]) -> list[str]:
    """What sets each trial apart by the varied paths; the values of a path are put into words once each."""
    kinds = {path.removesuffix(".kind"): _told(trials[PARAM + path], str) for path in varied if path.endswith(".kind")}
    settings = [
        (
            [family for family in kinds if path.startswith(f"{family}.")],
            _told(trials[PARAM + path], partial(_setting, path.rpartition(".")[2])),
            _told(trials[PARAM + path], partial(_setting, short_path(path))),
        )
        for path in varied
        if not path.endswith(".kind")
    ]
    found = []
    for place, name in enumerate(trials["name"]):
        inner: dict[str, list[str]] = {family: [] for family, told in kinds.items() if told[place]}
        words: list[str] = []
        for above, within, alone in settings:
            if alone[place]:
                family = next((family for family in above if family in inner), "")
                inner.get(family, words).append((within if family else alone)[place])
        blocks = [kinds[family][place] + (f"({', '.join(held)})" if held else "") for family, held in inner.items()]
        found.append(" ".join([*(["+".join(blocks)] if blocks else []), *words]) or str(name))
    return found


def _told(values: pd.Series, say: Callable[[Scalar], str]) -> list[str]:
    """Each value in words, '' where there is none."""
    words = {key: say(value) for key, value in {(type(v), v): v for v in values if not _absent(v)}.items()}
    return [words.get((type(value), value), "") for value in values]


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
