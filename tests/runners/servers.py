"""Real servers on loopback for tests: PostgreSQL, and MLflow's own over a SQLite store."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tracked import free_port, store_uri

from runners.dashboard import start, stop
from search_space.places import Place, locate


@contextmanager
def postgres() -> Iterator[str]:
    """The URI of a PostgreSQL server of our own; it refuses to run as root."""
    binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    found = shutil.which("initdb") or (str(binaries[-1]) if binaries else None)
    if found is None:
        pytest.skip("needs PostgreSQL's initdb; on Debian: apt-get install postgresql")
    # Not under tmp_path: the account that runs the server may not enter pytest's folders.
    folder, port = Path(tempfile.mkdtemp(prefix="assay-postgres-")), free_port()
    prefix = []
    if os.geteuid() == 0:
        prefix = ["runuser", "-u", "postgres", "--"]
        shutil.chown(folder, "postgres")

    def run(command: str, *arguments: str) -> None:
        whole = [*prefix, str(Path(found).parent / command), "-D", str(folder / "data"), *arguments]
        subprocess.run(whole, check=True, stdout=subprocess.DEVNULL, cwd=folder)

    options = f"-p {port} -c listen_addresses=127.0.0.1 -k {folder}"
    try:
        run("initdb", "-A", "trust", "-U", "postgres")
        run("pg_ctl", "-o", options, "-l", str(folder / "log"), "-w", "start")
        try:
            yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


class TrackingServer:
    """MLflow's server over a SQLite store in a folder; it can be killed and started again at its address."""

    def __init__(self, folder: Path) -> None:
        self.place: Place = locate(store_uri(folder))
        self._port = free_port()
        self.uri = f"http://127.0.0.1:{self._port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        self.process = start(self.place, self._port)

    def kill(self) -> None:
        """SIGKILL, for it and its workers."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """End it, if it runs."""
        if self.process is not None:
            stop(self.process)
