"""Depthwise causal convolution over a few tokens."""

import torch
from jaxtyping import Float
from torch import Tensor


def short_convolution(
    x: Float[Tensor, "B T D"], taps: Float[Tensor, "D W"], history: Float[Tensor, "B R D"]
) -> Float[Tensor, "B T D"]:
    """y_t = sum_i taps[:, W-1-i] x_{t-i}; `history` holds the W - 1 inputs before the first."""
    width = taps.shape[1]
    assert history.shape[1] == width - 1, f"{history.shape[1]} rows of history for {width} taps"
    joined = torch.cat([history.to(x.dtype), x], dim=1)
    length = x.shape[1]
    y = joined[:, width - 1 :] * taps[:, width - 1]
    for tap in range(width - 1):
        y = y + joined[:, tap : tap + length] * taps[:, tap]
    return y
