"""What tests of position schemes share: sizes, draws, modules with every parameter drawn, and attention with biases."""

import dataclasses

import torch
from torch import Tensor

from blocks.families import Dims, Direction, HeadShape, PositionModule
from blocks.ops.distance import distances

CPU = torch.device("cpu")
DIMS = Dims(d_model=32, d_ff=64, layers=4, train_len=64, max_len=64)
LONG = dataclasses.replace(DIMS, max_len=256)
BOTH = dataclasses.replace(DIMS, direction=Direction.BIDIRECTIONAL)
SHAPE = HeadShape(heads=4, kv_heads=2, head_dim=16)
LENGTH = 37


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def filled(position: PositionModule) -> PositionModule:
    """The module in float64 and in evaluation, with every parameter drawn."""
    for index, parameter in enumerate(position.parameters()):
        parameter.data = draw(*parameter.shape, seed=100 + index)
    return position.double().eval()


def queries_and_keys(length: int = LENGTH, shape: HeadShape = SHAPE) -> tuple[Tensor, Tensor]:
    return draw(2, length, shape.heads, shape.head_dim), draw(2, length, shape.kv_heads, shape.head_dim, seed=1)


def past(length: int = LENGTH) -> Tensor:
    """True where a causal query may look."""
    return distances(length, length, 0, CPU) >= 0


def logits(position: PositionModule, q: Tensor, k: Tensor) -> Tensor:
    """Scaled logits with everything that the position scheme does to them."""
    total = 0.0
    for bias in (position.score_bias(q.shape[1], k.shape[1]), position.content_bias(q, k)):
        total = total if bias is None else total + bias
    q, k = position.rotate(q, k)
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return torch.einsum("bthk,bshk->bhts", q, keys) * q.shape[3] ** -0.5 + total
