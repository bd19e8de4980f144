"""A mixer of a user's own that can go wrong in every way a trial can; imported by workers only."""

import ctypes
import os
import signal
import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from blocks.families import AbstractMixer, Dims, HeadShape, Hook, MixerModule
from blocks.mixers.softmax import Softmax
from blocks.registry import register
from search_space.domains import choice

LATE_SECONDS = 14.0
"""How long a model takes to be built that is late."""


def _hang() -> None:
    while True:
        time.sleep(0.01)


def _raise() -> None:
    raise RuntimeError("this mixer always raises")


def _devour() -> None:
    """Take memory until there is none."""
    held = []
    while True:
        held.append(torch.ones(2**24))


def _fill() -> None:
    """Write to a disk that is full."""
    with open("/dev/full", "w") as file:
        file.write("no room")


def _on_meta() -> bool:
    return torch.empty(0).device.type == "meta"


WAYS = {
    "none": lambda: None,
    "slow": lambda: time.sleep(0.25),
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": _hang,
    "memory": lambda: torch.empty(2**58),
    "devour": _devour,
    "disk": _fill,
    "late": lambda: None,
    "raise": _raise,
    "nan": lambda: None,
}


@register
@dataclass(frozen=True, kw_only=True)
class Misbehaving(AbstractMixer):
    """Softmax attention that goes wrong when it first computes."""

    kind: ClassVar[str] = "misbehaving"
    paper: ClassVar[str] = "none: made for tests"
    offers: ClassVar[frozenset[Hook]] = frozenset(Hook)

    way: str = choice(*WAYS, default="none", help="How it goes wrong")

    def build(self, dims: Dims) -> MixerModule:
        if self.way == "late" and not _on_meta():
            time.sleep(LATE_SECONDS)
        module = Softmax(kv_heads=1, queries_per_kv=1, head_dim=8, qk_norm="none").build(dims)
        module.register_forward_pre_hook(self._go_wrong)
        if self.way == "nan":
            module.register_forward_hook(_spoil)
        return module

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=1, kv_heads=1, head_dim=8)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        return Softmax(kv_heads=1, queries_per_kv=1, head_dim=8).flops_per_token(dims, length, causal)

    def _go_wrong(self, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        if given[0].device.type != "meta":
            print(f"about to {self.way}", flush=True)
            WAYS[self.way]()


def _spoil(module: nn.Module, given: tuple[Tensor, ...], made: object) -> object:
    output, *rest = made if isinstance(made, tuple) else (made,)
    assert isinstance(output, Tensor)
    spoiled = output * float("nan")
    return (spoiled, *rest) if isinstance(made, tuple) else spoiled
