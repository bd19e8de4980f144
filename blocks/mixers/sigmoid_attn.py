"""Sigmoid attention: each weight decided alone, by a logistic function in place of the softmax."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from blocks.families import BOTH_DIRECTIONS, AbstractMixer, Dims, Direction, HeadShape, Hook, MixerModule
from blocks.mixers import heads as attention
from blocks.mixers.projections import Scene, Weigh, WeighedAttention
from blocks.ops.attention import visible_keys
from blocks.ops.scores import scaled_logits
from blocks.registry import register


def sigmoid_rule(length: int, causal: bool) -> Weigh:
    """Weights logistic(logit - log n) at a fixed n, so that a row over n keys starts near one in sum."""
    shift = math.log(length)

    def weigh(scene: Scene) -> Float[Tensor, "B H T S"]:
        logits = scaled_logits(scene.q, scene.k, scene.scale, scene.bias)
        n_query, n_key = logits.shape[2:]
        seen = visible_keys(n_query, n_key, None, scene.live, logits.device, causal=causal, segments=scene.segments)
        return torch.sigmoid(logits - shift).masked_fill(~seen, 0.0)

    return weigh


@register
@dataclass(frozen=True, kw_only=True)
class SigmoidAttention(AbstractMixer):
    """Every weight is a logistic function of its own logit: no competition between tokens, and no attention sinks."""

    kind: ClassVar[str] = "sigmoid_attn"
    paper: ClassVar[str] = (
        "Theory, Analysis, and Best Practices for Sigmoid Self-Attention, Ramapuram et al. 2024, arXiv:2409.04431"
    )
    proof: ClassVar[str] = "test_sigmoid_attention_equals_x_transformers_with_the_shift_as_a_bias"
    reference: ClassVar[str] = "x-transformers Attend(sigmoid=True)"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING, Hook.ROTATE, Hook.SCALE, Hook.SCORE_BIAS})
    directions: ClassVar[frozenset[Direction]] = BOTH_DIRECTIONS
    packs: ClassVar[bool] = True
    value_projection: ClassVar[bool] = True

    kv_heads: int = attention.kv_heads_field()
    queries_per_kv: int = attention.queries_per_kv_field()
    head_dim: int = attention.head_dim_field()

    def build(self, dims: Dims) -> MixerModule:
        return WeighedAttention(
            d_model=dims.d_model,
            shape=self.head_shape(),
            weigh=sigmoid_rule(dims.train_len, dims.direction == Direction.CAUSAL),
            reason="its weights are not a softmax",
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.kv_heads * self.queries_per_kv, kv_heads=self.kv_heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        keys = attention.mean_visible(length, length) if causal else float(length)
        shape = self.head_shape()
        return attention.projection_flops(dims.d_model, shape) + attention.score_flops(shape, keys)
