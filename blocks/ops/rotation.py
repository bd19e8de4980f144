"""Rotation of channel pairs by position; channel i is paired with channel i + K/2 (half-split)."""

import torch
from jaxtyping import Float
from torch import Tensor


def angles(
    start: int, n_rows: int, head_dim: int, base: float, device: torch.device, dtype: torch.dtype
) -> Float[Tensor, "T 1 P"]:
    """Angle p * base^(-2i/K) of pair i at each position p of start..start + n_rows - 1."""
    position = torch.arange(start, start + n_rows, device=device, dtype=dtype)
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim
    return position[:, None, None] * (base**-exponent)


def rotate_pairs(x: Float[Tensor, "B T H K"], angle: Float[Tensor, "T 1 P"]) -> Float[Tensor, "B T H K"]:
    """Each pair turned by its angle, in the dtype of the angles."""
    first, second = x.to(angle.dtype).chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
