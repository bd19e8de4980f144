"""Attention in its plain form, for mixers whose weights no fused kernel can give: logits, what hides them, softmax.

Everything is computed in float32 or wider. Queries are the last T of S keys; hidden weights are exactly zero, and a row
that sees nothing is all zeros.
"""

import torch
from einops import einsum, repeat
from jaxtyping import Bool, Float
from torch import Tensor

from blocks.ops.precision import full_precision


def scaled_logits(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S G K"],
    scale: float,
    bias: Float[Tensor, "H T S"] | None = None,
) -> Float[Tensor, "B H T S"]:
    """scale * q.k + bias for every query head and key; each key/value head serves H // G query heads."""
    wide = torch.promote_types(q.dtype, torch.float32)
    with full_precision(q.device):
        keys = repeat(k, "B S G K -> B S (G R) K", R=q.shape[2] // k.shape[2])
        logits = einsum(q.to(wide), keys.to(wide), "B T H K, B S H K -> B H T S") * scale
        return logits if bias is None else logits + bias.to(wide)


def masked_softmax(logits: Float[Tensor, "*A S"], visible: Bool[Tensor, "*M S"]) -> Float[Tensor, "*A S"]:
    """Softmax over the visible entries of each row; zero at the others, and everywhere in a row without any."""
    lowest = torch.finfo(logits.dtype).min
    return torch.softmax(logits.masked_fill(~visible, lowest), dim=-1).masked_fill(~visible, 0.0)
