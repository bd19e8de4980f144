"""Measures how long a large search takes to load, cold and warm, from SQLite and from a server, and to report on.

Writes a store of `--trials` trials with 20 parameters, 5 metrics and curves of `--readings` readings each, as a search
leaves it (benchmarks/large_store.py). Each time is that of a fresh process, its imports included; beside it stand the
processor seconds of that process, which other load on the machine hardly changes. `--no-server` and `--no-report` leave
parts out. The exit code is 1 when a figure is missed.
"""

import argparse
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from large_store import NAME, PARAMETERS, write_store
from mlflow.tracking import MlflowClient

from analysis import webread
from analysis.fastread import StoreError
from search_space.batches import newest
from search_space.records import Metric, Stage, Status, Tag

SETTLED_SECONDS = 2.5
COLD, WARM, REPORT = 20.0, 2.0, 15.0
"""Seconds allowed for 10,000 trials."""
PAGE_BYTES = 5_000_000
_LOAD = "from analysis import load; print(len(load.load_search({uri!r}, {name!r}).trials))"
_REPORT = "from runners.cli import main; main(['report', {name!r}, '--tracking-uri', {uri!r}, '--out', {out!r}])"


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What a fresh process took."""

    seconds: float
    cpu_seconds: float
    said: str


def take(code: str, cache: Path) -> Taken:
    """Run a piece of code in a fresh process."""
    environment = {**os.environ, "ASSAY_CACHE": str(cache), "MLFLOW_DISABLE_TELEMETRY": "true"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment, stdout=subprocess.PIPE, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Taken(seconds=time.perf_counter() - start, cpu_seconds=cpu, said=done.stdout)


def load(uri: str, cache: Path, trials: int) -> Taken:
    """Load the search in a fresh process, and see that it is whole."""
    taken = take(_LOAD.format(uri=uri, name=NAME), cache)
    assert int(taken.said) == trials, f"{trials} trials were written, {taken.said.strip()} were read"
    return taken


def serve(uri: str, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A tracking server before the store, and its address, once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "2", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", uri, "--serve-artifacts"]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        try:
            webread.experiments(f"http://127.0.0.1:{port}")
            return server, f"http://127.0.0.1:{port}"
        except StoreError:
            time.sleep(0.2)
    raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")


def add_trial(uri: str, number: int) -> None:
    """One more trial that has ended, as a driver writes it."""
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(NAME).experiment_id
    (parent,) = client.search_runs([experiment], f"tags.`{Tag.KIND}` = 'search'")
    client.set_tag(parent.info.run_id, Tag.BATCH, str(newest(parent.data.tags)[""] + 1))
    tags = {
        Tag.KIND: "trial",
        Tag.NUMBER: str(number),
        Tag.STAGE: str(Stage.SEARCH),
        Tag.STATUS: str(Status.OK),
        Tag.BATCH: str(newest(parent.data.tags)[""] + 1),
    }
    run = client.create_run(experiment, tags=tags, run_name=f"{number:05d}").info.run_id
    client.log_metric(run, Metric.LOSS, 2.0)
    client.set_terminated(run)


def measure(root: Path, uri: str, trials: int, *, server: bool, report: bool) -> dict[str, Taken]:
    """What each part took, by name."""
    # A search that ended a moment ago is not kept: its file may be written again within a tick of the clock.
    time.sleep(SETTLED_SECONDS)
    cache = root / "cache"
    found = {"cold, SQLite": load(uri, cache, trials), "warm, SQLite": load(uri, cache, trials)}
    if report:
        found["report"] = take(_REPORT.format(uri=uri, name=NAME, out=str(root / "report")), cache)
    if server:
        process, address = serve(uri, root / "server.log")
        try:
            found["cold, server"] = load(address, cache, trials)
            found["warm, server"] = load(address, cache, trials)
            add_trial(address, trials)
            found["warm, server, one more trial"] = load(address, cache, trials + 1)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=30)
    return found


def allowed(name: str) -> float:
    """Seconds allowed for a part."""
    return {"cold": COLD, "warm": WARM, "report": REPORT}[name.split(",")[0]]


def main() -> None:
    """Write, load, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--readings", type=int, default=20)
    parser.add_argument("--no-server", action="store_true")
    parser.add_argument("--no-report", action="store_true")
    parser.add_argument("--no-tables", action="store_true", help="as an older search left it: every run is read")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="assay-loading-"))
    try:
        uri = write_store(root, arguments.trials, arguments.readings, tables=not arguments.no_tables)
        parts = {"server": not arguments.no_server, "report": not arguments.no_report}
        found = measure(root, uri, arguments.trials, **parts)
        page = root / "report" / "report.html"
        size = page.stat().st_size if page.exists() else 0
    finally:
        shutil.rmtree(root)
    print(f"{arguments.trials:,} trials x {PARAMETERS} parameters x 5 metrics, {arguments.readings} readings each")
    missed = size > PAGE_BYTES
    for name, taken in found.items():
        is_missed = taken.seconds > allowed(name)
        missed |= is_missed
        verdict = "MISS" if is_missed else "pass"
        print(f"{verdict}  {name}: {taken.seconds:.1f} s of {allowed(name):.0f} s ({taken.cpu_seconds:.1f} s of CPU)")
    if size:
        print(f"{'MISS' if size > PAGE_BYTES else 'pass'}  the page: {size / 1e6:.1f} MB of {PAGE_BYTES / 1e6:.0f} MB")
    sys.exit(missed)


if __name__ == "__main__":
    main()
