"""A worker: one process that runs trial after trial for a driver, talking JSON lines over a socket.

Started as `python -m runners.worker N` with the number of the socket's file descriptor. It never outlives its driver.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from search_space.records import Reading, result_from_plain, spec_from_plain, to_plain

__all__ = ["decode_event", "die_with", "encode", "main"]

_SET_PARENT_DEATH_SIGNAL = 1


def encode(message: dict[str, Any]) -> bytes:
    """One line of the protocol; NaN and infinities pass."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode_event(line: bytes) -> dict[str, Any]:
    """A worker's message, with readings and results as records."""
    event: dict[str, Any] = json.loads(line)
    if "reading" in event:
        event["reading"] = Reading(**event["reading"])
    if "result" in event:
        event["result"] = result_from_plain(event["result"])
    return event


def main(descriptor: int) -> None:
    """Serve until the driver closes the socket or dies."""
    die_with(os.getppid())
    # The driver stops its workers itself: a Ctrl-C or SIGTERM to the whole group must not look like a failed trial.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = socket.socket(fileno=descriptor)
    commands: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_listen, args=(channel, commands), daemon=True).start()

    def send(message: dict[str, Any]) -> None:
        channel.sendall(encode(message))

    sys.path.extend(path for path in commands.get()["path"] if path not in sys.path)
    _serve(commands, send)


def die_with(parent: int) -> None:
    """Have this process killed when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _listen(channel: socket.socket, commands: "SimpleQueue[dict[str, Any]]") -> None:
    """Pass the driver's lines on; the end of the channel is the end of this process, whatever it is doing."""
    with channel.makefile("rb") as lines:
        for line in lines:
            commands.put(json.loads(line))
    os._exit(0)


def _serve(commands: "SimpleQueue[dict[str, Any]]", send: Callable[[dict[str, Any]], None]) -> None:
    import torch

    from runners.checkpoints import Checkpointing
    from runners.tasks.data import TaskData
    from runners.train import run_trial

    data: dict[str, TaskData] = {}
    send({"ready": torch.__version__})
    while True:
        job = commands.get()
        if job["data"] not in data:
            data = {job["data"]: TaskData.load(Path(job["data"]))}

        def report(reading: Reading) -> bool:
            send({"reading": to_plain(reading)})
            return bool(commands.get()["go_on"])

        kept = job["checkpoint"]
        result = run_trial(
            spec_from_plain(job["spec"]),
            data[job["data"]],
            report,
            weights=Path(job["weights"]) if job["weights"] else None,
            test=job["test"],
            checkpoint=Checkpointing(**{**kept, "folder": Path(kept["folder"])}) if kept else None,
            micro_batch_tokens=job["micro_batch_tokens"],
        )
        send({"result": to_plain(result)})


if __name__ == "__main__":
    main(int(sys.argv[1]))
