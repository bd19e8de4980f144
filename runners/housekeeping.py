"""Deleting a search, or what nothing refers to: first a plan that lists, then carrying it out."""

import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runners.artifacts import write
from runners.driver import is_dead
from runners.owners import database_files, delete_from, is_driven, newest, parts_of, searches_in, serves
from runners.rows import VIEW_TAG
from runners.stale import close_stale
from runners.store import Store
from search_space.errors import UserError
from search_space.places import locate, present_path
from search_space.records import Tag

if TYPE_CHECKING:
    from mlflow.entities import Experiment

SETTLED_SECONDS = 3600.0
"""Age below which a file may belong to a search that is just starting; gc leaves it alone."""
_GIVEN_UP = re.compile(r".* \(deleted \d+\)")
"""Names of searches that were deleted on a server and have given up their own."""


class HousekeepingError(UserError):
    """Something that must not be deleted now."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What would be deleted."""

    experiments: tuple[str, ...] = ()
    """MLflow experiment ids, with every run in them."""
    runs: tuple[str, ...] = ()
    """Runs already deleted in MLflow but still stored."""
    paths: tuple[Path, ...] = ()
    studies: tuple[tuple[str, str], ...] = ()
    """(database URI, search) where a study shares its database with others."""
    lines: tuple[str, ...] = ()
    """The plan in words, one line each."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the files to be deleted."""
        return sum(_size(path) for path in self.paths)

    def __bool__(self) -> bool:
        return bool(self.experiments or self.runs or self.paths or self.studies)


def plan_remove(name: str, uri: str = "") -> Plan:
    """What deleting a search would delete: its runs, artifacts and study."""
    store = Store(locate(uri))
    close_stale(store)
    parent = store.parent(name)
    driver = parent.data.tags.get(Tag.DRIVER, "")
    if parent.info.status == "RUNNING" and not is_dead(driver):
        raise HousekeepingError(
            f"search {name!r}: is running (driver {driver or 'unknown'}); stop it with Ctrl-C there, then delete it"
        )
    children = store.children(parent)
    # Of runs with drivers of their own, those are left running here whose driver lives.
    longer = [run for run in children if run.info.status == "RUNNING" and Tag.DRIVER in run.data.tags]
    if longer:
        raise HousekeepingError(
            f"search {name!r}: {longer[0].info.run_name!r} is being trained "
            f"(driver {longer[0].data.tags[Tag.DRIVER]}); stop it with Ctrl-C there, then delete the search"
        )
    experiment = store.client.get_experiment(parent.info.experiment_id)
    study = parts_of(name, parent.data.tags.get(Tag.STUDY, ""), store.place)
    paths = [*study.paths, *_artifact_folders(store, experiment)]
    if any(path.is_dir() and is_driven(path) for path in study.paths):
        raise HousekeepingError(f"search {name!r}: a driver holds its study; stop it with Ctrl-C, then delete it")
    return Plan(
        experiments=(parent.info.experiment_id,),
        paths=tuple(paths),
        studies=study.shared,
        lines=(
            f"search {name}: {len(children)} trials and their metrics",
            *map(str, paths),
            *(f"the trials of {search} in {uri}, which holds other searches too" for uri, search in study.shared),
            *study.left,
        ),
    )


def plan_collect(uri: str = "", *, now: float = 0.0) -> Plan:
    """What nothing refers to: runs deleted in MLflow, artifact folders of no run, studies of no search.

    On a server, whose files are its own, these are deleted searches that still hold their name, and local studies. A
    study that serves another store, or that a driver holds, is left alone.
    """
    store = Store(locate(uri))
    close_stale(store)
    settled = (now or time.time()) - SETTLED_SECONDS
    experiments = {entry.experiment_id: entry for entry in _experiments(store)}
    deleted = [entry for entry in experiments.values() if entry.lifecycle_stage == "deleted"]
    if store.place.is_server:
        mine = [e for e in deleted if VIEW_TAG in e.tags and not _GIVEN_UP.fullmatch(e.name)]
        return _plan(mine, (), _lone_studies(store, settled))
    runs = {run: experiment for run, experiment in _deleted_runs(store) if experiments[experiment] not in deleted}
    paths = [folder for entry in deleted for folder in _artifact_folders(store, entry)]
    paths += _orphans(store, set(runs), {entry.name for entry in deleted}, settled)
    return _plan(deleted, tuple(runs), [*paths, *_lone_studies(store, settled)])


def _plan(deleted: "list[Experiment]", runs: tuple[str, ...], paths: list[Path]) -> Plan:
    return Plan(
        experiments=tuple(entry.experiment_id for entry in deleted),
        runs=runs,
        paths=tuple(paths),
        lines=(
            *(f"deleted search {entry.name}" for entry in deleted),
            *(f"deleted run {run}" for run in runs),
            *map(str, paths),
        ),
    )


def carry_out(plan: Plan, uri: str = "") -> None:
    """Delete what the plan lists; what is gone already is no error."""
    store = Store(locate(uri))
    for run in plan.runs:
        write(lambda run=run: _hard(store)._hard_delete_run(run))  # type: ignore[misc]
    for experiment in plan.experiments:
        _delete_experiment(store, experiment)
    for uri_of_study, name in plan.studies:
        delete_from(uri_of_study, name)
    for path in plan.paths:
        if is_driven(path if path.is_dir() else path.with_suffix("")):
            continue  # A driver took the study up since the plan was made.
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _delete_experiment(store: Store, experiment_id: str) -> None:
    """Delete for good; a server cannot, so there the search gives up its name and is marked as deleted."""
    entry = store.client.get_experiment(experiment_id)
    if store.place.is_server:
        if entry.lifecycle_stage == "deleted":
            write(lambda: store.client.restore_experiment(experiment_id))
        write(lambda: store.client.rename_experiment(experiment_id, f"{entry.name} (deleted {int(time.time())})"))
        write(lambda: store.client.delete_experiment(experiment_id))
        return
    if entry.lifecycle_stage != "deleted":
        write(lambda: store.client.delete_experiment(experiment_id))
    hard = _hard(store)
    for run, owner in _deleted_runs(store):
        if owner == experiment_id:
            write(lambda run=run: hard._hard_delete_run(run))  # type: ignore[misc]
    write(lambda: hard._hard_delete_experiment(experiment_id))


def _hard(store: Store) -> Any:
    """MLflow's own store object: the client has no way to delete for good, `mlflow gc` uses this too."""
    return store.client._tracking_client.store


def _experiments(store: Store) -> "list[Experiment]":
    from mlflow.entities import ViewType

    found: list[Experiment] = []
    token = None
    while True:
        page = store.client.search_experiments(view_type=ViewType.ALL, page_token=token)
        found += page
        token = page.token
        if not token:
            return found


def _deleted_runs(store: Store) -> list[tuple[str, str]]:
    """(run, experiment) of every run that is deleted but still stored."""
    from mlflow.entities import ViewType

    found = []
    for entry in _experiments(store):
        token = None
        while True:
            page = store.client.search_runs(
                [entry.experiment_id], run_view_type=ViewType.DELETED_ONLY, page_token=token
            )
            found += [(run.info.run_id, entry.experiment_id) for run in page]
            token = page.token
            if not token:
                break
    return found


def _artifact_folders(store: Store, experiment: "Experiment") -> list[Path]:
    """The artifact folder of a search, when it lies on this machine and is only this search's."""
    folder = present_path(f"{experiment.artifact_location}/x/artifacts", store.place)
    if folder is None:
        return []
    root = folder.parents[1]
    return [root] if root.is_dir() and root.name == experiment.name else []


def _orphans(store: Store, deleted: set[str], deleted_searches: set[str], settled: float) -> list[Path]:
    """Artifact folders that belong to no stored search or run."""
    root = store.place.artifacts
    if not root.is_dir():
        return []
    live = {entry.name: entry.experiment_id for entry in _experiments(store)}
    found = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and path.name not in deleted_searches):
        if serves(store.place.studies / folder.name, store.place) is False:
            continue
        if folder.name not in live:
            found += [folder] if folder.stat().st_mtime < settled else []
            continue
        known = {run.info.run_id for run in store.runs([live[folder.name]])}
        for run in sorted(folder.iterdir()):
            if run.name in deleted or (run.name not in known and run.stat().st_mtime < settled):
                found.append(run)
    return found


def _lone_studies(store: Store, settled: float) -> list[Path]:
    """Study files that serve the store although it holds none of their searches.

    Where nothing tells which store a study serves, it is the SQLite store it lies beside.
    """
    held, found = set(store.searches()), list[Path]()
    for study in sorted(store.place.studies.glob("*.db")) if store.place.studies.is_dir() else []:
        names = searches_in(study)
        folders = [study.parent / name for name in sorted(names)]
        owned = [serves(folder, store.place) for folder in folders]
        mine = False not in owned and (True in owned or store.place.database is not None)
        if mine and not names & held and newest(study) < settled and not any(map(is_driven, folders)):
            found += [*database_files(study), *(folder for folder in folders if folder.is_dir())]
    return found


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size if path.exists() else 0
