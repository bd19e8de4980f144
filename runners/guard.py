"""Measuring models in a process of its own: one that crashes, hangs or takes all memory takes no driver along.

The size of a model is measured there first where it has blocks of the user's own, its speed always and only there.

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
from collections.abc import Callable, Mapping
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
from search_space.records import TrialSpec, spec_from_plain, to_plain

MEASURE_SECONDS = 60.0
"""How long one point may take to be sized, and one pass of a model that is timed."""
START_SECONDS = 300.0
_SIGN_OF_LIFE = b"."
Point = Mapping[str, Scalar]


class Guard:
    """Measures in a child process, which is started when there is something to measure."""

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

    def figures(self, spec: TrialSpec) -> dict[str, float]:
        """How fast the spec's model is, as runners.stopwatch measures it; whatever blocks it has, it runs in the child.

        InfeasibleArchitecture where it cannot be run, or where the process that runs it crashes, ends or hangs.
        """
        answer = self._ask({"spec": to_plain(spec)})
        if isinstance(answer, str):
            mine = "" if not self._mine else f", or correct the module ({', '.join(self._experiment.blocks)})"
            raise InfeasibleArchitecture(
                f"limits: the model cannot be timed on {spec.device} ({answer}); shrink it{mine}"
            )
        return answer

    def _try(self, point: Point, shape: TaskShape) -> str:
        answer = self._ask({"point": dict(point), "shape": dataclasses.asdict(shape)})
        return answer if isinstance(answer, str) else ""

    def _ask(self, question: Mapping[str, Any]) -> dict[str, float] | str:
        """The child's answer, or what went wrong; a child that broke is replaced by the next question."""
        if self._child is None:
            self._child = _Child(self._experiment)
        try:
            return self._child.ask(question)
        except _Broken as fault:
            self.close()
            return str(fault)


class _Broken(Exception):
    """What became of a child, in words."""


class _Child:
    """One child process."""

    def __init__(self, experiment: Experiment) -> None:
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
        self._channel.sendall(encode({"path": sys.path, "experiment": experiment.plain()}))
        self._begun = False

    def ask(self, question: Mapping[str, Any]) -> dict[str, float] | str:
        """What the child answers: figures, or why there are none."""
        try:
            self._channel.sendall(encode(dict(question)))
        except (BrokenPipeError, ConnectionResetError):
            raise self._death() from None
        limit = MEASURE_SECONDS if self._begun else START_SECONDS + MEASURE_SECONDS
        end, line = time.monotonic() + limit, b""
        while (left := end - time.monotonic()) > 0 and select.select([self._channel], [], [], left)[0]:
            word = self._channel.recv(1 << 16)
            if not word:
                raise self._death()
            line += word
            if line.endswith(b"\n"):
                answer: dict[str, float] | str = json.loads(line.lstrip(_SIGN_OF_LIFE))
                return answer
            self._begun, end = True, time.monotonic() + MEASURE_SECONDS
        raise _Broken(f"measuring the model took more than {MEASURE_SECONDS:g} s and was ended")

    def end(self) -> None:
        """End it, whatever it does."""
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()
        self._channel.close()
        self._log.close()

    def _death(self) -> _Broken:
        death = reap(self._process)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        last = f": {lines[-1]}" if lines else ""
        return _Broken(f"measuring the model ended the process by {death.how}{last}")


def main(descriptor: int) -> None:
    """Answer until the driver closes the socket or dies: a dot at each sign of life, then a line of JSON."""
    die_with(os.getppid())
    channel = socket.socket(fileno=descriptor)
    with channel.makefile("rb") as lines:
        given: dict[str, Any] = json.loads(next(lines))
        sys.path.extend(path for path in given["path"] if path not in sys.path)
        experiment = from_plain(given["experiment"], full_space, TASKS)
        for line in lines:
            channel.sendall(_SIGN_OF_LIFE)
            answer = _answered(json.loads(line), experiment, lambda: channel.sendall(_SIGN_OF_LIFE))
            channel.sendall(json.dumps(answer).encode() + b"\n")


def _answered(question: Mapping[str, Any], experiment: Experiment, tick: Callable[[], None]) -> dict[str, float] | str:
    """Figures, or why there are none; what speaks against a point, which has none, the driver finds out by itself."""
    if "point" in question:
        with suppress(InfeasibleArchitecture):
            resolve(question["point"], experiment, TaskShape(**question["shape"]))
        return {}
    from runners.stopwatch import measured

    try:
        return dataclasses.asdict(measured(spec_from_plain(question["spec"]), tick))
    except (RuntimeError, InfeasibleArchitecture) as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


if __name__ == "__main__":
    main(int(sys.argv[1]))
