"""Low-rank attention: keys and values of a whole sequence projected to a few rows. For encoders of one length."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor, nn

from blocks.families import (
    AbstractMixer,
    Context,
    Dims,
    Direction,
    HeadShape,
    Hook,
    InfeasibleArchitecture,
    MixerModule,
    PositionModule,
    Role,
    mark,
)
from blocks.mixers import heads as attention
from blocks.mixers.projections import join_heads, projections, split_heads
from blocks.ops.alignment import first_live, rolled
from blocks.ops.attention import weighted_values
from blocks.ops.precision import full_precision
from blocks.ops.scores import scaled_logits
from blocks.registry import register
from search_space.domains import choice


class LinformerModule(MixerModule):
    """softmax(q (E k)^T) (F v), with E and F of `rank` rows and a column per place (Wang et al. 2020, eq. 7).

    E and F are shared by the heads of a layer. Padding is zero in both products: it adds nothing to any row.
    """

    def __init__(self, *, d_model: int, shape: HeadShape, rank: int, length: int) -> None:
        super().__init__()
        self.shape = shape
        self.query, self.key, self.value, self.out = projections(d_model, shape)
        self.along_k = mark(nn.Parameter(torch.empty(rank, length)), Role.KEY, fan_in=length, fan_out=rank)
        self.along_v = mark(nn.Parameter(torch.empty(rank, length)), Role.VALUE, fan_in=length, fan_out=rank)
        self.backends = {"attention": "reference (not sdpa: keys are projected along time)"}

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        if x.shape[1] > self.along_k.shape[1]:
            raise InfeasibleArchitecture(
                f"model.mixer.kind='linformer' has a column for each of {self.along_k.shape[1]} places and was run on "
                f"{x.shape[1]}; run it on at most {self.along_k.shape[1]}"
            )
        if context.live is None:
            return self._whole(x, None)
        shift = first_live(context.live)
        return rolled(self._whole(rolled(x, shift), rolled(context.live, shift)), -shift)

    def _whole(self, x: Float[Tensor, "B T D"], live: Bool[Tensor, "B T"] | None) -> Float[Tensor, "B T D"]:
        q, k, v = split_heads(self, x, self.shape)
        if live is not None:
            k, v = (rows * live[:, :, None, None] for rows in (k, v))
        wide = torch.promote_types(x.dtype, torch.float32)
        with full_precision(x.device):
            short_k, short_v = (
                einsum(along[:, : x.shape[1]].to(wide), rows.to(wide), "R T, B T G K -> B R G K")
                for along, rows in ((self.along_k, k), (self.along_v, v))
            )
        weights = torch.softmax(scaled_logits(q, short_k, self.shape.head_dim**-0.5), dim=-1)
        mixed = weighted_values(weights, short_v).to(v.dtype)
        return join_heads(self, mixed if live is None else mixed * live[:, :, None, None])


@register
@dataclass(frozen=True, kw_only=True)
class Linformer(AbstractMixer):
    """Keys and values of the whole text are pressed into `rank` rows: linear cost, one length, encoders only."""

    kind: ClassVar[str] = "linformer"
    paper: ClassVar[str] = "Linformer: Self-Attention with Linear Complexity, Wang et al. 2020, arXiv:2006.04768"
    proof: ClassVar[str] = "test_linformer_is_softmax_over_projected_rows"
    reference: ClassVar[str] = "softmax attention over projected keys and values"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING})
    directions: ClassVar[frozenset[Direction]] = frozenset({Direction.BIDIRECTIONAL})
    """Every row of keys mixes all places: no part of it could be kept from an earlier query."""

    kv_heads: int = attention.kv_heads_field()
    queries_per_kv: int = attention.queries_per_kv_field()
    head_dim: int = attention.head_dim_field()
    rank: int = choice(8, 16, 32, 64, default=16, help="rows that keys and values of a whole text are pressed into")

    def build(self, dims: Dims) -> MixerModule:
        return LinformerModule(d_model=dims.d_model, shape=self.head_shape(), rank=self.rank, length=dims.train_len)

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.kv_heads * self.queries_per_kv, kv_heads=self.kv_heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        shape = self.head_shape()
        pressing = 4.0 * self.rank * shape.kv_heads * shape.head_dim
        return attention.projection_flops(dims.d_model, shape) + attention.score_flops(shape, self.rank) + pressing

    def check(self, dims: Dims) -> None:
        if dims.max_len > dims.train_len:
            raise InfeasibleArchitecture(
                f"model.mixer.kind='linformer' has a column for each of the {dims.train_len} training places, and the "
                f"model is to run on {dims.max_len}; evaluate at {dims.train_len} or less, or choose another mixer"
            )
