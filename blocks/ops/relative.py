"""Logits of queries against vectors that belong to distances, and their layout over pairs."""

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from blocks.ops.precision import full_precision


def by_pair(scores: Float[Tensor, "B H T N"], row: Int[Tensor, "T S"]) -> Float[Tensor, "B H T S"]:
    """For every query and key the score of the pair's row: what Transformer-XL calls a relative shift, by gathering."""
    return scores.gather(-1, row.expand(*scores.shape[:2], *row.shape))


def against_rows(q: Float[Tensor, "B T H K"], rows: Float[Tensor, "N #H K"]) -> Float[Tensor, "B H T N"]:
    """Products of each query with each row, in float32 or wider; rows may be shared by heads."""
    wide = torch.promote_types(q.dtype, torch.float32)
    with full_precision(q.device):
        return einsum(q.to(wide), rows.to(wide).expand(-1, q.shape[2], -1), "B T H K, N H K -> B H T N")


def projected_rows(x: Float[Tensor, "N D"], weight: Float[Tensor, "E D"], heads: int) -> Float[Tensor, "N H K"]:
    """Rows mapped to one vector per head, in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    with full_precision(x.device):
        return rearrange(x.to(wide) @ weight.to(wide).T, "N (H K) -> N H K", H=heads)
