"""A PostgreSQL server of our own on loopback, and the processor time that it took."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that runs."""

    uri: str
    """Without a database."""
    pid: int

    def recreate(self, *names: str) -> None:
        """Make databases, empty."""
        for name in names:
            for command in (f"DROP DATABASE IF EXISTS {name}", f"CREATE DATABASE {name}"):
                subprocess.run(["psql", "-q", f"{self.uri}/postgres", "-c", command], check=True)

    def cpu_seconds(self) -> float:
        """Of all its processes, those that ended included."""
        ticks = _ticks(self.pid) + sum(_ticks(int(child)) for child in _children(self.pid))
        return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def postgres() -> Iterator[Server | None]:
    """A server in a temporary folder; None where PostgreSQL is not installed."""
    binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    found = shutil.which("initdb") or (str(binaries[-1]) if binaries else None)
    if found is None:
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="assay-postgres-"))
    prefix = []
    if os.geteuid() == 0:  # It refuses to run as root.
        prefix = ["runuser", "-u", "postgres", "--"]
        shutil.chown(folder, "postgres")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])

    def run(command: str, *arguments: str) -> None:
        whole = [*prefix, str(Path(found).parent / command), "-D", str(folder / "data"), *arguments]
        subprocess.run(whole, check=True, stdout=subprocess.DEVNULL, cwd=folder)

    options = f"-p {port} -c listen_addresses=127.0.0.1 -k {folder}"
    try:
        run("initdb", "-A", "trust", "-U", "postgres")
        run("pg_ctl", "-o", options, "-l", str(folder / "log"), "-w", "start")
        try:
            pid = int((folder / "data" / "postmaster.pid").read_text().split()[0])
            yield Server(uri=f"postgresql://postgres@127.0.0.1:{port}", pid=pid)
        finally:
            run("pg_ctl", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _ticks(pid: int) -> int:
    """Of a process and of its children that ended; none for one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11:15]))
