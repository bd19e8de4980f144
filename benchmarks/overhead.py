"""What the platform itself costs a trial: searches of trials that do nothing, with the real study and tracking store.

    python benchmarks/overhead.py [--trials 5000] [--on sqlite postgresql long] [--beside FOLDER] [--set PATH=VALUE]

One search on SQLite; one on PostgreSQL, study and store both (a server of its own, where it is installed); and one of
a few trials that sleep for ten seconds in a worker. Says of each figure that was asked for whether it is met, and exits
with 1 when one is not. `--beside` measures another checkout in turn, for a comparison on a busy machine.

Times are milliseconds a trial, of the clock and of the processors: those of the driver with all its threads, and those
of the database server. The sampler's share is choosing what it sees, drawing and vetoing. The platform's is all else
from the start of the search to its end, when the store has shown everything. Over the first and the last tenth, neither
start and end nor models that are measured for the first time count (64 in this space); the cost of one is stated apart.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from postgres_server import Server, postgres

HERE = Path(__file__).resolve().parent
PLATFORM_MS = {"sqlite": 30.0, "postgresql": 20.0}
FLAT = 1.3
SHARE = 0.02
LONG_TRIALS = 6


def measured(checkout: Path, kind: str, trials: int, server: Server | None, given: Sequence[str]) -> dict[str, float]:
    """The figures of one search, run by a checkout in a process of its own."""
    uris = [f"{server.uri}/study{os.getpid()}", f"{server.uri}/store{os.getpid()}"] if server else ["", ""]
    if server:
        server.recreate(*(uri.rpartition("/")[2] for uri in uris))
    before = server.cpu_seconds() if server else 0.0
    path = os.pathsep.join([str(checkout), str(HERE)])
    done = subprocess.run(
        [sys.executable, str(HERE / "no_op_search.py"), kind, str(trials), *uris, *given],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "server_cpu": 1e3 * (server.cpu_seconds() - before) / trials} if server else found


def told(name: str, found: dict[str, float]) -> None:
    """Print the figures of a search that does nothing."""
    print(f"{name}: {found['trials']:.0f} trials, ms a trial     all  first tenth  last tenth")
    for who in ("platform", "sampler"):
        for of, words in (("wall", "clock"), ("cpu", "driver's processor time")):
            part = [found[f"{who}_{when}{of}"] for when in ("", "first_", "last_")]
            print(f"  {who:8} {words:24} {part[0]:11.2f} {part[1]:12.2f} {part[2]:11.2f}")
    server = f"; server's processor time {found['server_cpu']:.2f}" if "server_cpu" in found else ""
    print(f"  a model measured for the first time {found['new_model_cpu']:.1f} (of {found['models']:.0f}){server}")


def verdicts(name: str, found: dict[str, float]) -> list[bool]:
    """Print whether each figure is as asked."""
    asked = [
        ("platform, ms a trial", found["platform_wall"], PLATFORM_MS[name]),
        ("platform, last tenth over first", found["platform_last_wall"] / found["platform_first_wall"], FLAT),
        ("sampler, last tenth over first", found["sampler_last_wall"] / found["sampler_first_wall"], FLAT),
    ]
    return [verdict(name, *each) for each in asked]


def verdict(name: str, what: str, value: float, most: float) -> bool:
    """Print whether a figure is below what was asked."""
    print(f"{'pass' if value < most else 'MISS'}: {name}: {what}: {value:.3g}, asked: below {most:g}", flush=True)
    return value < most


def main() -> int:
    """Measure and print; 1 when a figure is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=5000)
    parser.add_argument(
        "--on", nargs="+", choices=["sqlite", "postgresql", "long"], default=["sqlite", "postgresql", "long"]
    )
    parser.add_argument("--beside", type=Path, help="another checkout, measured first each time")
    parser.add_argument("--set", action="append", default=[], help="overrides, such as search.sampler=random")
    given = parser.parse_args()
    held: list[bool] = []
    with ExitStack() as stack:
        for name in given.on:
            server = stack.enter_context(postgres()) if name == "postgresql" else None
            if name == "postgresql" and server is None:
                print("postgresql: not measured, its server is not installed here")
                continue
            for checkout in (given.beside, HERE.parent):
                if checkout is None:
                    continue
                is_ours = checkout == HERE.parent
                if name == "long":
                    found = measured(checkout, "long", LONG_TRIALS, None, given.set)
                    print(
                        f"long, {checkout}: {LONG_TRIALS} trials of 10 s, start and end besides: "
                        f"{found['start_and_end_seconds']:.1f} s"
                    )
                    kept = [verdict(name, "between trials of 10 s, over those", found["overhead"], SHARE)]
                else:
                    found = measured(checkout, "nothing", given.trials, server, given.set)
                    told(f"{name}, {checkout}" if given.beside else name, found)
                    kept = verdicts(name, found)
                held += kept if is_ours else []
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
