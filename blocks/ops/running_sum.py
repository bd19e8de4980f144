"""A running sum that repeats its numbers on every device."""

import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Float
from torch import Tensor

BLOCK = 64
"""Entries summed by one product with a triangle; longer axes go by blocks, whose totals are summed alike."""


def running_sum(x: Float[Tensor, "B N *A"]) -> Float[Tensor, "B N *A"]:
    """Sums over entries 0..n of axis 1, for each n. All entries must be finite: each is multiplied by 0 or 1.

    On CUDA, cumsum adds in no fixed order and is refused in deterministic mode.
    """
    size = x.shape[1]
    if size <= BLOCK:
        triangle = torch.ones(size, size, device=x.device, dtype=x.dtype).tril()
        return einsum(triangle, x, "N M, B M ... -> B N ...")
    padded = F.pad(x, (0, 0) * (x.ndim - 2) + (0, -size % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK))
    within = running_sum(blocks.flatten(0, 1)).unflatten(0, blocks.shape[:2])
    before = F.pad(running_sum(within[:, :-1, -1]), (0, 0) * (x.ndim - 2) + (1, 0))
    return (within + before[:, :, None]).flatten(1, 2)[:, :size]
