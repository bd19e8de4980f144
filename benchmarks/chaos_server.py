"""MLflow's own server over a SQLite file, which comes back each time it is killed."""

import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

from runners.connecting import StoreError, connect
from runners.dashboard import DashboardError, start
from search_space.places import locate


class Server:
    """A tracking server that is started again each time it has been killed."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        self.uri = f"http://127.0.0.1:{self._port}"
        self._place = locate(f"sqlite:///{folder}/mlflow.db")
        self._log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._start)
        self.started = 0
        connect(self._place)
        self.revive()
        self.wait()

    @property
    def is_up(self) -> bool:
        """True when it can be killed."""
        return not self._thread.is_alive() and self._process is not None

    def revive(self) -> None:
        """Start it in the background."""
        self._thread = threading.Thread(target=self._start, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when it answers."""
        self._thread.join()
        assert self._process is not None, f"the tracking server does not start; see {self._log}"

    def kill(self) -> None:
        """Kill it with its workers, and have it started again."""
        self.end()
        self.revive()

    def end(self) -> None:
        """Kill it for good, once it has started."""
        self._thread.join()
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _start(self) -> None:
        for _ in range(10):
            try:
                self._process = start(self._place, self._port, self._log)
                self.started += 1
                return
            except (StoreError, DashboardError):
                time.sleep(1.0)  # The port of the one that was killed is not free yet.
