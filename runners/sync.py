"""Rebuilds the view of a search from its study: in a new store, after a loss, or after work without a network.

What the store already shows is left as it is, so that a second time changes nothing.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runners.best import Ended, missing_points
from runners.candidate import full_space
from runners.contestants import NOTE, shown_terms
from runners.environment import Environment
from runners.generations import latest_generation, latest_whole, study_name
from runners.ledger import Entry, Ledger, exists, open_storage
from runners.locks import lock_study
from runners.showing import Shown, final_trial, search_trial, sweep_trial
from runners.store import Store, every_run
from runners.study import study_folder
from runners.tasks import TASKS
from runners.tasks.data import TaskData
from runners.telling import directions
from runners.warm import FINGERPRINT
from search_space.errors import UserError
from search_space.experiment import Experiment, from_plain
from search_space.places import database_file
from search_space.records import Artifact, Metric, Stage, Status, Tag, TrialResult

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

    from runners.study import Study
    from runners.tracking import Tracker

_EXPERIMENT = "assay.experiment"
_ENVIRONMENT = "environment.json"


@dataclass(frozen=True, kw_only=True)
class Synced:
    """What a synchronisation found and did."""

    name: str
    written: int
    """Trials that were written now."""
    present: int
    """Trials that the store showed before."""
    unfinished: int
    """Trials without an end; the search runs them when it goes on."""
    without_weights: int
    """Trials written now that ended well and whose trained parameters were not found."""


def keep_for_sync(study: "Study", folder: Path, environment: Environment) -> None:
    """Note beside the study what its view is rebuilt from: the experiment, and the environment it began in."""
    plain = study.experiment.plain()
    if study.noted(_EXPERIMENT, {}) != plain:
        study.note(_EXPERIMENT, plain)
    file = folder / _ENVIRONMENT
    if not file.exists():
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(environment)))
        partial.replace(file)


def sync(
    name: str, *, study_uri: str, source: Store | None, tracker: "Tracker", progress: Callable[[str], None]
) -> Synced:
    """Bring the tracker's store to what the study holds; `source` is the store whose artifacts hold trained parameters.

    UserError when there is no such study, or it lacks what a view is made from; StudyBusy while a driver runs it.
    """
    folder = study_folder(study_uri, name)
    storage = _present_storage(study_uri)
    try:
        if not exists(storage, study_name(name, 0)):
            raise UserError(f"study {study_uri}: holds no search {name!r}; name its folder with --from, or --study URI")
        if not folder.is_dir():
            raise UserError(f"{folder}: is missing; copy the study's whole folder, not the database alone")
        release = lock_study(storage, name, folder)
        try:
            return _Sync(name, study_uri, storage, folder, source, tracker).run(progress)
        finally:
            release()
    finally:
        storage.engine.dispose()


def stored_experiment(uri: str, name: str) -> Experiment:
    """The experiment of a search as its study holds it; UserError when there is no such study."""
    storage = _present_storage(uri)
    try:
        whole = latest_whole(storage, name)
        if not whole:
            raise UserError(f"study {uri}: holds no search {name!r}; name its storage with --study URI")
        return experiment_of(Ledger(storage, whole, []), uri, name)
    finally:
        storage.engine.dispose()


def _present_storage(uri: str) -> "RDBStorage":
    """A storage that is there; none is made."""
    file = database_file(uri)
    if file is not None and not file.is_file():
        raise UserError(f"study {uri}: there is no such file; name the search's storage with --study URI")
    return open_storage(uri)


def experiment_of(ledger: Ledger, uri: str, name: str) -> Experiment:
    """The experiment that is noted in a study."""
    plain = ledger.noted(_EXPERIMENT, None)
    if plain is None:
        raise UserError(
            f"study {uri}: does not hold its experiment, as it was begun by an older version; run "
            f"'assay search FILE --name {name}' once more, which notes it"
        )
    return from_plain(plain, full_space, TASKS)


class _Sync:
    def __init__(
        self, name: str, uri: str, storage: "RDBStorage", folder: Path, source: Store | None, tracker: "Tracker"
    ) -> None:
        self._name = name
        self._uri = uri
        self._storage = storage
        self._folder = folder
        self._tracker = tracker
        self._last = latest_generation(storage, name)
        self._ledger = Ledger(storage, study_name(name, self._last), [])
        self._trained = {} if source is None else _by_key(source, name)
        self._source = source

    def run(self, progress: Callable[[str], None]) -> Synced:
        trials = list(self._trials())
        known = self._known()
        ended = [(shown, result) for shown, result in trials if result is not None]
        missing = [(shown, result) for shown, result in ended if not _is_shown(known, self._name, shown, result)]
        if missing or not known:
            without = self._write(missing, ended, complete=len(ended) == len(trials), progress=progress)
        else:
            without = 0
        return Synced(
            name=self._name,
            written=len(missing),
            present=len(ended) - len(missing),
            unfinished=len(trials) - len(ended),
            without_weights=without,
        )

    def _write(
        self,
        missing: list[tuple[Shown, TrialResult]],
        ended: list[tuple[Shown, TrialResult]],
        *,
        complete: bool,
        progress: Callable[[str], None],
    ) -> int:
        experiment, data = experiment_of(self._ledger, self._uri, self._name), self._data()
        self._tracker.start_search(experiment, experiment.space.id, data, self._environment(), self._uri)
        self._tracker.tag_search(self._terms())
        without = 0
        for count, (shown, result) in enumerate(missing, start=1):
            weights = self._weights(shown) if result.status is Status.OK else None
            without += result.status is Status.OK and shown.stage is Stage.SEARCH and weights is None
            run = self._tracker.start_trial(
                shown.number,
                shown.stage,
                shown.generation,
                shown.spec,
                shown.resolved,
                shown.name,
                shown.tags,
                started=shown.started,
                mutations=shown.mutations,
            )
            self._tracker.finish_trial(run, result, weights)
            if count % 20 == 0 or count == len(missing):
                progress(f"{count} of {len(missing)} trials written")
        for point in missing_points(_finished(ended), {}):
            self._tracker.log_best(point)
        self._tracker.finish_search("FINISHED" if complete else "KILLED", _summary(ended))
        return without

    def _trials(self) -> Iterator[tuple[Shown, TrialResult | None]]:
        """Every trial of the search and of its finals, with its end."""
        for entry in self._ledger.entries():
            yield search_trial(entry, self._folder / "weights"), entry.result
        for generation in range(self._last + 1):
            name = f"{study_name(self._name, generation)}/{Stage.SWEEP}"
            if exists(self._storage, name):
                for entry in Ledger(self._storage, name, directions([Metric.LOSS])).entries():
                    yield sweep_trial(entry), entry.result
            name = f"{study_name(self._name, generation)}/{Stage.FINAL}"
            if exists(self._storage, name):
                trained: dict[str, Entry] = {}
                for entry in Ledger(self._storage, name, directions([Metric.LOSS])).entries():
                    yield final_trial(entry, trained.get(entry.spec.id)), entry.result
                    if entry.result is not None and entry.result.status is Status.OK:
                        trained.setdefault(entry.spec.id, entry)

    def _terms(self) -> Mapping[str, str]:
        """The tag of the search's run that says on what terms its best candidates met the baseline."""
        name = f"{study_name(self._name, self._last)}/{Stage.FINAL}"
        noted = Ledger(self._storage, name, []).noted(NOTE, None) if exists(self._storage, name) else None
        return {} if noted is None else {Tag.CONTEST: shown_terms(noted)}

    def _known(self) -> Mapping[str, Mapping[str, str]]:
        """Tags and run status of what the store shows, by key."""
        client = self._tracker.client
        found = client.get_experiment_by_name(self._name)
        if found is None:
            return {}
        runs = every_run(client, [found.experiment_id])
        return {run.data.tags.get(Tag.KEY, ""): {**run.data.tags, "status": run.info.status} for run in runs}

    def _data(self) -> TaskData:
        file = self._folder / f"data-{self._ledger.noted(FINGERPRINT, '')[:12]}.safetensors"
        if not file.is_file():
            raise UserError(f"{file}: is missing; copy the study's whole folder, not the database alone")
        return TaskData.load(file)

    def _environment(self) -> Environment:
        file = self._folder / _ENVIRONMENT
        if not file.is_file():
            raise UserError(f"{file}: is missing; copy the whole folder of the study, not the database alone")
        return Environment(**json.loads(file.read_text()))

    def _weights(self, shown: Shown) -> Path | None:
        """Trained parameters, where they wait or where another store keeps them."""
        if shown.weights is not None and shown.weights.is_file():
            return shown.weights
        run = self._trained.get(f"{self._name}/{shown.key}")
        return (
            None if run is None or self._source is None else self._source.artifact(run, Artifact.MODEL, required=False)
        )


def _by_key(store: Store, name: str) -> dict[str, Any]:
    parent = store.searches().get(name)
    runs = [] if parent is None else every_run(store.client, [parent.info.experiment_id])
    return {run.data.tags[Tag.KEY]: run for run in runs if Tag.KEY in run.data.tags}


def _is_shown(known: Mapping[str, Mapping[str, str]], name: str, shown: Shown, result: TrialResult) -> bool:
    tags = known.get(f"{name}/{shown.key}", {})
    same_attempts = tags.get(Tag.ATTEMPTS) == shown.tags.get(Tag.ATTEMPTS)
    return tags.get(Tag.STATUS) == result.status and tags.get("status") != "RUNNING" and same_attempts


def _finished(ended: list[tuple[Shown, TrialResult]]) -> Iterator[Ended]:
    for shown, result in ended:
        if shown.stage is Stage.SEARCH and result.status is Status.OK:
            yield Ended(shown.started + result.seconds, shown.number, result.metrics[Metric.LOSS])


def _summary(ended: list[tuple[Shown, TrialResult]]) -> dict[str, float]:
    """What the parent run is closed with."""
    results = [result for shown, result in ended if shown.stage is Stage.SEARCH]
    counts = Counter(result.status for result in results)
    losses = [result.metrics[Metric.LOSS] for result in results if result.status is Status.OK]
    return {
        **{f"trials/{status}": float(count) for status, count in counts.items()},
        **({Metric.BEST_LOSS: min(losses)} if losses else {}),
        Metric.TOKENS: float(sum(result.tokens for result in results)),
    }
