"""Relative logits of Transformer-XL: content and place of a key are weighed apart."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import einsum, repeat
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import AbstractPosition, Dims, Direction, HeadShape, Hook, PositionModule, Role, linear, mark
from blocks.ops.distance import distances
from blocks.ops.precision import full_precision
from blocks.ops.relative import against_rows, by_pair, projected_rows
from blocks.positions.sinusoidal import sinusoids
from blocks.registry import register


class TransformerXLModule(PositionModule):
    """Adds (u k_j + (q_i + v) W R_(i-j)) / sqrt(K); R are sinusoids of the distance, u and v one vector per head.

    W, u and v are shared by all layers; u and v start at zero.
    """

    def __init__(self, d_model: int, heads: HeadShape, direction: Direction) -> None:
        super().__init__()
        self.causal = direction == Direction.CAUSAL
        self.place = linear(d_model, heads.heads * heads.head_dim, Role.KEY)
        self.content_query = mark(nn.Parameter(torch.zeros(heads.heads, heads.head_dim)), Role.BIAS)
        self.place_query = mark(nn.Parameter(torch.zeros(heads.heads, heads.head_dim)), Role.BIAS)

    def content_bias(
        self, q: Float[Tensor, "B T H K"], k: Float[Tensor, "B S G K"], start: int = 0
    ) -> Float[Tensor, "B H T S"]:
        n_query, n_key, heads, head_dim = q.shape[1], k.shape[1], q.shape[2], q.shape[3]
        wide = torch.promote_types(q.dtype, torch.float32)
        nearest = 0 if self.causal else start - n_key + 1
        sines = sinusoids(nearest, start + n_query - nearest, self.place.in_features, q.device, wide)
        rows = projected_rows(sines, self.place.weight, heads)
        place = against_rows(q.to(wide) + self.place_query.to(wide), rows)
        row = (distances(n_query, n_key, start, q.device) - nearest).clamp_min(0)
        with full_precision(q.device):
            content = einsum(
                repeat(k.to(wide), "B S G K -> B S (G R) K", R=heads // k.shape[2]),
                self.content_query.to(wide),
                "B S H K, H K -> B H S",
            )
        return (by_pair(place, row) + content[:, :, None]) * head_dim**-0.5


@register
@dataclass(frozen=True, kw_only=True)
class TransformerXL(AbstractPosition):
    """Queries are compared with a key's content and with its distance apart, each with a preference per head."""

    kind: ClassVar[str] = "transformer_xl"
    paper: ClassVar[str] = (
        "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context, section 3.3, Dai et al. 2019, "
        "arXiv:1901.02860"
    )
    proof: ClassVar[str] = "test_transformer_xl_equals_xlnet_in_both_directions"
    reference: ClassVar[str] = "transformers XLNetRelativeAttention"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.CONTENT_BIAS})

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        return TransformerXLModule(dims.d_model, heads, dims.direction)

    def flops_per_token(self, dims: Dims, heads: HeadShape, length: int, causal: bool) -> float:
        width = heads.heads * heads.head_dim
        keys = (length + 1) / 2 if causal else float(length)
        rows_per_query = 1.0 if dims.direction == Direction.CAUSAL else (2 * length - 1) / length
        return 2.0 * width * (dims.d_model * rows_per_query + keys * rows_per_query + 1)
