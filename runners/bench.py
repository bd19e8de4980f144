"""A bench: what runs one trial at a time on whichever machine an engine put it, and says what it needs from the driver.

It holds a local engine with one warm worker, so that a trial ends here as it would beside the driver: same classes,
same reasons, same last lines, whether it raises, crashes, hangs or is killed.
"""

import dataclasses
import json
import sys
import tempfile
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runners.engine import Ended, Job
from runners.local_engine import LocalEngine
from runners.trials import TRAINED
from search_space.records import spec_from_plain, to_plain

_LOOK_SECONDS = 60.0
_PATHS = tuple(field.name for field in dataclasses.fields(Job) if Path in typing.get_args(field.type))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all benches of a search share."""

    folder: Path
    """The search's folder on the driver's machine; other machines may see it, too."""
    mark: str
    """Name of a file in it by which a machine knows that it sees the folder."""
    data: Path
    threads: int
    path: tuple[str, ...]
    """Where the driver finds modules; empty where code is shipped instead."""
    trials: str = TRAINED
    """What runs a trial, as runners.trials takes it."""


def job_to_text(job: Job) -> str:
    """A job as JSON."""
    plain = {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
    plain["spec"] = to_plain(job.spec)
    plain.update({name: str(plain[name].absolute()) for name in _PATHS if plain[name] is not None})
    return json.dumps(plain)


def job_from_text(text: str) -> Job:
    """The inverse of job_to_text."""
    plain: dict[str, Any] = json.loads(text)
    plain["spec"] = spec_from_plain(plain["spec"])
    plain.update({name: Path(plain[name]) for name in _PATHS if plain[name] is not None})
    return Job(**plain)


class Bench:
    """One trial at a time; where the search's folder cannot be seen, files lie in a folder of this machine."""

    def __init__(self, setting: Setting, scratch: Path, fetch: Callable[[], bytes]) -> None:
        """Files of its own go to `scratch`; `fetch` gets the content of the data file where that cannot be seen."""
        sys.path.extend(path for path in setting.path if path not in sys.path)
        self._setting = setting
        self._here = tempfile.TemporaryDirectory(dir=scratch, prefix="bench-", ignore_cleanup_errors=True)
        self._sees = (setting.folder / setting.mark).exists()
        self._key = 0
        self._weights: Path | None = None
        data = setting.data
        if not self._sees:
            data = self._local(data)
            data.write_bytes(fetch())
        logs = Path(self._here.name, "logs")
        self._engine = LocalEngine(jobs=1, data=data, folder=logs, threads=setting.threads, trials=setting.trials)

    def begin(self, job: Job) -> None:
        """Start a trial; the one before must have ended."""
        if not self._sees:
            given = {name: getattr(job, name) for name in _PATHS}
            moved: dict[str, Any] = {name: self._local(path) for name, path in given.items() if path is not None}
            job = dataclasses.replace(job, **moved)
        self._key, self._weights = job.key, job.weights
        self._engine.start(job)

    def next(self) -> dict[str, Any]:
        """Wait for the trial's next word: {'reading': ...}, which waits for an answer, or {'result': ...}; plain."""
        while True:
            for event in self._engine.wait(_LOOK_SECONDS):
                if isinstance(event, Ended):
                    return {"result": to_plain(event.result)}
                return {"reading": to_plain(event.reading)}

    def answer(self, go_on: bool) -> None:
        """Let the trial that gave a reading go on, or prune it."""
        self._engine.decide(self._key, go_on)

    def weights(self) -> bytes | None:
        """What the last trial wrote that the driver cannot see."""
        if self._sees or self._weights is None or not self._weights.exists():
            return None
        content = self._weights.read_bytes()
        self._weights.unlink()
        return content

    def close(self) -> None:
        """End what runs, and leave nothing behind."""
        self._engine.stop()
        self._here.cleanup()

    def _local(self, path: Path) -> Path:
        """Where a file of the search lies on this machine."""
        inside = path.relative_to(self._setting.folder) if path.is_relative_to(self._setting.folder) else path.name
        moved = Path(self._here.name, "search", inside)
        moved.parent.mkdir(parents=True, exist_ok=True)
        return moved
