"""Measuring the user's own blocks in a process of their own first: one that crashes or hangs takes no driver along.

Started as `python -m runners.guard N` with the number of the socket's file descriptor.
"""

import dataclasses
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from blocks.families import InfeasibleArchitecture
from blocks.registry import registered_by
from runners.candidate import full_space, resolve
from runners.deaths import reap
from runners.tasks import TASKS
from runners.tasks.data import TaskShape
from runners.worker import die_with, encode
from search_space.canon import canonical_json
from search_space.domains import Scalar
from search_space.experiment import Experiment, from_plain

MEASURE_SECONDS = 60.0
"""How long one point may take to be sized and measured."""
START_SECONDS = 300.0
Point = Mapping[str, Scalar]


class Guard:
    """Tries each new setting of the user's blocks in a child process, which is started when there is one to try."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._mine = registered_by(experiment.blocks)
        self._judged: dict[str, str] = {}
        """Why each setting is refused; empty where it is not."""
        self._child: _Child | None = None

    def check(self, point: Point, shape: TaskShape) -> None:
        """InfeasibleArchitecture where a process that resolves the point crashes, ends or hangs."""
        settings = self._settings(point)
        if not settings:
            return
        key = canonical_json(settings)
        if key not in self._judged:
            self._judged[key] = self._try(point, shape)
        if self._judged[key]:
            said = ", ".join(f"{path}={value!r}" for path, value in settings.items())
            raise InfeasibleArchitecture(
                f"blocks {', '.join(self._experiment.blocks)}: {self._judged[key]} (with {said}); correct the module"
            )

    def close(self) -> None:
        """End the child process."""
        if self._child is not None:
            self._child.end()
        self._child = None

    def _settings(self, point: Point) -> dict[str, Scalar]:
        """What of a point the user's blocks decide on."""
        return {
            path: value
            for path, value in point.items()
            if (path.endswith(".kind") and value in self._mine) or not self._mine.isdisjoint(path.split("."))
        }

    def _try(self, point: Point, shape: TaskShape) -> str:
        if self._child is None:
            self._child = _Child(self._experiment, shape)
        fault = self._child.fault(point)
        if fault:
            self.close()
        return fault


class _Child:
    """One child process."""

    def __init__(self, experiment: Experiment, shape: TaskShape) -> None:
        self._channel, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "runners.guard", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._channel.sendall(
            encode({"path": sys.path, "experiment": experiment.plain(), "shape": dataclasses.asdict(shape)})
        )
        self._begun = False

    def fault(self, point: Point) -> str:
        """What went wrong when the child resolved the point; empty for nothing."""
        try:
            self._channel.sendall(encode({"point": dict(point)}))
        except (BrokenPipeError, ConnectionResetError):
            return self._death()
        limit = MEASURE_SECONDS if self._begun else START_SECONDS + MEASURE_SECONDS
        end = time.monotonic() + limit
        while (left := end - time.monotonic()) > 0 and select.select([self._channel], [], [], left)[0]:
            word = self._channel.recv(1)
            if not word:
                return self._death()
            if word == b"\n":
                return ""
            self._begun, end = True, time.monotonic() + MEASURE_SECONDS
        return f"measuring the model took more than {MEASURE_SECONDS:g} s and was ended"

    def end(self) -> None:
        """End it, whatever it does."""
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()
        self._channel.close()
        self._log.close()

    def _death(self) -> str:
        death = reap(self._process)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        last = f": {lines[-1]}" if lines else ""
        return f"measuring the model ended the process by {death.how}{last}"


def main(descriptor: int) -> None:
    """Resolve points until the driver closes the socket or dies; a dot when a point is begun, a line end when done."""
    die_with(os.getppid())
    channel = socket.socket(fileno=descriptor)
    with channel.makefile("rb") as lines:
        given: dict[str, Any] = json.loads(next(lines))
        sys.path.extend(path for path in given["path"] if path not in sys.path)
        experiment = from_plain(given["experiment"], full_space, TASKS)
        shape = TaskShape(**given["shape"])
        for line in lines:
            channel.sendall(b".")
            with suppress(InfeasibleArchitecture):  # The driver finds that out by itself, with words.
                resolve(json.loads(line)["point"], experiment, shape)
            channel.sendall(b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
