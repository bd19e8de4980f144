"""A running sum that repeats its numbers on every device."""

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor


def running_sum(x: Float[Tensor, "B N *A"]) -> Float[Tensor, "B N *A"]:
    """Sums over entries 0..n of axis 1, for each n; a product with a triangle, for axes of up to some thousands.

    On CUDA, cumsum adds in no fixed order and is refused in deterministic mode.
    """
    triangle = torch.ones(x.shape[1], x.shape[1], device=x.device, dtype=x.dtype).tril()
    return einsum(triangle, x, "N M, B M ... -> B N ...")
