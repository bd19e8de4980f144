"""Dies at every statement with which runs are written together: `python bulk_deaths.py FOLDER`.

Each death is one of a process forked from this one, over a store of its own in which one of the trials runs; a second
process then does the same and lives. Prints as JSON what each store holds after either.
"""

import json
import multiprocessing
import shutil
import sys
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

from sql_deaths import COMMIT, Moment, Step, Steps, moments
from tracked import Searched, readings, result, searched, store_uri

from runners.store import Store
from runners.tracking import Tracker
from search_space.places import locate
from search_space.records import Metric, Stage, Status, Tag

FORKS = multiprocessing.get_context("fork")
BEGAN = 1_700_000_000.0


def begin(tracker: Tracker, tiny: Searched, number: int) -> str:
    """Begin a trial, or take it up again."""
    spec, resolved = tiny.trial(number)
    return tracker.start_trial(number, Stage.SEARCH, 0, spec, resolved, f"{number:03d} tiny", started=BEGAN + number)


def write(folder: Path, tiny: Searched, dies_at: Moment | None, told: Connection) -> None:
    """End the trial that runs and write another whole, together; tell which steps that took, if it comes to that."""
    tracker = Tracker(store_uri(folder))
    tiny.start(tracker)
    running = begin(tracker, tiny, 0)
    steps = Steps(tracker.client._tracking_client.store.engine, dies_at)
    with tracker.together():
        tracker.finish_trial(running, result())
        tracker.finish_trial(
            begin(tracker, tiny, 1), result(Status.PRUNED, count=2, reason="it was not among the best")
        )
    told.send(steps.passed)


def written(folder: Path, tiny: Searched, dies_at: Moment | None = None) -> tuple[int | None, list[Step]]:
    """The exit code of a process that writes, and the steps that it lived to tell."""
    ours, theirs = FORKS.Pipe(duplex=False)
    with ours:
        process = FORKS.Process(target=write, args=(folder, tiny, dies_at, theirs))
        process.start()
        theirs.close()
        passed = [] if dies_at else ours.recv()
        process.join()
    return process.exitcode, passed


def trials(folder: Path) -> dict[str, list[object]]:
    """What the store holds of each trial: status, end, how many parameters, every point of the curve and the loss."""
    store = Store(locate(store_uri(folder)))
    found: dict[str, list[object]] = {}
    for run in store.children(store.parent("tiny")):
        points = [
            (name, point.step, point.value, point.timestamp)
            for name in (Metric.VALIDATION_CURVE, Metric.LOSS)
            for point in store.client.get_metric_history(run.info.run_id, name)
        ]
        found[run.data.tags[Tag.NUMBER]] = [run.info.status, run.info.end_time, len(run.data.params), sorted(points)]
    return found


def main(folder: Path) -> None:
    """One process lives; then one dies at each moment that it passed."""
    tiny, began = searched(), folder / "began"
    tracker = Tracker(store_uri(began))
    tiny.start(tracker)
    run = begin(tracker, tiny, 0)
    for reading in readings(2):
        tracker.log_reading(run, reading)
    tracker.flush()
    tracker.client._tracking_client.store.engine.dispose()

    def place(name: str) -> Path:
        return Path(shutil.copytree(began, folder / name))

    before = trials(began)
    whole = place("whole")
    _, steps = written(whole, tiny)
    deaths = []
    for moment in moments(steps):
        if moment.what == COMMIT or (moment.when == "before" and moment.what.startswith(("INSERT", "UPDATE"))):
            there = place(f"{moment.step} {moment.when}")
            code, _ = written(there, tiny, moment)
            after = trials(there)
            written(there, tiny)
            deaths.append({"moment": asdict(moment), "code": code, "after": after, "again": trials(there)})
    print(json.dumps({"before": before, "whole": trials(whole), "deaths": deaths}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
