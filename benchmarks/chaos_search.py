"""One search whose drivers and workers are killed, as whoever kills them sees it."""

import multiprocessing
import os
import random
import signal
import sqlite3
import sys
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_checks import TEXT

from runners.connecting import StoreDown

FORKS = multiprocessing.get_context("forkserver")
MOST_WITHOUT_END = 2
"""Workers killed since a trial last ended: three in a row that cannot start end a driver, and five deaths of one trial
fail it, as they should."""
LEFT = 3
"""Exit code of a driver that leaves ends which the store does not show, or that the server lets begin nothing."""


def drive(folder: Path, name: str, overrides: tuple[str, ...], store: str, trials: str) -> None:
    """What a driver does, in a process of its own."""
    from runners.candidate import full_space
    from runners.search import run_search
    from runners.tasks import TASKS
    from runners.tracking import Tracker
    from search_space.experiment import read

    with (folder / f"{name}.log").open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    experiment = read(TEXT.format(name=name), full_space=full_space, tasks=TASKS, overrides=overrides)
    study_uri = f"sqlite:///{folder}/{name}.db"
    try:
        outcome = run_search(experiment, tracker=Tracker(store, waits=True), study_uri=study_uri, trials=trials)
    except StoreDown as refusal:
        print(refusal, flush=True)
        sys.exit(LEFT)
    print(f"{name}: {dict(outcome.counts)}, {outcome.ended}, {outcome.unshown} not shown", flush=True)
    sys.exit(LEFT if outcome.unshown else 0)


@dataclass
class Search:
    """One search under fire, and its driver."""

    folder: Path
    name: str
    overrides: tuple[str, ...]
    store: str
    early: float = 0.1
    """How likely a driver may be killed that has moved nothing yet."""
    driver: Any = None
    drivers: int = 0
    _seen: tuple[int, int] = (-1, 0)
    """Progress at the last look, and workers killed since it last rose."""
    _at_start: int = 0
    killed: Counter[str] = field(default_factory=Counter)

    def begin(self) -> None:
        """Start a driver."""
        self._at_start = self.ends()
        self.drivers += 1
        arguments = (self.folder, self.name, self.overrides, self.store, "fake_trials:made_up")
        self.driver = FORKS.Process(target=drive, args=arguments, daemon=True)
        self.driver.start()

    def ends(self) -> int:
        """How many trials have ended, and how many ends are shown, as the study has it: what is made of progress."""
        study = self.folder / f"{self.name}.db"
        if not study.exists():
            return 0
        with closing(sqlite3.connect(study, timeout=30)) as connection:
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'trial_user_attributes'").fetchone():
                return 0
            query = (
                "SELECT (SELECT count(*) FROM trial_user_attributes WHERE key = 'assay.result') + "
                "(SELECT count(*) FROM trials WHERE state != 'RUNNING')"
            )
            return int(connection.execute(query).fetchone()[0])

    def victim(self, kind: str, rng: random.Random) -> int | None:
        """The process to kill; None when there is none now, or when it would bring the search to a halt."""
        ends, killed = self.ends(), self._seen[1]
        self._seen = (ends, killed if ends == self._seen[0] else 0)
        if kind == "driver":
            # A driver may die before it did anything, but not always.
            return self.driver.pid if ends > self._at_start or rng.random() < self.early else None
        if self._seen[1] >= MOST_WITHOUT_END:
            return None
        workers = [pid for pid, words in below(self.driver.pid) if "runners.worker" in words or "ray::_Seat" in words]
        return rng.choice(workers) if workers else None

    def kill(self, kind: str, pid: int) -> bool:
        """Kill it; False when it had just ended by itself."""
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.killed[kind] += 1
        if kind == "driver":
            self.driver.join()
            self.begin()
        else:
            self._seen = (self._seen[0], self._seen[1] + 1)
        return True


def below(pid: int) -> list[tuple[int, str]]:
    """Every process below one, with its command line."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            if entry.name.isdigit():
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, words = {pid}, []
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    for each in sorted(found - {pid}):
        with suppress(FileNotFoundError, ProcessLookupError):
            words.append((each, Path(f"/proc/{each}/cmdline").read_text().replace("\0", " ")))
    return words
