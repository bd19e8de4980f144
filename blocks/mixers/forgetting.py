"""Forgetting attention: each head lowers the logits of what lies before a gate that closed."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from blocks.families import (
    AbstractMixer,
    Context,
    Dims,
    HeadShape,
    Hook,
    MixerModule,
    PositionModule,
    Role,
    State,
    linear,
)
from blocks.mixers import heads as attention
from blocks.mixers.projections import appended, join_heads, projections, split_heads
from blocks.ops.attention import visible_keys, weighted_values
from blocks.ops.running_sum import running_sum
from blocks.ops.scores import masked_softmax, scaled_logits
from blocks.registry import register


def forgotten(log_gate: Float[Tensor, "B S H"], n_query: int) -> Float[Tensor, "B H T S"]:
    """The sum of log f over the tokens after each key, up to each query: the last T of S.

    A difference of two long sums loses digits: they are kept in float64, as a coarse part whose difference is exact
    to rounding, and what is left of it.
    """
    total = rearrange(running_sum(log_gate.double()), "B S H -> B H S")
    coarse = total.to(log_gate.dtype)
    rest = (total - coarse).to(log_gate.dtype)
    by_query = slice(log_gate.shape[1] - n_query, None)
    far, near = (part[:, :, by_query, None] - part[:, :, None, :] for part in (coarse, rest))
    return far + near


class ForgettingModule(MixerModule):
    """Logits plus the sum of log f over the tokens after the key, up to the query (Lin et al. 2025, eq. 5).

    f is the logistic function of a linear map of the token, one per query head. Padding forgets nothing.
    """

    def __init__(self, *, d_model: int, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.query, self.key, self.value, self.out = projections(d_model, shape)
        self.gate = linear(d_model, shape.heads, Role.QUERY, bias=True)
        self.backends = {"attention": "reference (not sdpa: its bias would be rounded to the dtype of the values)"}

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        log_gate = self.log_gates(x)
        if context.live is not None:
            log_gate = log_gate.masked_fill(~context.live[:, :, None], 0.0)
        return self._mix(*split_heads(self, x, self.shape), log_gate, position, 0, context.live)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        shape = (batch, 0, self.shape.kv_heads, self.shape.head_dim)
        wide = torch.promote_types(dtype, torch.float32)
        return {
            "k": torch.zeros(shape, device=device, dtype=dtype),
            "v": torch.zeros(shape, device=device, dtype=dtype),
            "log_gate": torch.zeros(batch, 0, self.shape.heads, device=device, dtype=wide),
        }

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        q, k, v = split_heads(self, x, self.shape)
        new = {"k": k, "v": v, "log_gate": self.log_gates(x)}
        kept = {name: appended(state[name], rows) for name, rows in new.items()}
        keys, values = kept["k"].to(k.dtype), kept["v"].to(v.dtype)
        return self._mix(q, keys, values, kept["log_gate"], position, start, None), kept

    def log_gates(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H"]:
        """log f of every token and query head, in float32 or wider."""
        raw = self.gate(x)
        return nn.functional.logsigmoid(raw.to(torch.promote_types(raw.dtype, torch.float32)))

    def _mix(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B S G K"],
        v: Float[Tensor, "B S G K"],
        log_gate: Float[Tensor, "B S H"],
        position: PositionModule,
        start: int,
        live: Bool[Tensor, "B S"] | None,
    ) -> Float[Tensor, "B T D"]:
        q, k = position.rotate(q, k, start)
        logits = scaled_logits(q, k, self.shape.head_dim**-0.5) + forgotten(log_gate, q.shape[1])
        weights = masked_softmax(logits, visible_keys(q.shape[1], k.shape[1], None, live, q.device))
        return join_heads(self, weighted_values(weights, v))


@register
@dataclass(frozen=True, kw_only=True)
class Forgetting(AbstractMixer):
    """Softmax attention with a forget gate per head: tokens fade by content, not by distance; needs no positions."""

    kind: ClassVar[str] = "forgetting"
    paper: ClassVar[str] = (
        "Forgetting Transformer: Softmax Attention with a Forget Gate, Lin et al. 2025, arXiv:2503.02130"
    )
    proof: ClassVar[str] = "test_forgetting_attention_equals_flash_linear_attention"
    reference: ClassVar[str] = "flash-linear-attention naive_forgetting_attn"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING, Hook.ROTATE})
    """No bias on the logits: the gate is one already."""
    value_projection: ClassVar[bool] = True

    kv_heads: int = attention.kv_heads_field()
    queries_per_kv: int = attention.queries_per_kv_field()
    head_dim: int = attention.head_dim_field()

    def build(self, dims: Dims) -> MixerModule:
        return ForgettingModule(d_model=dims.d_model, shape=self.head_shape())

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.kv_heads * self.queries_per_kv, kv_heads=self.kv_heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        shape = self.head_shape()
        keys = attention.mean_visible(length, length) if causal else float(length)
        gates = 2.0 * dims.d_model * shape.heads
        return attention.projection_flops(dims.d_model, shape) + gates + attention.score_flops(shape, keys)
