"""Talking-heads attention: heads mix their logits before the softmax, their weights after it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import BOTH_DIRECTIONS, AbstractMixer, Dims, Direction, HeadShape, Hook, MixerModule, Role, mark
from blocks.mixers import heads as attention
from blocks.mixers.projections import Scene, WeighedAttention
from blocks.ops.attention import visible_keys
from blocks.ops.precision import full_precision
from blocks.ops.scores import masked_softmax, scaled_logits
from blocks.registry import register
from search_space.domains import choice


class TalkingRule(nn.Module):
    """Weights of a softmax between two mixes over the heads, each absent or a square matrix that starts as identity.

    Logits are mixed before positions bias them, so that a bias belongs to the head whose softmax it enters.
    """

    def __init__(self, heads: int, mixes: str, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        names = {"logits": ("before",), "weights": ("after",), "both": ("before", "after")}[mixes]
        self.mixes = nn.ParameterDict({name: mark(nn.Parameter(torch.eye(heads)), Role.SCALAR) for name in names})

    def forward(self, scene: Scene) -> Float[Tensor, "B H T S"]:
        logits = self._mixed("before", scaled_logits(scene.q, scene.k, scene.scale))
        if scene.bias is not None:
            logits = logits + scene.bias.to(logits.dtype)
        n_query, n_key = logits.shape[2:]
        seen = visible_keys(
            n_query, n_key, None, scene.live, logits.device, causal=self.causal, segments=scene.segments
        )
        return self._mixed("after", masked_softmax(logits, seen))

    def _mixed(self, name: str, rows: Float[Tensor, "B H T S"]) -> Float[Tensor, "B H T S"]:
        if name not in self.mixes:
            return rows
        with full_precision(rows.device):
            return einsum(self.mixes[name].to(rows.dtype), rows, "P H, B H T S -> B P T S")


@register
@dataclass(frozen=True, kw_only=True)
class TalkingHeads(AbstractMixer):
    """Heads exchange what they look at, by learned mixes of their logits, of their weights, or of both."""

    kind: ClassVar[str] = "talking_heads"
    paper: ClassVar[str] = "Talking-Heads Attention, Shazeer et al. 2020, arXiv:2003.02436"
    proof: ClassVar[str] = "test_talking_heads_equal_x_transformers"
    reference: ClassVar[str] = "x-transformers Attend(pre_talking_heads, post_talking_heads)"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING, Hook.ROTATE, Hook.SCALE, Hook.SCORE_BIAS})
    directions: ClassVar[frozenset[Direction]] = BOTH_DIRECTIONS
    packs: ClassVar[bool] = True
    value_projection: ClassVar[bool] = True

    kv_heads: int = choice(2, 4, 8, default=4, help="key/value heads; at least two, so that there is something to mix")
    queries_per_kv: int = attention.queries_per_kv_field()
    head_dim: int = attention.head_dim_field()
    mixes: str = choice(
        "both", "logits", "weights", default="both", help="what heads mix: logits before, weights after the softmax"
    )

    def build(self, dims: Dims) -> MixerModule:
        shape = self.head_shape()
        return WeighedAttention(
            d_model=dims.d_model,
            shape=shape,
            weigh=TalkingRule(shape.heads, self.mixes, dims.direction == Direction.CAUSAL),
            reason="heads mix their logits or weights",
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.kv_heads * self.queries_per_kv, kv_heads=self.kv_heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        keys = attention.mean_visible(length, length) if causal else float(length)
        shape = self.head_shape()
        mixing = (2.0 if self.mixes == "both" else 1.0) * 2.0 * shape.heads**2 * keys
        return attention.projection_flops(dims.d_model, shape) + attention.score_flops(shape, keys) + mixing
