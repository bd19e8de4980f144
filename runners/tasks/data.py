"""Prepared data: three disjoint splits of tokens, the batches drawn from them, and the one file they travel in."""

import hashlib
import math
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor

from search_space.canon import seed_from
from search_space.errors import UserError

SPLITS = ("train", "validation", "test")
IGNORED = -100
"""Target of a position that does not count."""
EVALUATION_BATCH_TOKENS = 4096
"""Tokens per evaluation batch (at least one sequence); a constant, so that readings never depend on the micro-batch."""

Batch = tuple[Int64[Tensor, "B T"], Int64[Tensor, "B T"]]
"""Inputs and targets."""


@dataclass(frozen=True, kw_only=True)
class TaskShape:
    """What a model must fit."""

    vocab_size: int
    train_len: int
    max_len: int


class AbstractTask:
    """Where tokens come from; a frozen dataclass of plain fields, registered in runners.tasks.TASKS."""

    kind: ClassVar[str]
    unit: ClassVar[str]

    @abstractmethod
    def shape(self) -> TaskShape:
        """The sizes a model must fit; reads no data."""

    @abstractmethod
    def prepare(self, path: str = "") -> "TaskData":
        """The data; `path` names where it lies on this machine when the task's own place does not hold."""


class AbstractTokens:
    """One split."""

    @abstractmethod
    def draw(self, step: int, batch_size: int, seed: int, length: int) -> Batch:
        """The training batch of a step."""

    @abstractmethod
    def windows(self, tokens: int, length: int, longest: int) -> Iterator[Batch]:
        """Fixed evaluation batches of about so many tokens at a sequence length, which is at most `longest`."""

    @abstractmethod
    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Everything the split holds, by name."""


@dataclass(frozen=True, kw_only=True)
class Stream(AbstractTokens):
    """One run of tokens; each position's target is the token after it. Training windows start anywhere."""

    tokens: NDArray[np.uint8]

    def draw(self, step: int, batch_size: int, seed: int, length: int) -> Batch:
        rows = _bits(batch_size, "batch", seed, step)
        starts = (rows % np.uint64(len(self.tokens) - length)).astype(np.int64)
        return self._cut(starts, length)

    def windows(self, tokens: int, length: int, longest: int) -> Iterator[Batch]:
        """Windows cut from stretches of the longest length: every length predicts the same tokens of the split."""
        room = len(self.tokens) - 1
        if room < longest:
            raise UserError(
                f"task: an evaluation split holds {room + 1} tokens, too few for one window of {longest}; "
                f"give more data or a shorter length"
            )
        count = min(max(tokens // longest, 1), room // longest)
        stretches = np.arange(count, dtype=np.int64) * (room // count)
        starts = (stretches[:, None] + np.arange(longest // length) * length).ravel()
        per_batch = max(EVALUATION_BATCH_TOKENS // length, 1)
        for first in range(0, len(starts), per_batch):
            yield self._cut(starts[first : first + per_batch], length)

    def _cut(self, starts: NDArray[np.int64], length: int) -> Batch:
        rows = torch.from_numpy(self.tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64))
        return rows[:, :-1], rows[:, 1:]

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        return {"tokens": self.tokens}


@dataclass(frozen=True, kw_only=True)
class Examples(AbstractTokens):
    """Whole sequences with their own targets, at one or more lengths. Training takes each once before any again."""

    inputs: Mapping[int, NDArray[np.int16]]
    targets: Mapping[int, NDArray[np.int16]]

    def draw(self, step: int, batch_size: int, seed: int, length: int) -> Batch:
        count = len(self.inputs[length])
        position = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
        chosen = np.empty_like(position)
        for epoch in range(int(position[0]) // count, int(position[-1]) // count + 1):
            mine = position // count == epoch
            chosen[mine] = _shuffled(position[mine] % count, count, seed, epoch)
        return self._take(length, chosen)

    def windows(self, tokens: int, length: int, longest: int) -> Iterator[Batch]:
        count = min(max(tokens // length, 1), len(self.inputs[length]))
        per_batch = max(EVALUATION_BATCH_TOKENS // length, 1)
        for first in range(0, count, per_batch):
            yield self._take(length, np.arange(first, min(first + per_batch, count)))

    def _take(self, length: int, chosen: NDArray[np.int64]) -> Batch:
        inputs = self.inputs[length][chosen].astype(np.int64)
        targets = self.targets[length][chosen].astype(np.int64)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        found: dict[str, NDArray[np.generic]] = {}
        for length in self.inputs:
            found[f"inputs.{length}"] = self.inputs[length]
            found[f"targets.{length}"] = self.targets[length]
        return found


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """Train, validation and test tokens of one task."""

    shape: TaskShape
    unit: str
    """What a token is: 'byte' or 'token'."""
    splits: Mapping[str, AbstractTokens]
    bigram_loss: float | None
    """Validation loss of a smoothed bigram model of the training split; None where a bigram says nothing."""
    reports_accuracy: bool
    """Whether the share of right answers is worth a metric."""
    fingerprint: str
    """sha256 of the token bytes of all splits."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all tokens."""
        return sum(array.nbytes for split in self.splits.values() for array in split.arrays().values())

    def batch(self, step: int, batch_size: int, seed: int) -> Batch:
        """The training batch of a step, counted from 0; it depends on nothing but these arguments."""
        return self.splits["train"].draw(step, batch_size, seed, self.shape.train_len)

    def evaluation(self, split: str, tokens: int, length: int) -> Iterator[Batch]:
        """The fixed batches on which a split is evaluated at a sequence length, at most max_len."""
        return self.splits[split].windows(tokens, length, self.shape.max_len)

    def shaped(self, shape: TaskShape) -> "TaskData":
        """The same tokens at other lengths; UserError where they were made for their lengths alone."""
        if shape == self.shape:
            return self
        tokens = {name: split.tokens for name, split in self.splits.items() if isinstance(split, Stream)}
        if len(tokens) == len(self.splits) and shape.vocab_size == self.shape.vocab_size:
            return from_streams(tokens, shape)
        raise UserError(
            f"task: the data file was made for {self.shape}, the task asks for {shape}; "
            f"leave --data out to make the data anew, or ask for the lengths of the file"
        )

    def save(self, path: Path) -> None:
        """Write everything into one safetensors file, all of it or nothing."""
        from safetensors.numpy import save_file

        arrays = {
            f"{name}/{key}": np.ascontiguousarray(array)
            for name, split in self.splits.items()
            for key, array in split.arrays().items()
        }
        metadata = {
            "fingerprint": self.fingerprint,
            "unit": self.unit,
            "vocab_size": str(self.shape.vocab_size),
            "train_len": str(self.shape.train_len),
            "max_len": str(self.shape.max_len),
            "bigram_loss": "" if self.bigram_loss is None else repr(self.bigram_loss),
            "reports_accuracy": str(self.reports_accuracy),
        }
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        save_file(arrays, str(partial), metadata)
        partial.replace(path)

    @staticmethod
    def load(path: Path) -> "TaskData":
        """The inverse of save; UserError when the bytes are not those the file was written with."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="np") as file:
                metadata = file.metadata() or {}
                arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - a handle is no mapping
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: is no readable data file of a search ({error}); name another file") from error
        if "fingerprint" not in metadata:
            raise UserError(f"{path}: holds tensors, but not those of a search's data; name another file")
        splits = {name: _split(name, arrays) for name in SPLITS}
        found = fingerprint(splits)
        if found != metadata["fingerprint"]:
            raise UserError(
                f"{path}: the data's fingerprint is {found}, recorded was {metadata['fingerprint']}; "
                f"the file was changed or cut short, fetch it again"
            )
        return TaskData(
            shape=TaskShape(**{name: int(metadata[name]) for name in ("vocab_size", "train_len", "max_len")}),
            unit=metadata["unit"],
            splits=splits,
            bigram_loss=float(metadata["bigram_loss"]) if metadata["bigram_loss"] else None,
            reports_accuracy=metadata["reports_accuracy"] == "True",
            fingerprint=found,
        )


def _bits(count: int, *parts: str | int) -> NDArray[np.uint64]:
    """Random 64-bit numbers; raw generator output, which no numpy release changes."""
    raw: NDArray[np.uint64] = np.random.PCG64(seed_from(*parts)).random_raw(count)
    return raw


def _shuffled(index: NDArray[np.int64], count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of 0..count - 1 at these places: a random start and a random stride prime to the count."""
    start, stride = (int(bits) % count for bits in _bits(2, "order", seed, epoch))
    while math.gcd(stride, count) != 1:
        stride += 1
    return (start + stride * index) % count


def _split(name: str, arrays: Mapping[str, NDArray[np.generic]]) -> AbstractTokens:
    mine = {key.removeprefix(f"{name}/"): array for key, array in arrays.items() if key.startswith(f"{name}/")}
    if "tokens" in mine:
        return Stream(tokens=mine["tokens"].astype(np.uint8, copy=False))
    by_kind: dict[str, dict[int, NDArray[np.int16]]] = {"inputs": {}, "targets": {}}
    for key, array in sorted(mine.items(), key=lambda item: int(item[0].split(".")[1])):
        kind, length = key.split(".")
        by_kind[kind][int(length)] = array.astype(np.int16, copy=False)
    return Examples(inputs=by_kind["inputs"], targets=by_kind["targets"])


def fingerprint(splits: Mapping[str, AbstractTokens]) -> str:
    """sha256 over the name, length and little-endian bytes of every array of every split."""
    sha = hashlib.sha256()
    for name in SPLITS:
        for key, array in sorted(splits[name].arrays().items()):
            sha.update(f"{name}/{key}:{array.nbytes}\n".encode())
            sha.update(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).data)
    return sha.hexdigest()


def from_streams(splits: Mapping[str, NDArray[np.uint8]], shape: TaskShape) -> TaskData:
    """The data of three byte streams; UserError where one is too short for a window."""
    for name in SPLITS:
        longest = shape.train_len if name == "train" else shape.max_len
        if len(splits[name]) <= longest:
            raise UserError(
                f"task: the {name} split holds {len(splits[name])} bytes, too few for one window of {longest}; "
                f"give more data or shorter seq_len and eval_lengths"
            )
    streams: dict[str, AbstractTokens] = {name: Stream(tokens=splits[name]) for name in SPLITS}
    return TaskData(
        shape=shape,
        unit="byte",
        splits=streams,
        bigram_loss=bigram_loss(splits["train"], splits["validation"]),
        reports_accuracy=False,
        fingerprint=fingerprint(streams),
    )


def bigram_loss(train: NDArray[np.uint8], validation: NDArray[np.uint8], alpha: float = 0.1) -> float:
    """Nats per byte of an add-alpha smoothed byte bigram, counted on train, evaluated on validation."""
    pairs = np.bincount(train[:-1].astype(np.int64) * 256 + train[1:], minlength=65536).reshape(256, 256) + alpha
    logs = np.log(pairs) - np.log(pairs.sum(axis=1, keepdims=True))
    return float(-logs[validation[:-1], validation[1:]].mean())


def check_lengths(kind: str, seq_len: int, eval_lengths: tuple[int, ...]) -> None:
    """UserError unless every length is a whole number of tokens above one."""
    for name, lengths in (("seq_len", (seq_len,)), ("eval_lengths", eval_lengths)):
        for length in lengths:
            if isinstance(length, bool) or not isinstance(length, int) or not 2 <= length <= 65536:
                raise UserError(f"task.{kind}.{name}: takes whole numbers from 2 to 65536; got {length!r}")
