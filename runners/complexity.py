"""Time and memory of each mixer against the length of the sequence, measured, with the exponents of their growth."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from blocks import registry
from blocks.decoding import MixerSlot
from blocks.families import AbstractMixer, Context, InfeasibleArchitecture
from blocks.model import ModelConfig
from runners.blocktable import small_model
from search_space.domains import Scalar

LENGTHS = (256, 512, 1024, 2048, 4096)
FITTED = 3
"""Exponents are fitted over so many of the longest lengths."""
D_MODEL = 64
REPEATS = 5
ENOUGH_SECONDS = 1.0
"""Repeats of one length end after so long, but for the first two."""
MOST_SECONDS = 8.0
"""A longer length is left out once a pass over it would take longer, going by the one before."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One mixer at one length: one sequence, forward and backward."""

    length: int
    seconds: float
    """The best of a few passes after one that warms up: what else runs on the machine only ever slows one."""
    saved_bytes: int
    """Kept from the forward for the backward pass, each storage once, without parameters."""
    peak_bytes: int
    """Most that both passes held at a time beside parameters and input; 0 on a CPU, which does not count it."""
    flops: float
    """Forward, by the mixer's closed form, masked pairs left out."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """One mixer over all lengths; exponents are slopes of logarithms, NaN with fewer than two lengths."""

    kind: str
    stack: str
    fields: str
    points: tuple[Point, ...]
    time_exponent: float
    memory_exponent: float
    flops_exponent: float


def measure(
    kinds: Sequence[str], lengths: Sequence[int] = LENGTHS, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Iterator[Growth]:
    """The growth of each mixer of these kinds, at its default settings and d_model 64, in the order given.

    A mixer that cannot be causal is measured as an encoder's.
    """
    for kind in kinds:
        stack, config = "decoder", None
        points: list[Point] = []
        for length in sorted(lengths):
            if len(points) > 1 and points[-1].seconds ** 2 / points[-2].seconds > MOST_SECONDS:
                break
            stack, config = _config(kind, length)
            points.append(_point(config, length, device, dtype))
        assert config is not None, "no length was given"
        yield Growth(
            kind=kind,
            stack=stack,
            fields=_fields(config.mixer),
            points=tuple(points),
            time_exponent=exponent(points, lambda point: point.seconds),
            memory_exponent=exponent(points, lambda point: point.peak_bytes or point.saved_bytes),
            flops_exponent=exponent(points, lambda point: point.flops),
        )


def exponent(points: Sequence[Point], of: Callable[[Point], float]) -> float:
    """The slope of log(value) over log(length), by least squares over the longest lengths."""
    last = points[-FITTED:]
    if len(last) < 2:
        return math.nan
    xs, ys = [math.log(point.length) for point in last], [math.log(of(point)) for point in last]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def _config(kind: str, length: int) -> tuple[str, ModelConfig]:
    sizes: dict[str, Scalar] = {"d_model": D_MODEL, "layers": 1, "mixer.kind": kind, "position.kind": "sinusoidal"}
    refused = ""
    for stack in ("decoder", "encoder"):
        try:
            return stack, small_model({**sizes, "stack.kind": stack}, length)
        except InfeasibleArchitecture as error:
            refused = str(error)
    raise InfeasibleArchitecture(f"model.mixer.kind={kind!r} can be measured at {length} tokens in no stack: {refused}")


def _fields(mixer: AbstractMixer) -> str:
    plain = registry.encode(mixer)
    fields = plain.get(mixer.kind, plain)
    return ", ".join(f"{name} {value}" for name, value in fields.items() if name != "kind")


def _point(config: ModelConfig, length: int, device: str, dtype: torch.dtype) -> Point:
    model = config.build(0, device).to(dtype).train()
    slot = next(module for module in model.modules() if isinstance(module, MixerSlot))
    position = config.position.build(config.dims(), config.mixer.head_shape()).to(device)
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(1, length, config.d_model, generator=generator).to(device, dtype).requires_grad_()

    def run() -> Tensor:
        y: Tensor = slot(x, position, Context())
        return y

    saved = _saved(run)
    seconds, peak = _timed(run, slot, device)
    return Point(
        length=length,
        seconds=seconds,
        saved_bytes=saved,
        peak_bytes=peak,
        flops=config.mixer.flops_per_token(config.dims(), length, config.stack.predicts_next) * length,
    )


def _saved(run: Callable[[], Tensor]) -> int:
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for storage in storages.values())


def _timed(run: Callable[[], Tensor], slot: nn.Module, device: str) -> tuple[float, int]:
    found: list[float] = []
    held = 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    while len(found) < 2 or (len(found) <= REPEATS and sum(found) < ENOUGH_SECONDS):
        begun = time.perf_counter()
        run().sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
        slot.zero_grad(set_to_none=True)
    peak = torch.cuda.max_memory_allocated() - held if device == "cuda" else 0
    return min(found[1:]), peak
