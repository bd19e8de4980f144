"""How a worker process died, what memory it held, and whether the kernel ended it because memory ran out."""

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SECONDS = 15.0
"""How far back a kill may lie that explains a death now: freeing a large process takes time."""


@dataclass(frozen=True, kw_only=True)
class Death:
    """The end of a process."""

    code: int
    """Exit code, or minus the signal's number."""
    how: str
    """The same in words."""
    peak_bytes: int
    """Most memory it held; 0 where that is not known."""


def reap(process: "subprocess.Popen[bytes]") -> Death:
    """Wait for a process that is dying, and say how it died."""
    peak = 0
    if process.returncode is None:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        peak = used.ru_maxrss * 1024
    code = process.returncode
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return Death(code=code, how=how, peak_bytes=peak)


def resident_bytes(pid: int) -> int:
    """Memory a process holds now; 0 where that is not known."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class OutOfMemoryKills:
    """Tells deaths for want of memory from others, by the kernel's count of such kills; each explains one death."""

    def __init__(self, count: "Callable[[], int] | None" = None) -> None:
        self._count = count or kills_so_far
        self._seen = deque([(time.monotonic(), self._count())])

    def note(self) -> None:
        """Look at the count; to be called about twice a second."""
        now = time.monotonic()
        self._seen.append((now, self._count()))
        while len(self._seen) > 1 and self._seen[1][0] < now - SECONDS:
            self._seen.popleft()

    def struck(self) -> bool:
        """True when a kill of the last seconds is left that no earlier call took for its own."""
        self.note()
        before, now = self._seen[0][1], self._seen[-1][1]
        if now <= before:
            return False
        self._seen = deque((moment, count + (count < now)) for moment, count in self._seen)
        return True


def kills_so_far(root: Path = Path("/")) -> int:
    """Processes that the kernel ended for want of memory: in this control group, else on the whole machine."""
    for file in (*_of_group(root), root / "proc/vmstat"):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _of_group(root: Path) -> list[Path]:
    """Where this process's control group counts, in both versions of control groups."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if not controllers:
            found.append(root / "sys/fs/cgroup" / inside / "memory.events")
        elif "memory" in controllers.split(","):
            found.append(root / "sys/fs/cgroup/memory" / inside / "memory.oom_control")
    return found
