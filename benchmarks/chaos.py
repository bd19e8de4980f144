"""Kills drivers, workers and a tracking server at random while searches run, and checks that nothing came of it.

Trials are made up (fake_trials), all else is real: drivers and workers are processes, the server is MLflow's own over
SQLite, and every kill is a SIGKILL. Each search is compared with one of the same seed that nobody disturbed. Drivers
are forked from a process that has imported what they need, so that a new one starts within a second.

    python benchmarks/chaos.py --kills 1000 --engine local

The exit status is 1 when a check fails; the folder with all logs is kept then.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_checks import TEXT, Comparison, Found, checked, shown_by
from chaos_server import Server
from fake_trials import SECONDS

from runners.connecting import StoreDown

FORKS = multiprocessing.get_context("forkserver")
PRELOADED = ["runners.search", "runners.tracking", "runners.samplers", "mlflow.tracking", "chaos_checks"]
WEIGHTS = {"worker": 16, "driver": 4, "server": 1}
"""How likely each is to be the next victim, where it can be."""
MOST_WITHOUT_END = 2
"""Workers killed since a trial last ended: three in a row that cannot start end a driver, and five deaths of one trial
fail it, as they should."""
LEFT = 3
"""Exit code of a driver that leaves ends which the store does not show, or that the server lets begin nothing."""
DRIVER_SECONDS = 180.0
"""A driver that nobody kills and that ends no trial for so long hangs."""


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


def disturb(
    search: Search, server: Server, rng: random.Random, kills: int, pause: float, tell: Callable[[str], None]
) -> None:
    """Run the search to its end under at most so many kills."""
    search.begin()
    last, moved, served = search.ends(), time.monotonic(), 0
    while search.driver.exitcode != 0:
        search.driver.join(rng.expovariate(1 / pause))
        if search.ends() != last:
            last, moved = search.ends(), time.monotonic()
        assert time.monotonic() - moved < DRIVER_SECONDS, f"{search.name} hangs after {last} ends"
        if search.driver.exitcode is not None:
            if search.driver.exitcode:
                assert search.driver.exitcode == LEFT, f"{search.name}: a driver ended with {search.driver.exitcode}"
                tell(f"{search.name}: a driver ended while the server was down")
                server.wait()
                search.begin()
            continue
        if search.killed.total() >= kills:
            continue
        kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if kind == "server":
            if server.is_up and last > served:
                server.kill()
                served = last
                search.killed["server"] += 1
                tell(f"{search.name}: server")
            continue
        pid = search.victim(kind, rng)
        if pid is not None and search.kill(kind, pid):
            moved = time.monotonic()
            tell(f"{search.name}: {kind} {pid} at {last}")


def variants(number: int, seed: int, trials: int, engine: str) -> tuple[str, ...]:
    """What the searches differ in: samplers, pruners, finals, and one in four runs three trials at a time."""
    samplers, pruners = ("tpe", "evolution", "random"), ("asha", "hyperband")
    asked = (
        f"search.trials={trials}",
        f"search.seed={seed + number}",
        f"search.sampler={samplers[number % 3]}",
        "search.population=6",
        f"search.pruner={{{pruners[number % 2]}: {{grace_tokens: 256, factor: 2}}}}",
        f"engine.kind={engine}",
        f"engine.jobs={3 if number % 4 == 3 else 1}",
    )
    return (*asked, "final={seeds: 2, contrasts: {seed_alone: {}}}") if number % 2 else asked


def main() -> int:
    """Kill until enough was killed; print what was done and what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9, help="of victims, moments and searches")
    parser.add_argument("--trials", type=int, default=80, help="of each search")
    parser.add_argument("--pause", type=float, default=0.25, help="mean seconds between two kills")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no further search after so long")
    parser.add_argument("--verbose", action="store_true", help="tell of each kill")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    FORKS.set_forkserver_preload([*PRELOADED, *(["runners.ray_engine"] if asked.engine == "ray" else [])])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[SECONDS] = "0.05"
    print(f"to repeat the choices: --seed {asked.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="assay-chaos-"))
    rng, began, total, found = random.Random(asked.seed), time.monotonic(), Counter[str](), Found()

    def tell(text: str) -> None:
        if asked.verbose:
            print(f"{time.monotonic() - began:7.1f} s: {text}", flush=True)

    # A driver of Ray takes ten times as long to begin as one that is forked alone.
    early = 0.01 if asked.engine == "ray" else 0.1
    server = Server(folder)
    tell("the server answers")
    number = drivers = 0
    try:
        while total.total() < asked.kills and time.monotonic() - began < 60 * asked.minutes:
            overrides = variants(number, asked.seed, asked.trials, asked.engine)
            search = Search(folder=folder, name=f"chaos-{number}", overrides=overrides, store=server.uri, early=early)
            disturb(search, server, rng, asked.kills - total.total(), asked.pause, tell)
            total += search.killed
            drivers += search.drivers
            comparison = Comparison(folder=folder, name=search.name, overrides=overrides, shown=shown_by(folder))
            found += checked(comparison, FORKS)
            number += 1
            print(f"{time.monotonic() - began:5.0f} s: {search.name}: {dict(search.killed)}; {found}", flush=True)
    finally:
        server.end()
    print(
        f"chaos, engine {asked.engine}: {total.total()} SIGKILLs ({total['worker']} workers, {total['driver']} "
        f"drivers, {total['server']} tracking servers) over {number} searches in {time.monotonic() - began:.0f} s; "
        f"{drivers} drivers and {server.started} servers were started; {found}"
    )
    if found.faults:
        print(f"kept: {folder}", *found.faults, sep="\n")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
