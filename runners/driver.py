"""Which process runs a search, and whether it still lives."""

import os
import socket
from pathlib import Path


def this_driver() -> str:
    """'host:pid:start' of this process; the start keeps a reused process id apart."""
    return f"{socket.gethostname()}:{os.getpid()}:{_start(os.getpid())}"


def is_here(driver: str) -> bool:
    """True for a driver of this machine."""
    host, _, pid = driver.rpartition(":")[0].rpartition(":")
    return host == socket.gethostname() and pid.isdecimal()


def is_dead(driver: str) -> bool:
    """True when the driver ran on this machine and is gone; of another machine's nothing is known."""
    if not is_here(driver):
        return False
    name, _, start = driver.rpartition(":")
    pid = int(name.rpartition(":")[2])
    return not _lives(pid) or (start != "" and _start(pid) != start) or _is_zombie(pid)


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
    found = _state(pid)
    return found[19] if found else ""


def _is_zombie(pid: int) -> bool:
    """True for a process that has ended and that its parent has not asked after."""
    return _state(pid)[:1] == ["Z"]


def _state(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on; empty where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
