"""Two machines on one: network namespaces with addresses of their own, joined by one cable."""

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Self

HEAD, OTHER = "10.77.0.1", "10.77.0.2"
PORT = 6379
QUICK = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""Has Ray notice within seconds that a machine is gone."""


def available() -> bool:
    """True where this user may make network namespaces."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    name = f"assay-{uuid.uuid4().hex[:6]}"
    if subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode:
        return False
    _ip("netns", "delete", name)
    return True


class TwoMachines:
    """A Ray cluster with a head and one other machine, which does not see the hidden folder."""

    def __init__(self, hidden: Path, log: Path) -> None:
        tag = uuid.uuid4().hex[:6]
        self.names = (f"assay-{tag}-a", f"assay-{tag}-b")
        self._cable = (f"as{tag}a", f"as{tag}b")
        self._hidden = hidden
        self._log = log
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.callback(self.__exit__)
            for name in self.names:
                _ip("netns", "add", name)
            _ip("link", "add", self._cable[0], "type", "veth", "peer", "name", self._cable[1])
            for name, end, address in zip(self.names, self._cable, (HEAD, OTHER), strict=True):
                _ip("link", "set", end, "netns", name)
                _ip("-n", name, "address", "add", f"{address}/24", "dev", end)
                _ip("-n", name, "link", "set", end, "up")
                _ip("-n", name, "link", "set", "lo", "up")
            start = [
                str(Path(sys.executable).with_name("ray")),
                "start",
                "--block",
                "--num-cpus=1",
                "--object-store-memory=80000000",
                "--disable-usage-stats",
            ]
            config = f"--system-config={json.dumps(QUICK)}"
            head = ["--head", f"--node-ip-address={HEAD}", f"--port={PORT}", "--include-dashboard=false", config]
            self._start(self.inside(0, *start, *head))
            joined = " ".join([*start, f"--address={HEAD}:{PORT}", f"--node-ip-address={OTHER}"])
            hide = f"mount -t tmpfs none '{self._hidden}' && exec {joined}"
            self._start(self.inside(1, "unshare", "--mount", "sh", "-c", hide))
            undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def inside(self, machine: int, *command: str) -> list[str]:
        """The command line that runs a command on a machine."""
        return ["ip", "netns", "exec", self.names[machine], *command]

    def pull_the_cable(self) -> None:
        """From now on neither machine hears of the other."""
        _ip("-n", self.names[1], "link", "set", self._cable[1], "down")

    def _start(self, command: list[str]) -> None:
        environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
        with self._log.open("ab") as output:
            self._processes.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
        end = time.monotonic() + 60
        started = len(self._processes)
        while self._log.read_bytes().count(b"Ray runtime started") < started:
            assert time.monotonic() < end, self._log.read_text()
            time.sleep(0.1)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
