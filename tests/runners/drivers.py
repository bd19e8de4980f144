"""Drivers as tests start and kill them: forked from a process that has imported what they need, so within a second."""

import multiprocessing
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from processes import HANGS_SECONDS
from studied import EXPERIMENT

FORKS = multiprocessing.get_context("forkserver")
PRELOADED = ["runners.search", "runners.tracking", "runners.samplers", "mlflow.tracking", "torch._dynamo"]


class Driver:
    """A process that runs the search of a folder, as drive.py does; what it prints lies beside the search."""

    started = 0

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        given: Mapping[str, str] | None = None,
        text: str = EXPERIMENT,
        first: Callable[[], None] | None = None,
    ) -> None:
        """`given` is its environment, `first` is called in the new process before anything else."""
        file = folder / "small.yaml"
        if not file.exists():
            file.write_text(text)
        Driver.started += 1
        self._said = {name: folder / f"driver-{Driver.started}.{name}" for name in ("out", "err")}
        FORKS.set_forkserver_preload(PRELOADED)
        self._process = FORKS.Process(
            target=_drive,
            args=(folder, file, list(overrides), dict(given or os.environ), self._said, first),
            daemon=True,
        )
        self._process.start()

    @property
    def ended(self) -> bool:
        """True once it is gone."""
        return self._process.exitcode is not None

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return self._read("out")

    @property
    def err(self) -> str:
        """What it has said besides."""
        return self._read("err")

    def _read(self, name: str) -> str:
        return self._said[name].read_text() if self._said[name].exists() else ""

    def kill(self) -> int:
        """SIGKILL; its exit code, which is another one where it had ended by itself."""
        self._process.kill()
        return self.wait()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def wait(self, seconds: float = HANGS_SECONDS) -> int:
        """Its exit code, once it has ended, which may take so long."""
        self._process.join(seconds)
        code = self._process.exitcode
        assert code is not None, f"the driver hangs: {self.err}"
        return code

    def finish(self) -> None:
        """Wait for its end, which must be a good one."""
        assert self.wait() == 0, self.err


def _drive(
    folder: Path,
    file: Path,
    overrides: list[str],
    given: dict[str, str],
    said: Mapping[str, Path],
    first: Callable[[], None] | None,
) -> None:
    for number, name in ((1, "out"), (2, "err")):
        with said[name].open("ab", buffering=0) as log:
            os.dup2(log.fileno(), number)
    os.environ.clear()
    os.environ.update(given)
    if first is not None:
        first()
    from drive import main

    raise SystemExit(main(folder, file, overrides))
