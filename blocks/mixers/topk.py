"""Top-k attention: softmax over the largest logits of each row, nothing for the rest."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from blocks.families import BOTH_DIRECTIONS, AbstractMixer, Dims, Direction, HeadShape, Hook, MixerModule
from blocks.mixers import heads as attention
from blocks.mixers.projections import Scene, Weigh, WeighedAttention
from blocks.mixers.softmax import Softmax
from blocks.ops.attention import visible_keys
from blocks.ops.scores import masked_softmax, scaled_logits
from blocks.registry import register
from search_space.domains import choice

TIE = 64
"""Logits so many roundings apart count as equal."""


def top_rule(kept: int, causal: bool) -> Weigh:
    """Softmax over the `kept` largest visible logits of each row, all of them where ties reach further."""

    def weigh(scene: Scene) -> Float[Tensor, "B H T S"]:
        logits = scaled_logits(scene.q, scene.k, scene.scale, scene.bias)
        n_query, n_key = logits.shape[2:]
        seen = visible_keys(n_query, n_key, None, scene.live, logits.device, causal=causal, segments=scene.segments)
        if kept >= n_key:
            return masked_softmax(logits, seen)
        least = logits.detach().masked_fill(~seen, -float("inf")).topk(kept, dim=-1).values[..., -1:]
        # Equal keys may get logits that differ in their last bits, and not alike in decoding and in a full pass.
        slack = TIE * torch.finfo(logits.dtype).eps * (1 + least.abs())
        return masked_softmax(logits, seen & (logits >= least - slack))

    return weigh


@register
@dataclass(frozen=True, kw_only=True)
class Topk(AbstractMixer):
    """Every query attends to the `kept` keys with the largest logits only, whatever their distance."""

    kind: ClassVar[str] = "topk"
    paper: ClassVar[str] = (
        "Explicit Sparse Transformer: Concentrated Attention Through Explicit Selection, Zhao et al. 2019, "
        "arXiv:1912.11637"
    )
    proof: ClassVar[str] = "test_topk_equals_x_transformers"
    reference: ClassVar[str] = "x-transformers Attend(sparse_topk)"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING, Hook.ROTATE, Hook.SCALE, Hook.SCORE_BIAS})
    directions: ClassVar[frozenset[Direction]] = BOTH_DIRECTIONS
    packs: ClassVar[bool] = True
    value_projection: ClassVar[bool] = True

    kv_heads: int = attention.kv_heads_field()
    queries_per_kv: int = attention.queries_per_kv_field()
    head_dim: int = attention.head_dim_field()
    kept: int = choice(4, 8, 16, 32, 64, default=16, help="keys each query keeps, those with the largest logits")

    def build(self, dims: Dims) -> MixerModule:
        return WeighedAttention(
            d_model=dims.d_model,
            shape=self.head_shape(),
            weigh=top_rule(self.kept, dims.direction == Direction.CAUSAL),
            reason="it keeps the largest logits only",
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.kv_heads * self.queries_per_kv, kv_heads=self.kv_heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        """Every logit is formed to be compared; values are weighted as a whole row."""
        keys = attention.mean_visible(length, length) if causal else float(length)
        shape = self.head_shape()
        return attention.projection_flops(dims.d_model, shape) + attention.score_flops(shape, keys)

    def canonical(self, dims: Dims) -> AbstractMixer:
        if self.kept < dims.max_len:
            return self
        return Softmax(kv_heads=self.kv_heads, queries_per_kv=self.queries_per_kv, head_dim=self.head_dim)
