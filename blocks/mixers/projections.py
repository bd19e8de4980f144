"""What mixers with query, key and value heads share: projections, and attention by a rule of its own with a cache."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from blocks.families import Context, HeadShape, MixerModule, PositionModule, Role, State, linear
from blocks.ops.alignment import first_live, rolled
from blocks.ops.attention import weighted_values

Heads = tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T G K"], Float[Tensor, "B T G K"]]


def projections(d_model: int, shape: HeadShape) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
    """The maps to queries, keys and values of every head, and back to the model width."""
    return (
        linear(d_model, shape.heads * shape.head_dim, Role.QUERY),
        linear(d_model, shape.kv_heads * shape.head_dim, Role.KEY),
        linear(d_model, shape.kv_heads * shape.head_dim, Role.VALUE),
        linear(shape.heads * shape.head_dim, d_model, Role.MIXER_OUT),
    )


def split_heads(module: Any, x: Float[Tensor, "B T D"], shape: HeadShape) -> Heads:
    """Queries, keys and values by head; `module` holds the maps `query`, `key` and `value`."""
    q, k, v = (
        rearrange(project(x), "B T (H K) -> B T H K", K=shape.head_dim)
        for project in (module.query, module.key, module.value)
    )
    return q, k, v


def join_heads(module: Any, mixed: Float[Tensor, "B T H V"]) -> Float[Tensor, "B T D"]:
    """The heads side by side, mapped to the model width by the map `out` of `module`."""
    joined: Tensor = module.out(rearrange(mixed, "B T H V -> B T (H V)"))
    return joined


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What weights are made of. Keys count from the first token of the sequence; queries are the last T of S."""

    q: Float[Tensor, "B T H K"]
    k: Float[Tensor, "B S G K"]
    scale: float
    bias: Float[Tensor, "H T S"] | None
    live: Bool[Tensor, "B S"] | None
    segments: Int[Tensor, "B S"] | None = None
    """Rules of mixers that keep packed documents apart go by it."""


Weigh = Callable[[Scene], Float[Tensor, "B H T S"]]


class WeighedAttention(MixerModule):
    """Attention whose weights are formed whole, by a rule of its own; decoding keeps every key and value."""

    def __init__(self, *, d_model: int, shape: HeadShape, weigh: Weigh, reason: str) -> None:
        super().__init__()
        self.shape = shape
        self.query, self.key, self.value, self.out = projections(d_model, shape)
        self.weigh = weigh
        self.backends = {"attention": f"reference (not sdpa: {reason})"}

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        if context.live is None:
            return self._mix(*split_heads(self, x, self.shape), position, 0, None, context.segments)
        shift = first_live(context.live)
        segments = None if context.segments is None else rolled(context.segments, shift)
        heads = split_heads(self, rolled(x, shift), self.shape)
        return rolled(self._mix(*heads, position, 0, rolled(context.live, shift), segments), -shift)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        shape = (batch, 0, self.shape.kv_heads, self.shape.head_dim)
        return {name: torch.zeros(shape, device=device, dtype=dtype) for name in ("k", "v")}

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        q, k, v = split_heads(self, x, self.shape)
        kept = {name: appended(state[name], new) for name, new in (("k", k), ("v", v))}
        return self._mix(q, kept["k"].to(k.dtype), kept["v"].to(v.dtype), position, start, None, None), kept

    def _mix(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B S G K"],
        v: Float[Tensor, "B S G K"],
        position: PositionModule,
        start: int,
        live: Bool[Tensor, "B S"] | None,
        segments: Int[Tensor, "B S"] | None,
    ) -> Float[Tensor, "B T D"]:
        q, k = position.rotate(q, k, start)
        bias = position.score_bias(q.shape[1], k.shape[1], start)
        scale = self.shape.head_dim**-0.5
        weights = self.weigh(Scene(q=q, k=k, scale=scale, bias=bias, live=live, segments=segments))
        return join_heads(self, weighted_values(weights, v))


def appended(old: Tensor, new: Tensor) -> Tensor:
    """The cache with new rows behind its own, in the dtype of the cache."""
    return torch.cat([old, new.to(old.dtype)], dim=1)
