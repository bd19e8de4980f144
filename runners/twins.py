"""Runs that a server created twice, because its answer was lost and the request sent again: one of each is kept."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from runners.artifacts import write
from search_space.records import Status, Tag

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient


def one_of_each(client: "MlflowClient", runs: Iterable["Run"], known: Mapping[str, "Run"]) -> dict[str, "Run"]:
    """The runs that have a key, by key; of those with one key all but one are deleted.

    That which is `known` under the key stays, else one that has come to its end, else the one that holds most.
    """
    twins: dict[str, list[Run]] = {}
    for run in runs:
        if Tag.KEY in run.data.tags:
            twins.setdefault(run.data.tags[Tag.KEY], []).append(run)
    found = {}
    for key, born in twins.items():
        found[key], *others = sorted(born, key=lambda run: _rank(run, known), reverse=True)
        for run in others:
            write(lambda run_id=run.info.run_id: client.delete_run(run_id))  # type: ignore[misc]
    return found


def _rank(run: "Run", known: Mapping[str, "Run"]) -> tuple[bool, bool, int]:
    ours, tags = known.get(run.data.tags[Tag.KEY]), run.data.tags
    has_ended = tags.get(Tag.STATUS, Status.PREEMPTED) != Status.PREEMPTED
    return ours is not None and ours.info.run_id == run.info.run_id, has_ended, len(run.data.metrics)
