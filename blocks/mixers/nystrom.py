"""Nystrom attention: the softmax matrix rebuilt from its products with a few landmarks. For encoders."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import einsum, repeat
from jaxtyping import Bool, Float
from torch import Tensor

from blocks.families import (
    AbstractMixer,
    Context,
    Dims,
    Direction,
    HeadShape,
    Hook,
    MixerModule,
    PositionModule,
)
from blocks.mixers import heads as attention
from blocks.mixers.projections import join_heads, projections, split_heads
from blocks.ops.precision import full_precision
from blocks.ops.scores import masked_softmax, scaled_logits
from blocks.registry import register
from search_space.domains import choice

ITERATIONS = 6


def pseudo_inverse(a: Float[Tensor, "*A M M"], iterations: int = ITERATIONS) -> Float[Tensor, "*A M M"]:
    """The Moore-Penrose inverse of each matrix, approached by iteration (Xiong et al. 2021, eq. 11)."""
    identity = torch.eye(a.shape[-1], device=a.device, dtype=a.dtype)
    columns, rows = (a.abs().sum(axis).amax(-1)[..., None, None] for axis in (-2, -1))
    z = a.transpose(-1, -2) / (columns * rows).clamp_min(torch.finfo(a.dtype).tiny)
    for _ in range(iterations):
        product = a @ z
        z = 0.25 * z @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product)))
    return z


def shares(live: Bool[Tensor, "B T"], landmarks: int) -> Float[Tensor, "B T M"]:
    """The weight of each live token in the mean of its segment: `landmarks` segments of nearly equal length.

    Segments without a token, where a text is shorter than the number of landmarks, are all zeros.
    """
    place = live.cumsum(1) - 1
    segment = place * landmarks // live.sum(1, keepdim=True).clamp_min(1)
    member = (segment[:, :, None] == torch.arange(landmarks, device=live.device)) & live[:, :, None]
    return member / member.sum(1, keepdim=True).clamp_min(1)


def nystrom_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H K"],
    live: Bool[Tensor, "B T"],
    *,
    scale: float,
    landmarks: int,
    iterations: int = ITERATIONS,
) -> Float[Tensor, "B T H K"]:
    """softmax(q k_l) pinv(softmax(q_l k_l)) softmax(q_l k) v, with means of segments q_l and k_l as landmarks."""
    wide = torch.promote_types(q.dtype, torch.float32)
    with full_precision(q.device):
        share = shares(live, landmarks).to(wide)
        few_q, few_k = (einsum(share, rows.to(wide), "B T M, B T H K -> B M H K") for rows in (q, k))
        used = share.any(1)
        to_few = masked_softmax(scaled_logits(q, few_k, scale), used[:, None, None, :] & live[:, None, :, None])
        among = masked_softmax(scaled_logits(few_q, few_k, scale), used[:, None, None, :] & used[:, None, :, None])
        from_few = masked_softmax(scaled_logits(few_q, k, scale), live[:, None, None, :] & used[:, None, :, None])
        gathered = einsum(from_few, v.to(wide), "B H M T, B T H K -> B H M K")
        mixed = einsum(to_few, pseudo_inverse(among, iterations) @ gathered, "B H T M, B H M K -> B T H K")
        return mixed.to(v.dtype)


class NystromModule(MixerModule):
    """Nystrom attention without the convolution of values that the published model adds."""

    def __init__(self, *, d_model: int, shape: HeadShape, landmarks: int) -> None:
        super().__init__()
        self.shape, self.landmarks = shape, landmarks
        self.query, self.key, self.value, self.out = projections(d_model, shape)
        self.backends = {"attention": "reference (not sdpa: its weights are a product of three)"}

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        q, k, v = split_heads(self, x, self.shape)
        k, v = (repeat(rows, "B T G K -> B T (G R) K", R=self.shape.heads // self.shape.kv_heads) for rows in (k, v))
        live = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if context.live is None else context.live
        mixed = nystrom_attention(q, k, v, live, scale=self.shape.head_dim**-0.5, landmarks=self.landmarks)
        return join_heads(self, mixed)


@register
@dataclass(frozen=True, kw_only=True)
class Nystrom(AbstractMixer):
    """Every token attends to every other by way of a few landmarks, means of segments: linear cost, encoders only."""

    kind: ClassVar[str] = "nystrom"
    paper: ClassVar[str] = (
        "Nystromformer: A Nystrom-Based Algorithm for Approximating Self-Attention, Xiong et al. 2021, arXiv:2102.03902"
    )
    proof: ClassVar[str] = "test_nystrom_equals_transformers"
    reference: ClassVar[str] = "transformers NystromformerSelfAttention"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING})
    directions: ClassVar[frozenset[Direction]] = frozenset({Direction.BIDIRECTIONAL})
    """A landmark is a mean over a segment, later tokens included."""
    value_projection: ClassVar[bool] = True

    kv_heads: int = attention.kv_heads_field()
    queries_per_kv: int = attention.queries_per_kv_field()
    head_dim: int = attention.head_dim_field()
    landmarks: int = choice(4, 8, 16, 32, default=8, help="means of segments that stand for the whole text")

    def build(self, dims: Dims) -> MixerModule:
        return NystromModule(d_model=dims.d_model, shape=self.head_shape(), landmarks=self.landmarks)

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.kv_heads * self.queries_per_kv, kv_heads=self.kv_heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        shape, m = self.head_shape(), float(self.landmarks)
        width = shape.heads * shape.head_dim
        through = 2.0 * m * width * 4
        means = 4.0 * m * width
        among = (2.0 * m * m * width * 2 + 2.0 * shape.heads * m**3 * 4 * ITERATIONS) / length
        return attention.projection_flops(dims.d_model, shape) + through + means + among
