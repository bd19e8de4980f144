"""Checkpoints: all that the rest of a trial depends on, in safetensors and JSON, so that a trial goes on after a loss.

A folder holds one checkpoint. Tensors are written first, under a name of their own; the JSON file that names them with
their digest is then put in place of the old one, so at every moment one whole checkpoint is there. Nothing is pickled.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from runners.diagnosing import Checkups
from runners.divergence import Watch
from runners.group import ALONE, Group
from runners.packing import apart, pack, unpack
from runners.tally import Tally
from search_space.records import Reading

AGE_SECONDS = 30.0
"""How old the last checkpoint is, at least, when a reading asks for the next; unless tokens decide."""
VERSION = 1
HEADER = "checkpoint.json"
_KEY = "digest"


class CheckpointRefused(Exception):
    """A checkpoint that no trial may go on from; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Where and how often a trial's state is kept."""

    folder: Path
    """For this trial alone; made when it is needed."""
    every_tokens: int = 0
    """Training tokens between two checkpoints; 0: at readings, when the last is AGE_SECONDS old."""
    most_bytes: int = 0
    """A larger state is not kept; 0: any is."""
    shared: Path | None = None
    """Folder of states, shared_tokens apart, for other trials, each in a folder named by its tokens; None: none."""
    shared_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Found:
    """A whole checkpoint of a trial."""

    step: int
    """Optimiser steps done."""
    tokens: int
    curve: tuple[Reading, ...]
    header: Mapping[str, Any]
    tensors: Path


@dataclass
class State:
    """What changes as a trial trains."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    watch: Watch
    checkups: Checkups
    tally: Tally
    device: str

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything as tensors and JSON data."""
        tensors = {f"model/{name}": tensor.detach() for name, tensor in _of_model(self.model)}
        tensors["watch/losses"] = torch.tensor(self.watch.losses(), dtype=torch.float64)
        tensors["random/cpu"] = torch.get_rng_state()
        if self.device == "cuda":
            tensors["random/cuda"] = torch.cuda.get_rng_state()
        plain = {
            "optimizer": pack(self.optimizer.state_dict(), "optimizer", tensors),
            "watch": self.watch.plain(),
            "checkups": self.checkups.plain(),
            "tally": self.tally.plain(),
        }
        return tensors, plain

    def restore(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        """Become what was packed, to the bit; CheckpointRefused when it is of another model."""
        held = dict(_of_model(self.model))
        kept = {name.removeprefix("model/"): tensor for name, tensor in tensors.items() if name.startswith("model/")}
        if {name: tensor.shape for name, tensor in held.items()} != {name: t.shape for name, t in kept.items()}:
            raise CheckpointRefused("its tensors are not those of this model")
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(kept[name])
        _restore_optimizer(self.optimizer, unpack(plain["optimizer"], tensors))
        self.watch.restore(tensors["watch/losses"].tolist(), plain["watch"])
        self.checkups.restore(plain["checkups"])
        self.tally.restore(plain["tally"])
        torch.set_rng_state(tensors["random/cpu"])
        if self.device == "cuda":
            torch.cuda.set_rng_state(tensors["random/cuda"])


class Keeper:
    """Takes a trial's checkpoints and goes on from the one that is there. What goes wrong is a remark, not an end."""

    def __init__(
        self, asked: Checkpointing | None, state: State, spec_id: str, micro_batch_tokens: int, group: Group = ALONE
    ) -> None:
        """The first process of a group writes what all hold together, so that any number goes on from it."""
        self._asked = asked
        self._group = group
        self._state = state
        self._spec_id, self._micro_batch_tokens = spec_id, micro_batch_tokens
        self._remarked: set[str] = set()
        self._last_tokens = 0
        self._last_moment = time.monotonic()

    def resume(self) -> int:
        """The step to go on with; 0, with nothing changed, when there is no checkpoint that fits."""
        if self._asked is None:
            return 0
        try:
            found = find(self._asked.folder, self._spec_id, self._micro_batch_tokens)
            if found is None:
                return 0
            tensors = self._group.placed(load_file(found.tensors), self._state.model, self._state.optimizer)
            self._state.restore(tensors, found.header)
        except CheckpointRefused as refusal:
            self._remark("refused", f"{refusal}; trained from the start")
            discard(self._asked.folder)
            return 0
        self._last_tokens = found.tokens
        return found.step

    def offer(self, step: int, *, at_reading: bool, always: bool = False) -> None:
        """Keep the state after so many steps if that is due, or in any case."""
        if self._asked is None or not (always or self._is_due(at_reading)):
            return
        self._keep(self._asked, self._asked.folder, step)
        self._last_tokens, self._last_moment = self._state.tally.tokens, time.monotonic()

    def offer_others(self, step: int) -> None:
        """Keep the state after so many steps for other trials, where one is due; the trial itself never needs it."""
        asked, tokens = self._asked, self._state.tally.tokens
        if asked is not None and asked.shared is not None and tokens % asked.shared_tokens == 0:
            self._keep(asked, asked.shared / str(tokens), step)

    def _is_due(self, at_reading: bool) -> bool:
        assert self._asked is not None
        if self._asked.every_tokens:
            return self._state.tally.tokens - self._last_tokens >= self._asked.every_tokens
        return at_reading and time.monotonic() - self._last_moment >= AGE_SECONDS

    def _keep(self, asked: Checkpointing, folder: Path, step: int) -> None:
        self._state.watch.check()
        try:
            self._save(asked, folder, step)
        except (OSError, SafetensorError, TypeError) as error:
            self._remark(
                "failed", f"a checkpoint could not be kept ({type(error).__name__}: {error}); training went on"
            )

    def _save(self, asked: Checkpointing, folder: Path, step: int) -> None:
        tensors, plain = self._state.packed()
        tensors = self._group.whole(tensors)
        if not self._group.leads:
            return
        size = sum(tensor.nbytes for tensor in tensors.values())
        if asked.most_bytes and size > asked.most_bytes:
            self._remark(
                "large",
                f"no checkpoint was kept: it takes {size:,} bytes, of which engine.disk_bytes leaves "
                f"{asked.most_bytes:,} to each",
            )
            return
        identity = {"spec": self._spec_id, "micro_batch_tokens": self._micro_batch_tokens}
        header = {"version": VERSION, **identity, "step": step, **plain}
        write(folder, str(self._state.tally.tokens), tensors, header)

    def _remark(self, kind: str, words: str) -> None:
        """Say so, once of each kind."""
        if kind not in self._remarked:
            self._state.tally.remarks.append(words)
        self._remarked.add(kind)


def write(folder: Path, name: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Put a checkpoint in place of the one before; on an error that one stays."""
    put(folder, name, lambda partial: save_file(apart(tensors), str(partial)), header)


def put(folder: Path, name: str, fill: Callable[[Path], object], header: Mapping[str, Any]) -> None:
    """Put a checkpoint in place of the one before; on an error that one stays. `fill` writes its tensors to a file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.safetensors"
    partials = [path.with_name(f"{path.name}.partial") for path in (file, folder / HEADER)]
    try:
        fill(partials[0])
        whole = {**header, "tensors": file.name, "sha256": _sha256(partials[0])}
        partials[1].write_text(json.dumps({**whole, _KEY: _digest(whole)}))
        for partial in partials:
            _sync(partial)
        partials[0].replace(file)
        partials[1].replace(folder / HEADER)
        _sync(folder)
    except BaseException:
        for partial in partials:
            partial.unlink(missing_ok=True)
        raise
    for other in folder.iterdir():
        if other.name not in (file.name, HEADER):
            other.unlink(missing_ok=True)


def find(folder: Path, spec: str, micro_batch_tokens: int) -> Found | None:
    """The folder's checkpoint, read whole and checked; None when there is none.

    CheckpointRefused when it is torn, changed, or of another trial; `spec` is the id of the trial's spec.
    """
    try:
        text = (folder / HEADER).read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointRefused(f"the checkpoint {folder} cannot be read ({error})") from error
    try:
        header = json.loads(text)
        said = header.pop(_KEY)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointRefused(f"the checkpoint {folder} is no JSON of a checkpoint ({error})") from error
    if said != _digest(header):
        raise CheckpointRefused(f"the checkpoint {folder} was changed after it was written")
    if header["version"] != VERSION:
        raise CheckpointRefused(f"the checkpoint {folder} has version {header['version']}, this is {VERSION}")
    if header["spec"] != spec or header["micro_batch_tokens"] != micro_batch_tokens:
        raise CheckpointRefused(
            f"the checkpoint {folder} is of spec {header['spec']} with micro-batches of "
            f"{header['micro_batch_tokens']} tokens, the trial has spec {spec} with {micro_batch_tokens}"
        )
    tensors = folder / Path(header["tensors"]).name
    if not tensors.is_file() or _sha256(tensors) != header["sha256"]:
        raise CheckpointRefused(f"the checkpoint {tensors} is not whole")
    tally = header["tally"]
    curve = tuple(Reading(**reading) for reading in tally["curve"])
    return Found(step=header["step"], tokens=tally["tokens"], curve=curve, header=header, tensors=tensors)


def discard(folder: Path) -> None:
    """Delete the folder's checkpoint, whatever state it is in."""
    shutil.rmtree(folder, ignore_errors=True)


def size_bytes(folder: Path) -> int:
    """Bytes of all checkpoints in a folder of trials' folders; files that vanish meanwhile count nothing."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def _of_model(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter and buffer, once, those that are not stored with a model included."""
    return [*model.named_parameters(), *model.named_buffers()]


def _restore_optimizer(optimizer: torch.optim.Optimizer, kept: Mapping[str, Any]) -> None:
    """Set state and settings as they were; load_state_dict would change the types of some tensors."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for group, settings in zip(optimizer.param_groups, kept["param_groups"], strict=True):
        group.update({name: value for name, value in settings.items() if name != "params"})
    for index, state in kept["state"].items():
        optimizer.state[parameters[index]] = state


def _digest(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
