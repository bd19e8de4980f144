"""Differential attention: the difference of two softmax maps, so that what both attend to cancels."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import (
    AbstractMixer,
    Context,
    Dims,
    HeadShape,
    Hook,
    InfeasibleArchitecture,
    MixerModule,
    PositionModule,
    Role,
    State,
    mark,
)
from blocks.mixers import heads as attention
from blocks.mixers.projections import appended, join_heads, projections, split_heads
from blocks.ops.attention import AttentionNeeds, choose_attention
from blocks.registry import register
from search_space.domains import choice

NORM_EPS = 1e-5
LAMBDA_STD = 0.1


def first_lambda(layer: int) -> float:
    """0.8 - 0.6 exp(-0.3 l) for layer l, counted from 0 (Ye et al. 2024, section 2.1)."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


class DifferentialModule(MixerModule):
    """(softmax(q1 k1) - lambda softmax(q2 k2)) v with values twice as wide, normalised by head.

    Head i is the pair of maps i and i + H/2; both maps of a pair see the same positions.
    """

    def __init__(self, *, d_model: int, shape: HeadShape, layer: int) -> None:
        super().__init__()
        self.shape = shape
        self.query, self.key, self.value, self.out = projections(d_model, shape)
        self.first_lambda = first_lambda(layer)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            mark(nn.Parameter(torch.randn(shape.head_dim) * LAMBDA_STD), Role.SCALAR) for _ in range(4)
        )
        self.scale = shape.head_dim**-0.5
        chosen = choose_attention(AttentionNeeds())
        self.attend = chosen.run
        self.backends = {"attention": chosen.record}

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        q, k, v = split_heads(self, x, self.shape)
        return self._difference(q, k, v, position, 0, context)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        shape = (batch, 0, self.shape.kv_heads, self.shape.head_dim)
        return {name: torch.zeros(shape, device=device, dtype=dtype) for name in ("k", "v")}

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        q, k, v = split_heads(self, x, self.shape)
        kept = {name: appended(state[name], new) for name, new in (("k", k), ("v", v))}
        keys, values = kept["k"].to(k.dtype), kept["v"].to(v.dtype)
        return self._difference(q, keys, values, position, start, Context()), kept

    def weight_of_the_second(self) -> Float[Tensor, ""]:
        """lambda: the factor on the second map, one for all heads of the layer."""
        wide = torch.promote_types(self.lambda_q1.dtype, torch.float32)
        q1, k1, q2, k2 = (
            vector.to(wide) for vector in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2)
        )
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.first_lambda

    def _difference(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B S G K"],
        v: Float[Tensor, "B S G K"],
        position: PositionModule,
        start: int,
        context: Context,
    ) -> Float[Tensor, "B T D"]:
        bias = position.score_bias(q.shape[1], k.shape[1], start)
        values = torch.cat(v.chunk(2, dim=2), dim=-1)
        maps = []
        for one_q, one_k in zip(q.chunk(2, dim=2), k.chunk(2, dim=2), strict=True):
            rotated_q, rotated_k = position.rotate(one_q, one_k, start)
            maps.append(self.attend(rotated_q, rotated_k, values, scale=self.scale, bias=bias, live=context.live))
        wide = torch.promote_types(v.dtype, torch.float32)
        mixed = maps[0].to(wide) - self.weight_of_the_second().to(wide) * maps[1].to(wide)
        normed = nn.functional.rms_norm(mixed, mixed.shape[-1:], eps=NORM_EPS) * (1 - self.first_lambda)
        return join_heads(self, normed.to(v.dtype))


@register
@dataclass(frozen=True, kw_only=True)
class Differential(AbstractMixer):
    """Each head subtracts one softmax map from another: less weight on irrelevant tokens, same size as softmax."""

    kind: ClassVar[str] = "differential"
    paper: ClassVar[str] = "Differential Transformer, Ye et al. 2024, arXiv:2410.05258"
    proof: ClassVar[str] = "test_differential_attention_equals_diffllama"
    reference: ClassVar[str] = "transformers DiffLlamaAttention"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING, Hook.ROTATE, Hook.SCALE, Hook.SCORE_BIAS})
    value_projection: ClassVar[bool] = True

    kv_heads: int = choice(2, 4, 8, default=4, help="key/value heads; an even number, since they work in pairs")
    queries_per_kv: int = attention.queries_per_kv_field()
    head_dim: int = attention.head_dim_field()

    def build(self, dims: Dims) -> MixerModule:
        return self.build_at(dims, 0)

    def build_at(self, dims: Dims, layer: int) -> MixerModule:
        shape = HeadShape(heads=self.kv_heads * self.queries_per_kv, kv_heads=self.kv_heads, head_dim=self.head_dim)
        return DifferentialModule(d_model=dims.d_model, shape=shape, layer=layer)

    def head_shape(self) -> HeadShape:
        pairs = self.kv_heads // 2
        return HeadShape(heads=pairs * self.queries_per_kv, kv_heads=pairs, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        keys = attention.mean_visible(length, length) if causal else float(length)
        n_heads = self.kv_heads * self.queries_per_kv
        projections = 4.0 * dims.d_model * self.head_dim * (n_heads + self.kv_heads)
        return projections + 6.0 * n_heads * self.head_dim * keys

    def check(self, dims: Dims) -> None:
        if self.kv_heads % 2:
            raise InfeasibleArchitecture(
                f"model.mixer.differential.kv_heads must be even, since each head is the difference of two maps; got "
                f"{self.kv_heads}; choose {self.kv_heads + 1}"
            )
