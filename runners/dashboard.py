"""MLflow's own pages over a tracking store, on this machine only."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from runners.artifacts import rehome
from runners.connecting import QUIET, StoreError
from runners.rows import VIEW_KEY
from runners.store import Store
from search_space.errors import UserError
from search_space.places import Place, driver_uri, locate

HOST = "127.0.0.1"
START_SECONDS = 120.0


class DashboardError(UserError):
    """The dashboard cannot be started as asked."""


def serve(uri: str = "", port: int = 5000) -> int:
    """Show a store's dashboard until Ctrl-C; prints its address. The exit code."""
    place = locate(uri)
    if place.is_server:
        Store(place)
        print(f"The store is an MLflow server with its own dashboard: {place.uri}")
        return 0
    # A shell starts background jobs with SIGINT ignored; the server must end with this process either way.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    server = start(place, port)
    try:
        print(f"Dashboard of {place.uri}: http://{HOST}:{port} (Ctrl-C ends it)")
        for name, parent in Store(place).searches().items():
            print(f"  {name}: {table_url(f'http://{HOST}:{port}', parent.info.experiment_id)}")
        sys.stdout.flush()
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        stop(server)


def table_url(address: str, experiment_id: str) -> str:
    """Where the table of a search's runs is, best first, with what was searched as columns."""
    return f"{address}/#/experiments/{experiment_id}/runs?viewStateShareKey={VIEW_KEY}"


def start(place: Place, port: int, log: Path | None = None) -> "subprocess.Popen[bytes]":
    """An MLflow server over a store on loopback that answers already; its output goes to `log` or nowhere."""
    Store(place)
    rehome(place)
    _check_free(port)
    environment = {**os.environ, **QUIET, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", driver_uri(place.uri), "--artifacts-destination", place.artifacts.as_uri()]
    with open(log or os.devnull, "wb") as output:
        server = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _await(server, port)
    except BaseException:
        stop(server)
        raise
    return server


def stop(server: "subprocess.Popen[bytes]") -> None:
    """End a server and its workers."""
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise DashboardError(f"--port {port}: is taken on {HOST} ({error}); give another --port") from error


def _await(server: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise StoreError(f"dashboard: the MLflow server ended at once (exit code {server.returncode}); see its log")
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise StoreError(f"dashboard: the MLflow server did not answer within {START_SECONDS:g} s on port {port}")
