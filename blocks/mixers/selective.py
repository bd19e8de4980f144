"""Selective attention: a token can hide earlier tokens from all that come after it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from blocks.families import (
    AbstractMixer,
    Context,
    Dims,
    HeadShape,
    Hook,
    MixerModule,
    PositionModule,
    State,
)
from blocks.mixers import heads as attention
from blocks.mixers.projections import appended, join_heads, projections, split_heads
from blocks.ops.alignment import first_live, rolled
from blocks.ops.attention import visible_keys, weighted_values
from blocks.ops.running_sum import running_sum
from blocks.ops.scores import masked_softmax, scaled_logits
from blocks.registry import register


def hidden_by(
    logits: Float[Tensor, "B T S"], seen: Bool[Tensor, "#B T S"], first: Bool[Tensor, "#B S"]
) -> Float[Tensor, "B T S"]:
    """How much each query hides each key from later queries: the positive logits of one head (section 3.1).

    No token hides itself, and none hides the first of its text.
    """
    n_query, n_key = logits.shape[1:]
    own = F.pad(torch.eye(n_query, dtype=torch.bool, device=logits.device), (n_key - n_query, 0))
    return logits.relu().masked_fill(own | ~seen | first[:, None], 0.0)


class SelectiveModule(MixerModule):
    """Softmax attention over logits less what the queries in between hid; the first head decides for all.

    What hides is the logit before any bias of positions.
    """

    def __init__(self, *, d_model: int, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.query, self.key, self.value, self.out = projections(d_model, shape)
        self.backends = {"attention": "reference (not sdpa: tokens hide others by what they attend to)"}

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        hidden = x.new_zeros(x.shape[:2])
        if context.live is None:
            return self._mix(*split_heads(self, x, self.shape), hidden, position, 0, None, context.segments)[0]
        shift = first_live(context.live)
        live = rolled(context.live, shift)
        segments = None if context.segments is None else rolled(context.segments, shift)
        heads = split_heads(self, rolled(x, shift), self.shape)
        return rolled(self._mix(*heads, hidden, position, 0, live, segments)[0], -shift)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        shape = (batch, 0, self.shape.kv_heads, self.shape.head_dim)
        wide = torch.promote_types(dtype, torch.float32)
        rows = {name: torch.zeros(shape, device=device, dtype=dtype) for name in ("k", "v")}
        return {**rows, "hidden": torch.zeros(batch, 0, device=device, dtype=wide)}

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        q, k, v = split_heads(self, x, self.shape)
        kept = {name: appended(state[name], new) for name, new in (("k", k), ("v", v))}
        before = F.pad(state["hidden"], (0, x.shape[1]))
        y, hidden = self._mix(q, kept["k"].to(k.dtype), kept["v"].to(v.dtype), before, position, start, None, None)
        return y, {**kept, "hidden": hidden.to(before.dtype)}

    def _mix(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B S G K"],
        v: Float[Tensor, "B S G K"],
        hidden: Float[Tensor, "B S"],
        position: PositionModule,
        start: int,
        live: Bool[Tensor, "B S"] | None,
        segments: Int[Tensor, "B S"] | None,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B S"]]:
        """The output, and how much of each key is hidden after the last query; `hidden` is that before the first."""
        n_query, n_key = q.shape[1], k.shape[1]
        q, k = position.rotate(q, k, start)
        logits = scaled_logits(q, k, self.shape.head_dim**-0.5)
        seen = visible_keys(n_query, n_key, None, live, q.device, segments=segments)
        hiding = hidden_by(logits[:, 0], seen[:, 0], _first(n_key, segments, q.device))
        after = hidden[:, None].to(logits.dtype) + running_sum(hiding)
        before = torch.cat([hidden[:, None].to(logits.dtype), after[:, :-1]], dim=1)
        bias = position.score_bias(n_query, n_key, start)
        logits = logits - before[:, None] if bias is None else logits - before[:, None] + bias.to(logits.dtype)
        return join_heads(self, weighted_values(masked_softmax(logits, seen), v)), after[:, -1]


def _first(n_key: int, segments: Int[Tensor, "B S"] | None, device: torch.device) -> Bool[Tensor, "#B S"]:
    """True at the first key of every text."""
    if segments is None:
        return (torch.arange(n_key, device=device) == 0)[None]
    return F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)


@register
@dataclass(frozen=True, kw_only=True)
class Selective(AbstractMixer):
    """Softmax attention in which a token hides what later tokens no longer need; no further parameters."""

    kind: ClassVar[str] = "selective"
    paper: ClassVar[str] = "Selective Attention Improves Transformer, Leviathan et al. 2024, figure 2, arXiv:2410.02703"
    proof: ClassVar[str] = "test_selective_attention_equals_x_transformers"
    reference: ClassVar[str] = "x-transformers Attend(selective=True)"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING, Hook.ROTATE, Hook.SCALE, Hook.SCORE_BIAS})
    packs: ClassVar[bool] = True
    value_projection: ClassVar[bool] = True

    kv_heads: int = attention.kv_heads_field()
    queries_per_kv: int = attention.queries_per_kv_field()
    head_dim: int = attention.head_dim_field()

    def build(self, dims: Dims) -> MixerModule:
        return SelectiveModule(d_model=dims.d_model, shape=self.head_shape())

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.kv_heads * self.queries_per_kv, kv_heads=self.kv_heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        keys = attention.mean_visible(length, length) if causal else float(length)
        shape = self.head_shape()
        return attention.projection_flops(dims.d_model, shape) + attention.score_flops(shape, keys)
