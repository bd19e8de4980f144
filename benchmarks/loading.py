"""Measures how long a large search takes to load, cold and warm, from SQLite and from a server, and to report on.

Writes a store of `--trials` trials with 20 parameters, 5 metrics and curves of `--readings` readings each, into
the tables that a tracking store makes. Each time is that of a fresh process, its imports included; `--no-server` and
`--no-report` leave parts out.
"""

import argparse
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet

from analysis import webread
from analysis.fastread import StoreError
from search_space.records import Artifact, Metric, Stage, Status, Tag

PARAMETERS = 20
SHARD = 64
SETTLED_SECONDS = 2.5
NAME = "large"
COLD, WARM, REPORT = 20.0, 2.0, 15.0
"""Seconds allowed for 10,000 trials."""


def write_store(root: Path, trials: int, readings: int) -> str:
    """Make a store that holds one search of so many trials; its URI."""
    from mlflow.tracking import MlflowClient

    root.mkdir(parents=True, exist_ok=True)
    uri = f"sqlite:///{root}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.create_experiment(NAME, artifact_location=(root / "artifacts").as_uri())
    tags = {Tag.KIND: "search", Tag.SEARCH: NAME, Tag.UNIT: "byte"}
    parent = client.create_run(experiment, run_name=NAME, tags=tags)
    client.set_terminated(parent.info.run_id)
    rng = np.random.default_rng(0)
    options = rng.integers(0, 3, (trials, PARAMETERS))
    rates = np.exp(rng.uniform(np.log(1e-4), np.log(1e-1), trials))
    worth = rng.normal(0, 0.02, (PARAMETERS, 3))
    losses = 2 + worth[np.arange(PARAMETERS), options].sum(axis=1) + 0.01 * np.log2(rates / 3e-3) ** 2
    losses += 0.01 * rng.standard_normal(trials)
    bad = (options[:, 0] == 2) & (rates > 2e-2)
    ids = [f"{number:032x}" for number in range(trials)]
    with closing(sqlite3.connect(root / "mlflow.db")) as database, database:
        database.executemany(
            "INSERT INTO runs (run_uuid, name, user_id, status, start_time, end_time, lifecycle_stage,"
            " artifact_uri, experiment_id) VALUES (?, ?, 'u', 'FINISHED', ?, ?, 'active', ?, ?)",
            [
                (
                    run,
                    f"{number:05d}",
                    10 * number,
                    10 * number + 9,
                    f"{root}/artifacts/{run}/artifacts",
                    int(experiment),
                )
                for number, run in enumerate(ids)
            ],
        )
        rows = []
        for number, run in enumerate(ids):
            status = Status.DIVERGED if bad[number] else Status.OK
            told = {
                Tag.KIND: "trial",
                Tag.SEARCH: NAME,
                Tag.KEY: f"{NAME}/0/search/{number}",
                Tag.NUMBER: str(number),
                Tag.GENERATION: "0",
                Tag.STAGE: str(Stage.SEARCH),
                Tag.STATUS: str(status),
                Tag.SPEC: run[-12:],
                Tag.ARCH: run[-12:],
                "mlflow.parentRunId": parent.info.run_id,
            }
            rows += [(key, value, run) for key, value in told.items()]
        database.executemany("INSERT INTO tags (key, value, run_uuid) VALUES (?, ?, ?)", rows)
        database.executemany(
            "INSERT INTO params (key, value, run_uuid) VALUES (?, ?, ?)",
            [
                (f"model.p{place}", f"option{options[number, place]}", run)
                for number, run in enumerate(ids)
                for place in range(PARAMETERS - 1)
            ]
            + [("optimizer.adamw.learning_rate", repr(float(rates[number])), run) for number, run in enumerate(ids)],
        )
        database.executemany(
            "INSERT INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid) VALUES (?, ?, 0, 0, 0, ?)",
            [
                (key, value, run)
                for number, run in enumerate(ids)
                for key, value in (
                    (Metric.LOSS, losses[number]),
                    (Metric.PARAMS, 250_000.0 + number),
                    (Metric.FLOPS, 5e5 + number),
                    (Metric.TOKENS, 1024.0 * readings),
                    (Metric.TOKENS_PER_SECOND, 5e4 + number),
                )
                if not (bad[number] and key == Metric.LOSS)
            ],
        )
    steps = 1024 * np.arange(1, readings + 1)
    folder = root / "artifacts" / parent.info.run_id / "artifacts" / Artifact.CURVES
    folder.mkdir(parents=True)
    for first in range(0, trials, SHARD):
        chosen = np.arange(first, min(first + SHARD, trials))
        drop = 1.4 * ((steps / 1024.0) ** -0.6 - readings**-0.6)
        held = losses[chosen][:, None] + drop + 0.002 * rng.standard_normal((len(chosen), readings))
        table = {
            "run": np.repeat([ids[number] for number in chosen], readings),
            "number": np.repeat(chosen, readings),
            "stage": np.repeat(str(Stage.SEARCH), len(chosen) * readings),
            "tokens": np.tile(steps, len(chosen)),
            "loss": held.ravel(),
            "train_loss": held.ravel() - 0.02,
            "seconds": np.tile(steps / 5e4, len(chosen)),
        }
        parquet.write_table(arrow.table(table), folder / f"{first // SHARD:05d}.parquet")
    return uri


def seconds(uri: str, cache: Path, what: str, folder: Path) -> float:
    """Wall seconds of a fresh process that loads the search, or reports on it."""
    code = {
        "load": f"from analysis import load; print(len(load.load_search({uri!r}, {NAME!r}).trials))",
        "report": f"from pathlib import Path; from analysis.report import write_report;"
        f"write_report({uri!r}, {NAME!r}, Path({str(folder)!r}))",
    }[what]
    start = time.perf_counter()
    environment = {**os.environ, "ASSAY_CACHE": str(cache), "MLFLOW_DISABLE_TELEMETRY": "true"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


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


def measure(root: Path, uri: str, *, server: bool, report: bool) -> dict[str, float]:
    """Seconds of each part, by name."""
    # A search that ended a moment ago is not kept: its file may be written again within a tick of the clock.
    time.sleep(SETTLED_SECONDS)
    found = {
        "cold, SQLite": seconds(uri, root / "cache", "load", root),
        "warm, SQLite": seconds(uri, root / "cache", "load", root),
    }
    if report:
        found["report"] = seconds(uri, root / "cache", "report", root / "report")
    if server:
        process, address = serve(uri, root / "server.log")
        try:
            found["cold, server"] = seconds(address, root / "cache", "load", root)
            found["warm, server"] = seconds(address, root / "cache", "load", root)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=30)
    return found


def main() -> None:
    """Write, load, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--readings", type=int, default=20)
    parser.add_argument("--no-server", action="store_true")
    parser.add_argument("--no-report", action="store_true")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="assay-loading-"))
    try:
        uri = write_store(root, arguments.trials, arguments.readings)
        found = measure(root, uri, server=not arguments.no_server, report=not arguments.no_report)
    finally:
        shutil.rmtree(root)
    allowed = {"cold": COLD, "warm": WARM, "report": REPORT}
    print(f"{arguments.trials:,} trials x {PARAMETERS} parameters x 5 metrics, {arguments.readings} readings each")
    for name, taken in found.items():
        print(f"{name}: {taken:.1f} s (allowed {allowed[name.split(',')[0]]:.0f} s)")


if __name__ == "__main__":
    main()
