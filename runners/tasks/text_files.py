"""The user's own text or JSONL files, read through `datasets`; bytes are tokens."""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from runners.tasks.data import SPLITS, AbstractTask, TaskData, TaskShape, check_lengths, from_streams
from search_space.errors import UserError

READERS = {".txt": "text", ".md": "text", ".rst": "text", ".jsonl": "json", ".json": "json"}
"""Which reader of `datasets` takes a suffix."""
SMALLEST_SPLIT_BY_FILE = 20
"""With fewer files the split is by document: a row of JSONL, or a paragraph of text."""
HELD_OUT_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class TextFiles(AbstractTask):
    """Your own text or JSONL files or folders, byte by byte; split by file, or by document when files are few."""

    kind: ClassVar[str] = "text_files"
    unit: ClassVar[str] = "byte"

    paths: tuple[str, ...] = ()
    """Files or folders, from the working directory on; a folder gives its .txt, .md, .rst, .jsonl and .json files."""
    text_field: str = "text"
    """The field of a JSONL row that holds its text."""
    seq_len: int = 64
    """Training sequence length in bytes."""
    eval_lengths: tuple[int, ...] = ()
    """Further lengths at which the final model is evaluated."""

    def __post_init__(self) -> None:
        check_lengths(self.kind, self.seq_len, self.eval_lengths)
        if isinstance(self.paths, str) or not all(isinstance(path, str) and path for path in self.paths):
            raise UserError(f"task.{self.kind}.paths: takes a list of files or folders; got {self.paths!r}")
        if not self.paths:
            raise UserError(f"task.{self.kind}.paths: is empty; list one or more files or folders")
        if not self.text_field:
            raise UserError(f"task.{self.kind}.text_field: is empty; name the field that holds the text")

    def shape(self) -> TaskShape:
        return TaskShape(vocab_size=256, train_len=self.seq_len, max_len=max(self.seq_len, *self.eval_lengths, 0))

    def prepare(self, path: str = "") -> TaskData:
        """The data; `path` names a file or folder to read instead of `paths`, or a data file written by a search."""
        if path.endswith(".safetensors"):
            return TaskData.load(Path(path)).shaped(self.shape())
        named = find_files((path,) if path else self.paths)
        whole = len(named) >= SMALLEST_SPLIT_BY_FILE
        documents: list[tuple[str, bytes]] = []
        for name, file in named.items():
            rows = self._rows(file)
            if whole:
                documents.append((name, b"\n\n".join(rows)))
            else:
                documents.extend((f"{name}#{number}", row) for number, row in enumerate(rows))
        documents = [(name, text) for name, text in documents if text.strip()]
        if len(documents) < 3:
            raise UserError(
                f"task.{self.kind}.paths: {len(named)} file(s) hold {len(documents)} document(s); three disjoint "
                f"splits need at least 3; give more files, or more JSONL rows or paragraphs"
            )
        split = _deal([name for name, _ in documents])
        streams = {
            part: np.frombuffer(b"\n\n".join(text for name, text in documents if split[name] == part), dtype=np.uint8)
            for part in SPLITS
        }
        return from_streams(streams, self.shape())

    def _rows(self, file: Path) -> list[bytes]:
        reader = READERS[file.suffix.lower()]
        if not file.stat().st_size:
            return []
        rows = _read(reader, file)
        if self.text_field not in rows.column_names and reader == "json":
            raise UserError(
                f"task.{self.kind}.text_field={self.text_field!r}: {file} has no such field; "
                f"it has {', '.join(rows.column_names)}"
            )
        texts = rows[self.text_field if reader == "json" else "text"]
        for number, text in enumerate(texts, 1):
            if not isinstance(text, str):
                raise UserError(f"{file}: row {number} holds {text!r} in {self.text_field!r}, not text; mend the row")
        return [text.encode() for text in texts]


def find_files(paths: Sequence[str]) -> dict[str, Path]:
    """Every readable file under the paths, by a name that does not depend on where a folder lies; sorted."""
    found: dict[str, Path] = {}
    for path in paths:
        root = Path(path).expanduser()
        if root.is_file():
            if root.suffix.lower() not in READERS:
                raise UserError(f"task.text_files.paths: {path} ends in none of {', '.join(READERS)}; rename it")
            _put(found, root.name, root)
        elif root.is_dir():
            for file in root.rglob("*"):
                if file.is_file() and file.suffix.lower() in READERS:
                    _put(found, file.relative_to(root).as_posix(), file)
        else:
            raise UserError(f"task.text_files.paths: {path} does not exist; correct the path or name it with --data")
    if not found:
        raise UserError(
            f"task.text_files.paths: no {', '.join(READERS)} file under {', '.join(paths)}; name other files or folders"
        )
    return dict(sorted(found.items()))


def _put(found: dict[str, Path], name: str, file: Path) -> None:
    """Add a file under its name, or a numbered one where two paths hold files of one name; a file given twice once."""
    number = 2
    free = name
    while free in found and not found[free].samefile(file):
        free = f"{name}~{number}"
        number += 1
    found[free] = file


def _read(reader: str, file: Path) -> Any:
    """The rows of one file; nothing is asked of a hub and no cache outlives the call."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import datasets

    datasets.disable_progress_bars()
    options = {"sample_by": "paragraph"} if reader == "text" else {}
    with tempfile.TemporaryDirectory(prefix="assay-text-") as cache:
        try:
            return datasets.load_dataset(
                reader, data_files=str(file), split="train", cache_dir=cache, keep_in_memory=True, **options
            )
        except (datasets.exceptions.DatasetGenerationError, UnicodeDecodeError) as error:
            cause = error.__cause__ or error
            raise UserError(f"{file}: cannot be read as {reader} in UTF-8 ({cause}); mend or leave out the file") from (
                error
            )


def _deal(names: Sequence[str]) -> dict[str, str]:
    """The split of each document: a fixed share of each, at least one, in the order of a hash of the name."""
    order = sorted(names, key=lambda name: (hashlib.sha256(name.encode()).digest(), name))
    held_out = max(1, round(len(order) * HELD_OUT_SHARE))
    return {
        name: "validation" if rank < held_out else "test" if rank < 2 * held_out else "train"
        for rank, name in enumerate(order)
    }
