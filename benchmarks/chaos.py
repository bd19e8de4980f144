"""Kills drivers, workers and a tracking server at random while searches run, and checks that nothing came of it.

Trials are made up (fake_trials), all else is real: drivers and workers are processes, the server is MLflow's own over
SQLite, and every kill is a SIGKILL. Each search is compared with one of the same seed that nobody disturbed. Drivers
are forked from a process that has imported what they need, so that a new one starts within a second.

    python benchmarks/chaos.py --kills 1000 --engine local --minutes 40

A call begins no further search after so many minutes. The same command goes on where the last one stopped, and adds up
all kills and checks in the file `--state` names; `--anew` forgets them. The last line is the verdict. The exit status
is 0 when all kills are done, 3 when the same command has more to do, 1 when a check failed; the folder with all logs
is kept then.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from chaos_checks import Comparison, Found, checked, shown_by
from chaos_search import FORKS, LEFT, Search
from chaos_server import Server
from chaos_state import State
from fake_trials import SECONDS

PRELOADED = [
    "runners.search",
    "runners.tracking",
    "runners.samplers",
    "mlflow.tracking",
    "torch._dynamo",
    "chaos_search",
]
"""torch._dynamo is what torch imports when a model is first measured without memory; it takes a driver a second."""
WEIGHTS = {"worker": 16, "driver": 4, "server": 1}
"""How likely each is to be the next victim, where it can be."""
DRIVER_SECONDS = 180.0
"""A driver that nobody kills and that ends no trial for so long hangs."""
MORE = 3
"""Exit code of a call that ended before all kills were done."""


class Fault(Exception):
    """What a search must not do while it is disturbed."""


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
        if time.monotonic() - moved > DRIVER_SECONDS:
            raise Fault(f"{search.name} hangs after {last} ends")
        if search.driver.exitcode is not None:
            if search.driver.exitcode not in (0, LEFT):
                raise Fault(f"{search.name}: a driver ended with {search.driver.exitcode}")
            if search.driver.exitcode:
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


def asked_for() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    parser.add_argument("--seed", type=int, help="of victims, moments and searches; drawn where none is given")
    parser.add_argument("--trials", type=int, help="of each search; 80 where none are given")
    parser.add_argument("--pause", type=float, default=0.25, help="mean seconds between two kills")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no further search after so long")
    parser.add_argument("--state", type=Path, help="file that adds up the calls; mlruns/chaos-ENGINE.json by default")
    parser.add_argument("--anew", action="store_true", help="forget earlier calls")
    parser.add_argument("--verbose", action="store_true", help="tell of each kill")
    asked = parser.parse_args()
    asked.state = asked.state or Path("mlruns") / f"chaos-{asked.engine}.json"
    return asked


def begun(asked: argparse.Namespace) -> State:
    """The run so far; one that was begun with other choices is refused."""
    if asked.anew or not asked.state.exists():
        seed = time.time_ns() % 10**9 if asked.seed is None else asked.seed
        return State(engine=asked.engine, seed=seed, trials=asked.trials or 80)
    state = State.read(asked.state)
    for name in ("engine", "seed", "trials"):
        given, kept = getattr(asked, name), getattr(state, name)
        if given is not None and given != kept:
            sys.exit(f"{asked.state} was begun with --{name} {kept}, this is {given}; add --anew, or name another file")
    return state


def main() -> int:
    """Kill until enough was killed; print what was done and what was found."""
    asked = asked_for()
    state = begun(asked)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    FORKS.set_forkserver_preload([*PRELOADED, *(["runners.ray_engine"] if asked.engine == "ray" else [])])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[SECONDS] = "0.05"
    print(f"{state.kills.total()} of {asked.kills} kills are done; --seed {state.seed}, {asked.state}", flush=True)
    if state.kills.total() < asked.kills and not state.found.faults:
        state.calls += 1
        disturbed(asked, state)
    print(*state.found.faults, sep="\n", end="\n" if state.found.faults else "")
    print(state.verdict(asked.kills))
    if state.found.faults:
        return 1
    return 0 if state.kills.total() >= asked.kills else MORE


def disturbed(asked: argparse.Namespace, state: State) -> None:
    """Disturb and check searches until enough was killed, time is up or a check fails; the file is kept up."""
    began, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="assay-chaos-"))

    def tell(text: str) -> None:
        if asked.verbose:
            print(f"{time.monotonic() - began:7.1f} s: {text}", flush=True)

    # A driver of Ray takes ten times as long to begin as one that is forked alone.
    early = 0.01 if asked.engine == "ray" else 0.1
    server = Server(folder)
    tell("the server answers")
    try:
        while (
            state.kills.total() < asked.kills
            and time.monotonic() - began < 60 * asked.minutes
            and not state.found.faults
        ):
            number, since = len(state.pieces), time.monotonic()
            overrides = variants(number, state.seed, state.trials, asked.engine)
            search = Search(folder=folder, name=f"chaos-{number}", overrides=overrides, store=server.uri, early=early)
            rng, left = random.Random(f"{state.seed}/{number}"), asked.kills - state.kills.total()
            try:
                disturb(search, server, rng, left, asked.pause, tell)
                comparison = Comparison(folder=folder, name=search.name, overrides=overrides, shown=shown_by(folder))
                found = checked(comparison, FORKS)
            except Fault as fault:
                found = Found(faults=[str(fault)])
            state.add(search.killed, search.drivers, time.monotonic() - since, found)
            state.write(asked.state)
            print(f"{time.monotonic() - began:5.0f} s: {search.name}: {dict(search.killed)}; {found}", flush=True)
    finally:
        server.end()
    if state.found.faults:
        print(f"kept: {folder}")
    else:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
