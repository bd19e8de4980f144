"""The driver of a ladder: trains candidates of earlier searches at growing sizes, or goes on where it stopped.

A ladder has a name, a study and a page of its own in the tracking store.
"""

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runners.climb import Climb
from runners.connecting import StoreError
from runners.engine import Interrupts
from runners.engines import open_engine, with_jobs
from runners.environment import capture
from runners.generations import study_name
from runners.ladder_members import Member, members
from runners.ladder_plan import Asked, identity, ladder_experiment, rules
from runners.ledger import Ledger, open_storage
from runners.locks import lock_study
from runners.owners import mark_owner
from runners.progress import Progress
from runners.recorder import Recorder
from runners.shared import kept_data
from runners.stale import close_stale
from runners.study import study_folder
from runners.tasks import task_from_plain
from runners.tasks.data import TaskData
from runners.telling import directions
from runners.trials import TRAINED
from search_space.errors import UserError
from search_space.experiment import Experiment, difference
from search_space.places import file_name
from search_space.records import Artifact, Metric, Stage, Status, Tag

if TYPE_CHECKING:
    from runners.store import Store
    from runners.tracking import Tracker

_IDENTITY = "assay.identity"


@dataclass(frozen=True, kw_only=True)
class LadderOutcome:
    """How a ladder stands when its driver returns."""

    name: str
    interrupted: str
    """Name of the signal that ended it; empty when it ended by itself."""
    is_whole: bool
    """False when the same command has more to train."""
    counts: dict[Status, int]
    seconds: float
    unshown: int
    """Ends that the tracking store does not show, because it could not be written."""


def run_ladder(
    asked: Asked,
    *,
    store: "Store",
    tracker: "Tracker",
    study_uri: str,
    jobs: int = 0,
    data_path: str = "",
    address: str = "",
    progress: Progress | None = None,
    trials: str = TRAINED,
) -> LadderOutcome:
    """Train what the ladder still lacks; Ctrl-C and SIGTERM end it cleanly, and the same command goes on.

    Arguments are those of `run_search`; `study_uri` belongs to the ladder's name.
    """
    shown, began = progress or Progress(), time.monotonic()
    close_stale(store)
    name = ladder_name(asked)
    _check_free(store, name)
    found = members(store, asked.runs)
    experiment = with_jobs(ladder_experiment(found, asked, name), jobs)
    data = _data(store, found[0], data_path)
    folder = study_folder(study_uri, name)
    folder.mkdir(parents=True, exist_ok=True)
    storage = open_storage(study_uri)
    release = lock_study(storage, name, folder)
    try:
        mark_owner(folder, tracker.place)
        file = kept_data(data, folder)
        ledger = Ledger(storage, f"{study_name(name, 0)}/{Stage.LADDER}", directions([Metric.LOSS]))
        environment = capture(experiment.blocks)
        told = _told(found, asked, experiment)

        def open_search() -> str:
            run = tracker.start_search(experiment, experiment.space.id, data, environment, study_uri)
            tracker.tag_search({Tag.LADDER: json.dumps(told)})
            return run

        recorder = Recorder(tracker, open_search, shown.note)
        source = Climb(found, asked, experiment, data, ledger, recorder, shown, folder)
        _check_same(ledger, identity(found, asked, experiment), name)
        recorder.open(needed=True)
        status, unshown = "FAILED", 0
        try:
            with (
                Interrupts() as interrupts,
                open_engine(experiment, address=address, data=file, folder=folder, trials=trials) as engine,
            ):
                engine.drive(source, interrupts)
                source.show(now=True)
                engine.stop()
                source.cut_off(interrupts.asked)
            status = "KILLED" if interrupts.asked else "FINISHED"
        finally:
            shown.end()
            unshown = recorder.close(lambda: tracker.finish_search(status), hurried=status != "FINISHED")
            source.settle_shown()
        return LadderOutcome(
            name=name,
            interrupted=interrupts.asked,
            is_whole=source.is_whole(),
            counts=source.counts(),
            seconds=time.monotonic() - began,
            unshown=unshown,
        )
    finally:
        release()
        storage.engine.dispose()


def ladder_name(asked: Asked) -> str:
    """The name given, or that of the first run's search with '-ladder' behind it."""
    search, _, rest = asked.runs[0].partition("/")
    if not asked.name and not rest:
        raise UserError(f"assay ladder {asked.runs[0]}: a run named by its id names no search; give --name NEW")
    return file_name(asked.name or f"{search}-ladder")


def _check_free(store: "Store", name: str) -> None:
    try:
        parent = store.parent(name)
    except StoreError:
        return
    if Tag.LADDER not in parent.data.tags:
        raise UserError(f"--name {name}: is the name of a search; a ladder needs one of its own, such as {name}-ladder")


def _check_same(ledger: Ledger, now: dict[str, object], name: str) -> None:
    plain = json.loads(json.dumps(now))
    lines = difference(ledger.noted(_IDENTITY, plain), plain)
    if lines:
        listed = "\n".join(f"  {line}" for line in lines)
        raise UserError(
            f"ladder {name!r} was begun otherwise:\n{listed}\nType it as before (larger sizes, more seeds and another "
            f"target may be added), or give this one another --name"
        )
    ledger.note(_IDENTITY, plain)


def _data(store: "Store", member: Member, path: str) -> TaskData:
    """The data of the runs: what the store holds, unless a path is given."""
    fingerprint = member.spec.data_fingerprint
    run = store.client.get_run(member.run_id)
    name = f"{Artifact.DATA}/{fingerprint}.safetensors"
    held = None if path else store.artifact(store.parent_of(run), name, required=False)
    data = TaskData.load(held) if held else task_from_plain(member.spec.task).prepare(path)
    if data.fingerprint != fingerprint:
        raise UserError(
            f"the data has the fingerprint {data.fingerprint}, {member.run} was trained on {fingerprint}; name that "
            f"data with --data PATH"
        )
    return data


def _told(found: tuple[Member, ...], asked: Asked, experiment: Experiment) -> dict[str, object]:
    """What the ladder's page says of it, for those who read the store alone."""
    batch = asked.batch_tokens or experiment.budget.batch_tokens
    return {
        "sizes": list(asked.sizes),
        "target": asked.target,
        "sure": asked.sure,
        "tokens_per_param": asked.tokens_per_param,
        "candidates": {one.label: one.run for one in found},
        "rules": rules(found, asked, batch),
    }
