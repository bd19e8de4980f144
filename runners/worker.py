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
from queue import SimpleQueue
from typing import Any

from runners.trials import RunJob, named
from search_space.records import Reading, result_from_plain, to_plain

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

    first = commands.get()
    sys.path.extend(path for path in first["path"] if path not in sys.path)
    _serve(named(first["trials"]), commands, send)


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


def _serve(run_job: RunJob, commands: "SimpleQueue[dict[str, Any]]", send: Callable[[dict[str, Any]], None]) -> None:
    def report(reading: Reading) -> bool:
        send({"reading": to_plain(reading)})
        return bool(commands.get()["go_on"])

    send({"ready": True})
    while True:
        send({"result": to_plain(run_job(commands.get(), report))})


if __name__ == "__main__":
    main(int(sys.argv[1]))
