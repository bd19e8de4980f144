"""Processes of this machine, as tests that kill look at them."""

import time
from collections.abc import Callable
from pathlib import Path

HANGS_SECONDS = 300.0
"""After so long what is waited for is taken never to come; no machine is so slow."""


def wait_for(what: str, is_so: Callable[[], object], *, pause: float = 0.02) -> None:
    """Returns once it is so; `pause` seconds lie between two looks."""
    end = time.monotonic() + HANGS_SECONDS
    while not is_so():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(pause)


def descendants(pid: int) -> set[int]:
    """Every process below one."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}
