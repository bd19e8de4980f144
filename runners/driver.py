"""Which process runs a search, and whether it still lives."""

import os
import socket
from pathlib import Path


def this_driver() -> str:
    """'host:pid:start' of this process; the start keeps a reused process id apart."""
    return f"{socket.gethostname()}:{os.getpid()}:{_start(os.getpid())}"


def is_dead(driver: str) -> bool:
    """True when the driver ran on this machine and is gone; of another machine's nothing is known."""
    host, _, rest = driver.rpartition(":")[0].rpartition(":")
    start = driver.rpartition(":")[2]
    if host != socket.gethostname() or not rest.isdecimal():
        return False
    return not _lives(int(rest)) or (start != "" and _start(int(rest)) != start)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _start(pid: int) -> str:
    """The kernel's start time of a process; empty where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
