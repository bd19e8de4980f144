"""Bytes of the Python standard library's own source files: a corpus that every Python carries."""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from runners.tasks.data import SPLITS, AbstractTask, TaskData, TaskShape, check_lengths, from_streams
from search_space.errors import UserError

LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Folders that are no part of the library proper, or that differ between installations."""
MACHINE_MADE = ("_sysconfigdata", "config-")
"""Name starts of what a build writes for its own machine."""
LARGEST = 16 * 2**20
HELD_OUT_PERCENT = 8


@dataclass(frozen=True, kw_only=True)
class PythonSource(AbstractTask):
    """The running Python's standard library, byte by byte; tests and site-packages left out, split by file."""

    kind: ClassVar[str] = "python_source"
    unit: ClassVar[str] = "byte"

    seq_len: int = 64
    """Training sequence length in bytes."""
    eval_lengths: tuple[int, ...] = ()
    """Further lengths at which the final model is evaluated."""
    max_bytes: int = LARGEST
    """Use at most so many bytes: whole files, chosen by a hash of their path; each split keeps its share."""

    def __post_init__(self) -> None:
        check_lengths(self.kind, self.seq_len, self.eval_lengths)
        if isinstance(self.max_bytes, bool) or not 2**16 <= self.max_bytes <= LARGEST:
            raise UserError(f"task.{self.kind}.max_bytes: takes {2**16} to {LARGEST}; got {self.max_bytes!r}")

    def shape(self) -> TaskShape:
        return TaskShape(vocab_size=256, train_len=self.seq_len, max_len=max(self.seq_len, *self.eval_lengths, 0))

    def prepare(self, path: str = "") -> TaskData:
        """The data; `path` names another folder of sources, or a data file written by a search."""
        if path.endswith(".safetensors"):
            return TaskData.load(Path(path)).shaped(self.shape())
        root = Path(path or sysconfig.get_paths()["stdlib"])
        files = _within(self.max_bytes, sorted(sources(root)), root)
        if not files:
            raise UserError(f"task.{self.kind}: no Python source under {root}; name a folder with --data")
        parts: dict[str, list[bytes]] = {name: [] for name in SPLITS}
        for relative in files:
            parts[split_of(relative)].append((root / relative).read_bytes())
        streams = {name: np.frombuffer(b"".join(parts[name]), dtype=np.uint8) for name in SPLITS}
        return from_streams(streams, self.shape())


def sources(root: Path) -> Iterator[str]:
    """Relative paths, with forward slashes, of the library's source files."""
    for file in root.rglob("*.py"):
        relative = file.relative_to(root)
        if not LEFT_OUT.intersection(relative.parts) and not any(
            part.startswith(MACHINE_MADE) for part in relative.parts
        ):
            yield relative.as_posix()


def split_of(relative: str) -> str:
    """The split a file belongs to: fixed by its relative path alone."""
    share = _hash(relative) % 100
    if share < HELD_OUT_PERCENT:
        return "validation"
    return "test" if share < 2 * HELD_OUT_PERCENT else "train"


def _within(max_bytes: int, files: list[str], root: Path) -> list[str]:
    """Files up to so many bytes, each split within its share of them, so that a small corpus has all three splits."""
    kept: list[str] = []
    held_out = max_bytes * HELD_OUT_PERCENT // 100
    left = {"train": max_bytes - 2 * held_out, "validation": held_out, "test": held_out}
    for relative in sorted(files, key=lambda name: (_hash(f"order {name}"), name)):
        size = (root / relative).stat().st_size
        if size <= left[split_of(relative)]:
            kept.append(relative)
            left[split_of(relative)] -= size
    return sorted(kept)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
