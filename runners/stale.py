"""Runs that nobody trains any more: closed, so that none stays RUNNING for ever."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from runners.artifacts import write
from runners.driver import is_dead, is_here
from runners.store import Store, every_run
from search_space.records import TERMINAL, Stage, Status, Tag

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

SILENT_SECONDS = 60.0
"""After so long without a beat, drivers of other machines are taken for dead."""


def close_children(client: "MlflowClient", experiment_id: str) -> int:
    """Mark every trial that nobody trains any more as preempted; how many there were.

    A run with a driver of its own is none of the search's: it is left alone while that driver lives.
    """
    running = every_run(client, [experiment_id], f"tags.`{Tag.KIND}` = 'trial' and attributes.status = 'RUNNING'")
    stale = [run for run in running if Tag.DRIVER not in run.data.tags or _is_abandoned(run.data.tags)]
    _close(client, stale)
    return len(stale)


def _close(client: "MlflowClient", runs: "list[Run]") -> None:
    for run in runs:
        write(lambda run_id=run.info.run_id: client.set_tag(run_id, Tag.STATUS, str(Status.PREEMPTED)))  # type: ignore[misc]
        write(lambda run_id=run.info.run_id: client.set_terminated(run_id, TERMINAL[Status.PREEMPTED]))  # type: ignore[misc]


def close_stale(store: Store) -> list[str]:
    """Close the searches whose drivers died without a word, and such runs with drivers of their own; the searches."""
    closed = []
    searches = store.searches()
    experiments = [parent.info.experiment_id for parent in searches.values()]
    query = f"tags.`{Tag.STAGE}` = '{Stage.TRAIN}' and attributes.status = 'RUNNING'"
    longer = every_run(store.client, experiments, query) if experiments else []
    _close(store.client, [run for run in longer if _is_abandoned(run.data.tags)])
    for name, parent in searches.items():
        if parent.info.status == "RUNNING" and _is_abandoned(parent.data.tags):
            close_children(store.client, parent.info.experiment_id)
            write(lambda run_id=parent.info.run_id: store.client.set_terminated(run_id, "KILLED"))  # type: ignore[misc]
            closed.append(name)
    return closed


def _is_abandoned(tags: Mapping[str, str]) -> bool:
    """True when no driver of a search or run lives: those of this machine are looked up, those elsewhere must beat."""
    drivers = [value for tag, value in tags.items() if tag == Tag.DRIVER or tag.startswith(Tag.JOINED)]
    silent = time.time() - float(tags.get(Tag.BEAT, 0)) > SILENT_SECONDS
    return all(is_dead(driver) if is_here(driver) else silent for driver in drivers)
