"""What was killed and found in several calls, kept in one file, so that a long run can be made in pieces."""

import json
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from chaos_checks import Found

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One search that was disturbed, ended and checked."""

    killed: Mapping[str, int]
    drivers: int
    seconds: float
    found: Mapping[str, Any]
    code: str
    """Which version of the code ran it."""


@dataclass(kw_only=True)
class State:
    """All of a run so far; what it draws follows from its seed and the number of each search alone."""

    engine: str
    seed: int
    trials: int
    calls: int = 0
    pieces: list[Piece] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> Self:
        """The run that a file keeps."""
        plain = json.loads(file.read_text())
        return cls(**{**plain, "pieces": [Piece(**piece) for piece in plain["pieces"]]})

    def write(self, file: Path) -> None:
        """Keep it, whole even where this process is killed."""
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.partial")
        partial.write_text(json.dumps(asdict(self), indent=1))
        partial.replace(file)

    def add(self, killed: Mapping[str, int], drivers: int, seconds: float, found: Found) -> None:
        """Take in a search."""
        self.pieces.append(
            Piece(killed=dict(killed), drivers=drivers, seconds=seconds, found=asdict(found), code=code())
        )

    @property
    def kills(self) -> Counter[str]:
        """How often each kind of process was killed."""
        return sum((Counter(piece.killed) for piece in self.pieces), Counter())

    @property
    def found(self) -> Found:
        """What all checks found together."""
        return sum((Found(**piece.found) for piece in self.pieces), Found())

    def verdict(self, asked: int) -> str:
        """All of it in one line; it begins with PASSED, FAILED, or how far it has come."""
        kills, found = self.kills, self.found
        done = "PASSED" if kills.total() >= asked else f"NOT DONE ({kills.total()} of {asked})"
        versions = list(dict.fromkeys(piece.code for piece in self.pieces))
        return (
            f"{'FAILED' if found.faults else done}: chaos, engine {self.engine}: {kills.total()} SIGKILLs "
            f"({kills['worker']} workers, {kills['driver']} drivers, {kills['server']} tracking servers) over "
            f"{len(self.pieces)} searches in {sum(piece.seconds for piece in self.pieces):.0f} s and {self.calls} "
            f"call(s), {sum(piece.drivers for piece in self.pieces)} drivers, seed {self.seed}, code "
            f"{', '.join(versions) or 'none'}; {found}"
        )


def code() -> str:
    """The commit of the checkout, marked where files differ from it."""
    words = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
