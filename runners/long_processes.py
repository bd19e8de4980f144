"""The processes of a long training as its driver sees them: started, listened to, stopped, and what they came to."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from runners.deaths import OutOfMemoryKills
from runners.engine import Interrupts
from runners.local_engine import THREAD_VARIABLES
from runners.long_worker import EVENTS, EXITS, STOP, end_file
from runners.worker import decode_event
from search_space.canon import digest
from search_space.records import Reading, Status, TrialResult, TrialSpec, result_from_plain, to_plain

GRACE_SECONDS = 60.0
"""How long the processes may take to end with a checkpoint once they are asked to."""
_LOOK_SECONDS = 0.2
_LAST_LINES = 25
_GO_ON = "the same command with --resume goes on"


class Processes:
    """One attempt: one process, or several under torch's launcher. Leaving the context ends them."""

    def __init__(self, folder: Path, spec: TrialSpec, data: Path, *, devices: int, strategy: str, every: int) -> None:
        """`every` is the tokens between two checkpoints."""
        self._folder, self._spec, self._devices = folder, spec, devices
        for name in (EVENTS, STOP, EXITS):
            (folder / name).unlink(missing_ok=True)
        for left in (*folder.glob("end-*"), *folder.glob("launch-*"), *folder.glob("meeting-*")):
            left.unlink()
        job = {
            "spec": to_plain(spec),
            "data": str(data),
            "folder": str(folder),
            "path": sys.path,
            "strategy": strategy,
            "checkpoint_tokens": every,
            "meeting": digest({"pid": os.getpid(), "at": time.time()}),
        }
        job_file = folder / "job.json"
        job_file.write_text(json.dumps(job))
        self._log = folder / "processes.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "runners.long_worker", str(job_file), *([str(devices)] if devices > 1 else [])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(spec.threads))},
                start_new_session=True,
            )
        self._kills = OutOfMemoryKills()
        self._killed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._kill()

    def events(self, interrupts: Interrupts) -> Iterator[dict[str, Any]]:
        """What the first process tells, or nothing now and then, until all have ended."""
        read, deadline = 0, float("inf")
        while True:
            ended = self._process.poll() is not None
            lines = self._new_lines(read)
            read += sum(map(len, lines))
            yield from map(decode_event, lines)
            if ended:
                return
            yield {}
            self._kills.note()
            if interrupts.asked and deadline == float("inf"):
                (self._folder / STOP).touch()
                deadline = time.monotonic() + GRACE_SECONDS
            if time.monotonic() > deadline:
                self._killed = True
                self._kill()
            time.sleep(_LOOK_SECONDS)

    def _new_lines(self, read: int) -> list[bytes]:
        try:
            with (self._folder / EVENTS).open("rb") as file:
                file.seek(read)
                return [line for line in file if line.endswith(b"\n")]
        except FileNotFoundError:
            return []

    def result(self, curve: tuple[Reading, ...], asked: str) -> TrialResult:
        """What the training came to; `asked` is the signal that asked for its end, if one did."""
        told = ends(self._folder, self._devices)
        errors = [(rank, result) for rank, result in told if result.last_lines]
        if not errors and 0 in dict(told):
            return _told(dict(told)[0], asked)
        signals = self._signals()
        if errors and not signals:
            rank, result = errors[0]
            return self._of_all(result, f"on device {rank}: " if self._devices > 1 else "", curve)
        return self._lost(signals, curve, asked)

    def _signals(self) -> dict[int, int]:
        """The signal by which each process died that did."""
        code = self._process.returncode
        if self._devices == 1 or code < 0:
            return {0: -code} if code < 0 else {}
        file = self._folder / EXITS
        exits = json.loads(file.read_text()) if file.exists() else {}
        return {int(rank): -code for rank, code in exits.items() if code < 0}

    def _lost(self, signals: dict[int, int], curve: tuple[Reading, ...], asked: str) -> TrialResult:
        """The result where processes died without a word."""
        names = ", ".join(f"{signal.Signals(number).name} (device {rank})" for rank, number in signals.items())
        how = names or f"exit code {self._process.returncode}"
        if self._killed:
            status, reason = Status.PREEMPTED, f"no end {GRACE_SECONDS:g} s after {asked}; killed; {_GO_ON}"
        elif signal.SIGKILL not in signals.values():
            status, reason = Status.FAILED, f"a process of the training ended by {how}; {_GO_ON}"
        elif self._kills.struck():
            status, reason = Status.OUT_OF_MEMORY, f"the kernel ended a process for want of memory: {how}"
        else:
            status, reason = Status.PREEMPTED, f"a process of the training was ended by {how}; {_GO_ON}"
        lines = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        return self._of_all(TrialResult(status=status, reason=reason, last_lines="\n".join(lines)), "", curve)

    def _of_all(self, result: TrialResult, where: str, curve: tuple[Reading, ...]) -> TrialResult:
        """The result with the readings that the first process told."""
        return dataclasses.replace(
            result,
            reason=f"{where}{result.reason}",
            curve=curve,
            tokens=max(result.tokens, curve[-1].tokens if curve else 0),
            device=self._spec.device,
        )

    def _kill(self) -> None:
        """End every process: the launcher's children die with it."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def ends(folder: Path, devices: int) -> list[tuple[int, TrialResult]]:
    """The ends that processes wrote down, those with an error first, then the earliest: it is what ended the rest."""
    found = []
    for rank in range(devices):
        with contextlib.suppress(FileNotFoundError):
            told = json.loads(end_file(folder, rank).read_text())
            result = result_from_plain(told["result"])
            found.append((not result.last_lines, told["at"], rank, result))
    return [(rank, result) for *_, rank, result in sorted(found, key=lambda each: each[:3])]


def _told(result: TrialResult, asked: str) -> TrialResult:
    if result.status is not Status.PREEMPTED:
        return result
    return dataclasses.replace(result, reason=f"{result.reason}, by {asked}; {_GO_ON}")
