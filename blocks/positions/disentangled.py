"""Disentangled attention: content to content, content to position, and position to content."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import AbstractPosition, Dims, Direction, HeadShape, Hook, PositionModule, Role, linear, mark
from blocks.ops.distance import distances
from blocks.ops.relative import against_rows, by_pair, projected_rows
from blocks.registry import register
from search_space.domains import choice

TERMS = 3
"""Products that make a logit; each is scaled by 1 / sqrt(3 K)."""
FIRST_STD = 0.02


class DisentangledModule(PositionModule):
    """Logits (q_i k_j + q_i K_r + k_j Q_r) / sqrt(3 K), r the clipped distance i - j.

    K_r and Q_r are two maps of one table of vectors; all three are shared by all layers. The rows are those of the
    published code: -span .. span - 1, of which a causal model uses 0 .. span - 1.
    """

    def __init__(self, d_model: int, heads: HeadShape, span: int, direction: Direction) -> None:
        super().__init__()
        self.nearest = 0 if direction == Direction.CAUSAL else -span
        self.last = span - 1
        rows = span - self.nearest
        self.vectors = mark(nn.Parameter(FIRST_STD * torch.randn(rows, d_model)), Role.BIAS_TABLE)
        self.query = linear(d_model, heads.heads * heads.head_dim, Role.QUERY)
        self.key = linear(d_model, heads.heads * heads.head_dim, Role.KEY)
        self.heads = heads.heads

    def rotate(
        self, q: Float[Tensor, "B T H K"], k: Float[Tensor, "B S G K"], start: int = 0
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B S G K"]]:
        return q * TERMS**-0.5, k

    def content_bias(
        self, q: Float[Tensor, "B T H K"], k: Float[Tensor, "B S G K"], start: int = 0
    ) -> Float[Tensor, "B H T S"]:
        keys = repeat(k, "B S G K -> B S (G R) K", R=self.heads // k.shape[2])
        place_keys, place_queries = (
            projected_rows(self.vectors, part.weight, self.heads) for part in (self.key, self.query)
        )
        row = distances(q.shape[1], k.shape[1], start, q.device).clamp(self.nearest, self.last) - self.nearest
        to_place = by_pair(against_rows(q, place_keys), row)
        to_content = rearrange(by_pair(against_rows(keys, place_queries), row.T), "B H S T -> B H T S")
        return (to_place + to_content) * (TERMS * q.shape[3]) ** -0.5


@register
@dataclass(frozen=True, kw_only=True)
class Disentangled(AbstractPosition):
    """Content is matched with content, content with distance, and distance with content, each by maps of its own."""

    kind: ClassVar[str] = "disentangled"
    paper: ClassVar[str] = (
        "DeBERTa: Decoding-enhanced BERT with Disentangled Attention, eq. 4, He et al. 2020, arXiv:2006.03654"
    )
    proof: ClassVar[str] = "test_disentangled_attention_equals_deberta"
    reference: ClassVar[str] = "transformers DisentangledSelfAttention of DeBERTa v2"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.CONTENT_BIAS, Hook.SCALE})

    span: int = choice(8, 16, 32, 64, default=16, help="distances from here on share one vector")

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        return DisentangledModule(dims.d_model, heads, min(self.span, dims.max_len), dims.direction)

    def canonical(self, dims: Dims) -> AbstractPosition:
        return dataclasses.replace(self, span=min(self.span, dims.max_len))

    def flops_per_token(self, dims: Dims, heads: HeadShape, length: int, causal: bool) -> float:
        width = heads.heads * heads.head_dim
        rows = min(self.span, dims.max_len) * (1 if dims.direction == Direction.CAUSAL else 2)
        return 2 * 2.0 * width * rows * (dims.d_model / length + 1)
