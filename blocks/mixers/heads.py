"""What the attention mixers share: their fields, the norm of queries and keys, and the module."""

import math
from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import Context, Direction, HeadShape, MixerModule, PositionModule, Role, State, linear, mark
from blocks.mixers.attention_options import PLAIN, AttentionOptions, OutputGate, ShapedSoftmax
from blocks.ops.attention import (
    AttentionNeeds,
    attention_weights,
    choose_attention,
    entropy,
    visible_keys,
    weighted_values,
)
from search_space.domains import choice, float_range


def kv_heads_field() -> Any:
    """Number of key/value heads."""
    return choice(1, 2, 4, 8, default=4, help="key/value heads; what decoding keeps per token grows with them")


def queries_per_kv_field() -> Any:
    """Query heads per key/value head."""
    return choice(1, 2, 4, 8, default=1, help="query heads served by each key/value head; 1 is multi-head attention")


def head_dim_field() -> Any:
    """Channels per head."""
    return choice(8, 16, 32, 64, 128, default=32, help="channels per head; heads x head_dim need not equal d_model")


def qk_norm_field() -> Any:
    """Normalisation of queries and keys."""
    return choice(
        "none",
        "l2",
        "rms",
        "layer",
        default="none",
        help="norm of each head's queries and keys, before rotation: rms and layer with a gain per channel; l2 to unit "
        "length with a learned temperature per head",
    )


def attention_dropout_field() -> Any:
    """Dropout on attention weights."""
    return float_range(0.0, 0.5, default=0.0, opt_in=True, help="probability of dropping an attention weight")


def entropy_weight_field() -> Any:
    """Weight of the entropy term."""
    return float_range(
        -0.1,
        0.1,
        default=0.0,
        opt_in=True,
        help="weight of the mean attention entropy in the loss: above 0 sharpens attention, below 0 spreads it",
    )


class UnitNorm(nn.Module):
    """Rows of unit length."""

    def forward(self, x: Float[Tensor, "B T H K"]) -> Float[Tensor, "B T H K"]:
        return nn.functional.normalize(x, dim=-1, eps=1e-6)


class ScaledUnitNorm(nn.Module):
    """Rows whose length is a learned scalar per head (Henry et al. 2020, eq. 4), starting at their log2(N^2 - N)."""

    def __init__(self, heads: int, length: int) -> None:
        super().__init__()
        start = math.log2(max(length * length - length, 2))
        self.temperature = mark(nn.Parameter(torch.full((heads,), start)), Role.SCALAR)

    def forward(self, x: Float[Tensor, "B T H K"]) -> Float[Tensor, "B T H K"]:
        return nn.functional.normalize(x, dim=-1, eps=1e-6) * self.temperature[:, None]


class Wide(nn.Module):
    """A norm computed in float32 or wider, its output in the dtype of its input."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Float[Tensor, "B T H K"]) -> Float[Tensor, "B T H K"]:
        return self.norm(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)


def _rms(head_dim: int) -> nn.Module:
    norm = nn.RMSNorm(head_dim, eps=1e-6)
    mark(norm.weight, Role.GAIN)
    return Wide(norm)


def _layer(head_dim: int) -> nn.Module:
    norm = nn.LayerNorm(head_dim, bias=False)
    mark(norm.weight, Role.GAIN)
    return Wide(norm)


QkNorm = tuple[nn.Module, nn.Module, float]
"""The norm of queries, the norm of keys, and the factor on their dot product."""

_QK_NORMS: dict[str, Callable[[HeadShape, int], QkNorm]] = {
    "none": lambda shape, length: (nn.Identity(), nn.Identity(), shape.head_dim**-0.5),
    "l2": lambda shape, length: (Wide(ScaledUnitNorm(shape.heads, length)), Wide(UnitNorm()), 1.0),
    "rms": lambda shape, length: (_rms(shape.head_dim), _rms(shape.head_dim), shape.head_dim**-0.5),
    "layer": lambda shape, length: (_layer(shape.head_dim), _layer(shape.head_dim), shape.head_dim**-0.5),
}


class AttentionModule(MixerModule):
    """Multi-head softmax attention over all tokens that the direction allows, or over a window of them.

    Each of the projections, the norm of queries and keys, the rotation, the biased softmax and the gate acts in that
    order.
    """

    def __init__(
        self,
        *,
        d_model: int,
        shape: HeadShape,
        window: int | None,
        qk_norm: str,
        train_len: int,
        attention_dropout: float,
        entropy_weight: float,
        direction: Direction = Direction.CAUSAL,
        options: AttentionOptions = PLAIN,
    ) -> None:
        super().__init__()
        self.causal = direction == Direction.CAUSAL
        self.shape = shape
        self.window = window
        self.attention_dropout = attention_dropout
        self.entropy_weight = entropy_weight
        self.query = linear(d_model, shape.heads * shape.head_dim, Role.QUERY)
        self.key = linear(d_model, shape.kv_heads * shape.head_dim, Role.KEY)
        self.value = linear(d_model, shape.kv_heads * shape.head_dim, Role.VALUE)
        self.out = linear(shape.heads * shape.head_dim, d_model, Role.MIXER_OUT)
        self.query_norm, self.key_norm, self.scale = _QK_NORMS[qk_norm](shape, train_len)
        self.gate = None if options.gate == "none" else OutputGate(d_model, shape, options.gate)
        self.shaped = ShapedSoftmax(shape, options) if options.shaped else None
        chosen = choose_attention(AttentionNeeds(weights=entropy_weight != 0, shaped=options.shaped))
        self.attend = chosen.run
        self.backends = {"attention": chosen.record}

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        q, k, v = self._project(x)
        return self._mix(x, q, k, v, position, 0, context, self._seen(context))

    def _mix(
        self,
        x: Float[Tensor, "B T D"],
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B S G K"],
        v: Float[Tensor, "B S G K"],
        position: PositionModule,
        start: int,
        context: Context,
        seen: dict[str, Any],
    ) -> Float[Tensor, "B T D"]:
        """Queries at places start.. of the keys at hand, attending and mapped back to the model width."""
        bias = _bias(position, q, k, start)
        rotated_q, rotated_k = position.rotate(q, k, start)
        dropout = self.attention_dropout if self.training else 0.0
        weights = None
        if self.shaped is not None:
            visible = visible_keys(q.shape[1], k.shape[1], device=q.device, **seen)
            mixed, weights = self.shaped(
                q, rotated_q, rotated_k, v, scale=self.scale, bias=bias, seen=visible, dropout=dropout
            )
        elif self.entropy_weight == 0:
            mixed = self.attend(rotated_q, rotated_k, v, scale=self.scale, bias=bias, dropout=dropout, **seen)
        else:
            weights = attention_weights(rotated_q, rotated_k, scale=self.scale, bias=bias, **seen)
            mixed = weighted_values(weights, v, dropout)
        if self.entropy_weight != 0 and weights is not None:
            context.losses.append(self.entropy_weight * self._mean_entropy(weights, context))
        return self._join(mixed if self.gate is None else self.gate(mixed, x))

    def _seen(self, context: Context) -> dict[str, Any]:
        """What decides which keys a query sees, as attention takes it."""
        return {
            "window": self.window,
            "live": context.live,
            "causal": self.causal,
            "segments": context.segments,
            "prefix": context.prefix,
        }

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        kept = 0 if self.window is None else self.window - 1
        shape = (batch, kept, self.shape.kv_heads, self.shape.head_dim)
        return {name: torch.zeros(shape, device=device, dtype=dtype) for name in ("k", "v")}

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        return self._further(x, state, position, start, Context())

    def begin(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule
    ) -> tuple[Float[Tensor, "B T D"], State]:
        return self._further(x, state, position, 0, Context(prefix=x.shape[1]))

    def _further(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int, context: Context
    ) -> tuple[Float[Tensor, "B T D"], State]:
        q, k, v = self._project(x)
        # Rotations and biases depend on distances only, so the keys at hand count from 0 wherever the window stands.
        unused = max(state["k"].shape[1] - start, 0)
        keys, values = (
            torch.cat([state[name].to(new.dtype), new], dim=1)[:, unused:] for name, new in (("k", k), ("v", v))
        )
        n_query, n_key = x.shape[1], keys.shape[1]
        y = self._mix(x, q, keys, values, position, n_key - n_query, context, self._seen(context))
        return y, {name: self._kept(state[name], new) for name, new in (("k", k), ("v", v))}

    def _kept(self, old: Float[Tensor, "B S G K"], new: Float[Tensor, "B T G K"]) -> Float[Tensor, "B U G K"]:
        joined = torch.cat([old, new.to(old.dtype)], dim=1)
        return joined if self.window is None else joined[:, joined.shape[1] - (self.window - 1) :]

    def _project(
        self, x: Float[Tensor, "B T D"]
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T G K"], Float[Tensor, "B T G K"]]:
        head_dim = self.shape.head_dim
        q, k, v = (
            rearrange(project(x), "B T (H K) -> B T H K", K=head_dim) for project in (self.query, self.key, self.value)
        )
        return self.query_norm(q), self.key_norm(k), v

    def _join(self, mixed: Float[Tensor, "B T H K"]) -> Float[Tensor, "B T D"]:
        return self.out(rearrange(mixed, "B T H K -> B T (H K)"))

    def _mean_entropy(self, weights: Float[Tensor, "B H T S"], context: Context) -> Float[Tensor, ""]:
        rows = entropy(weights)
        if context.live is None:
            return rows.mean()
        live = context.live[:, None].to(rows.dtype)
        return (rows.mean(1, keepdim=True) * live).sum() / live.sum().clamp_min(1.0)


def _bias(
    position: PositionModule, q: Float[Tensor, "B T H K"], k: Float[Tensor, "B S G K"], start: int
) -> Float[Tensor, "*#B H T S"] | None:
    """The sum of both biases a position scheme may have."""
    fixed, content = position.score_bias(q.shape[1], k.shape[1], start), position.content_bias(q, k, start)
    if fixed is None or content is None:
        return content if fixed is None else fixed
    return fixed + content


def projection_flops(d_model: int, shape: HeadShape) -> float:
    """FLOPs per token of the query, key, value and output projections."""
    return 2.0 * d_model * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)


def score_flops(shape: HeadShape, keys_per_query: float) -> float:
    """FLOPs per token of the logits and of the weighted values."""
    return 4.0 * shape.heads * shape.head_dim * keys_per_query


def mean_visible(length: int, window: int) -> float:
    """Keys a query sees on average over a causal sequence, at most `window` each."""
    full = min(window, length)
    return (full * (full + 1) / 2 + (length - full) * full) / length
