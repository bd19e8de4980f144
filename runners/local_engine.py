"""Runs trials on this machine, in worker processes that import torch once, are reused, and replaced when they break."""

import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runners.deaths import Death, OutOfMemoryKills, reap, resident_bytes
from runners.dispatch import dispatch
from runners.engine import AbstractEngine, AbstractSource, Ended, EngineError, Event, Interrupts, Job, Progressed
from runners.trials import TRAINED
from runners.worker import decode_event, encode
from search_space.records import Metric, Reading, Status, TrialResult, to_plain

GRACE_SECONDS = 10.0
"""How long after its own limit a trial may still answer before its worker is killed."""
START_SECONDS = 300.0
MOST_FAILED_STARTS = 3
LAST_LINES = 25
_NO_SIGNAL = socket.MSG_NOSIGNAL if sys.platform == "linux" else 0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass
class _Worker:
    """One worker process and the trial it runs."""

    process: "subprocess.Popen[bytes]"
    channel: socket.socket
    log: Path
    since: float
    """When it was started, later when its trial was sent."""
    ready: bool = False
    job: Job | None = None
    sent: bool = False
    deadline: float = math.inf
    log_start: int = 0
    held_bytes: int = 0
    """Memory it held before its trial."""
    pending: bytes = b""
    curve: list[Reading] = field(default_factory=list)


class LocalEngine(AbstractEngine):
    """Up to `jobs` trials at a time. A trial that crashes, hangs or is killed ends alone; the others go on."""

    def __init__(
        self,
        *,
        jobs: int,
        data: Path,
        folder: Path,
        threads: int = 1,
        environment: Mapping[str, str] | None = None,
        trials: str = TRAINED,
    ) -> None:
        """`data` is the file every worker loads once, `folder` holds their logs; `environment` is added to theirs.

        `trials` names what runs a trial, as runners.trials takes it.
        """
        self.jobs = jobs
        self._data = data.absolute()
        self._trials = trials
        self._folder = folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads)), **(environment or {})}
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._failed_starts = 0
        self._count = 0
        self._kills = OutOfMemoryKills()

    def drive(self, source: AbstractSource, interrupts: Interrupts) -> bool:
        return dispatch(self, source, interrupts)

    @property
    def busy(self) -> int:
        """How many trials run."""
        return sum(worker.job is not None for worker in self._workers)

    @property
    def has_room(self) -> bool:
        """True when another trial can be started."""
        return self.busy < self.jobs

    def warm(self) -> None:
        """Have one worker import what it needs while the first trial is thought of."""
        if not self._workers:
            self._spawn()

    def start(self, job: Job) -> None:
        """Give the trial to an idle worker, a new one when there is none."""
        assert self.has_room, f"all {self.jobs} workers are busy"
        worker = next((idle for idle in self._workers if idle.job is None), None) or self._spawn()
        worker.job, worker.sent, worker.curve = job, False, []
        if worker.ready:
            self._send_job(worker)

    def decide(self, key: int, go_on: bool) -> None:
        """Answer a trial that reported; nothing happens when its worker is gone by now."""
        worker = next((each for each in self._workers if each.job is not None and each.job.key == key), None)
        if worker is not None:
            assert worker.job is not None
            # The trial's own clock stood still while it waited; its readings tell what it had used by then.
            used = worker.curve[-1].seconds if worker.curve else 0.0
            worker.deadline = time.monotonic() + worker.job.spec.budget.max_seconds - used + GRACE_SECONDS
            self._write(worker, {"go_on": go_on})

    def wait(self, seconds: float) -> list[Event]:
        """What happened, after waiting at most so long for something."""
        now = time.monotonic()
        due = min((worker.deadline for worker in self._workers), default=math.inf)
        events: list[Event] = []
        for chosen, _ in self._selector.select(max(0.0, min(seconds, due - now))):
            events.extend(self._read(chosen.data))
        for worker in list(self._workers):
            if time.monotonic() >= worker.deadline:
                events.extend(self._overdue(worker))
        self._kills.note()
        return events

    def stop(self) -> None:
        """Kill every worker; trials that run are cut off."""
        for worker in list(self._workers):
            self._remove(worker)

    def _spawn(self) -> _Worker:
        channel, theirs = socket.socketpair()
        log = self._folder / f"worker-{self._count}.log"
        self._count += 1
        with log.open("wb") as output, theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "runners.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        now = time.monotonic()
        worker = _Worker(process=process, channel=channel, log=log, since=now, deadline=now + START_SECONDS)
        self._workers.append(worker)
        self._selector.register(channel, selectors.EVENT_READ, worker)
        self._write(worker, {"path": sys.path, "trials": self._trials})
        return worker

    def _send_job(self, worker: _Worker) -> None:
        job = worker.job
        assert job is not None
        worker.sent = True
        worker.log_start = worker.log.stat().st_size
        worker.since = time.monotonic()
        worker.held_bytes = resident_bytes(worker.process.pid)
        worker.deadline = worker.since + job.spec.budget.max_seconds + GRACE_SECONDS
        message = {
            "spec": to_plain(job.spec),
            "data": str(self._data),
            "weights": str(job.weights.absolute()) if job.weights else "",
            "test": job.test,
            "micro_batch_tokens": job.micro_batch_tokens,
            "checkpoint": {
                "folder": str(job.checkpoint.absolute()),
                "every_tokens": job.checkpoint_tokens,
                "most_bytes": job.checkpoint_bytes,
                "shared": str(job.shared.absolute()) if job.shared else "",
                "shared_tokens": job.shared_tokens,
            }
            if job.checkpoint
            else None,
        }
        self._write(worker, message)

    def _write(self, worker: _Worker, message: dict[str, Any]) -> None:
        # A worker that died is noticed by the end of its own channel; writing to it is no error and no signal.
        with suppress(BrokenPipeError, ConnectionResetError):
            worker.channel.sendall(encode(message), _NO_SIGNAL)

    def _read(self, worker: _Worker) -> list[Event]:
        try:
            received = worker.channel.recv(1 << 20)
        except ConnectionResetError:
            received = b""
        if not received:
            return self._died(worker)
        *lines, worker.pending = (worker.pending + received).split(b"\n")
        events: list[Event] = []
        for line in lines:
            message = decode_event(line)
            if "ready" in message:
                worker.ready, worker.deadline, self._failed_starts = True, math.inf, 0
                if worker.job is not None:
                    self._send_job(worker)
                continue
            assert worker.job is not None, f"a worker without a trial sent {sorted(message)}"
            if "reading" in message:
                worker.curve.append(message["reading"])
                worker.deadline = math.inf
                events.append(Progressed(key=worker.job.key, reading=message["reading"]))
            else:
                events.append(Ended(key=worker.job.key, result=message["result"]))
                worker.job, worker.deadline = None, math.inf
        return events

    def _died(self, worker: _Worker) -> list[Event]:
        """The worker's pipe ended: its trial failed or was taken away, or, before any trial, its start failed."""
        death = reap(worker.process)
        # Nothing kills a worker but the kernel for want of memory, and who takes its machine away.
        if death.code != -signal.SIGKILL:
            return self._broken(worker, Status.FAILED, f"the worker process ended by {death.how} in mid-trial", death)
        if self._kills.struck():
            reason = f"the kernel ended the worker process for want of memory ({death.how})"
            return self._broken(worker, Status.OUT_OF_MEMORY, reason, death)
        return self._broken(
            worker, Status.PREEMPTED, f"the worker process was ended by {death.how} in mid-trial", death
        )

    def _overdue(self, worker: _Worker) -> list[Event]:
        limit = worker.job.spec.budget.max_seconds if worker.job else 0.0
        where = "" if worker.curve else " before its first reading"
        reason = f"no answer{where} {GRACE_SECONDS:g} s after the limit of {limit:g} s (budget.max_seconds); killed"
        worker.process.kill()
        silent = f"no sign of life after {time.monotonic() - worker.since:.0f} s"
        return self._broken(worker, Status.TIMED_OUT, reason, replace(reap(worker.process), how=silent))

    def _broken(self, worker: _Worker, status: Status, reason: str, death: Death) -> list[Event]:
        job, sent, curve = worker.job, worker.sent, tuple(worker.curve)
        self._remove(worker)
        if job is None:
            return []
        lines = _tail(worker.log, worker.log_start)
        tokens, seconds = curve[-1].tokens if curve else 0, time.monotonic() - worker.since
        if sent:
            result = TrialResult(
                status=status,
                reason=reason,
                last_lines=lines,
                metrics={
                    Metric.PEAK_BYTES: float(max(death.peak_bytes - worker.held_bytes, 0)),
                    Metric.SECONDS: seconds,
                    Metric.TOKENS: float(tokens),
                },
                curve=curve,
                tokens=tokens,
                seconds=seconds,
                device=job.spec.device,
            )
            return [Ended(key=job.key, result=result)]
        self._failed_starts += 1
        if self._failed_starts >= MOST_FAILED_STARTS:
            raise EngineError(
                f"{self._failed_starts} worker processes in a row ended before their first trial ({death.how}); "
                f"the last lines of {worker.log}:\n{lines}"
            )
        self.start(job)
        return []

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.channel)
        worker.process.kill()
        worker.process.wait()
        worker.channel.close()


def _tail(log: Path, start: int) -> str:
    """The last lines a worker wrote since its trial began."""
    with log.open("rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace")
    return "\n".join(text.rstrip().split("\n")[-LAST_LINES:])
