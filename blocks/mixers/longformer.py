"""Attention in a window, and a few first tokens that see and are seen by all, through projections of their own."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from blocks.families import (
    BOTH_DIRECTIONS,
    AbstractMixer,
    Context,
    Dims,
    Direction,
    HeadShape,
    Hook,
    InfeasibleArchitecture,
    MixerModule,
    PositionModule,
    State,
)
from blocks.mixers import heads as attention
from blocks.mixers.projections import Heads, join_heads, projections, split_heads
from blocks.ops.alignment import first_live, rolled
from blocks.ops.attention import visible_keys, weighted_values
from blocks.ops.patterns import window_and_global
from blocks.ops.scores import masked_softmax, scaled_logits
from blocks.registry import register
from search_space.domains import choice

KEPT = ("k", "v")


class LongformerModule(MixerModule):
    """Window attention; every query also sees the first `n_global` tokens, and these see everything they may.

    What the first tokens gather goes through queries, keys and values of its own (Beltagy et al. 2020, section 3.1).
    Causal: no token sees a later one, so that the first tokens see each other only.
    """

    def __init__(self, *, d_model: int, shape: HeadShape, window: int, n_global: int, causal: bool) -> None:
        super().__init__()
        self.shape, self.window, self.n_global, self.causal = shape, window, n_global, causal
        self.query, self.key, self.value, self.out = projections(d_model, shape)
        self.gathering_query, self.gathering_key, self.gathering_value, _ = projections(d_model, shape)
        self.scale = shape.head_dim**-0.5
        self.backends = {"attention": "reference (not sdpa: its first tokens have projections of their own)"}

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        if context.live is None:
            return self._whole(x, position, None)
        shift = first_live(context.live)
        return rolled(self._whole(rolled(x, shift), position, rolled(context.live, shift)), -shift)

    def _whole(
        self, x: Float[Tensor, "B T D"], position: PositionModule, live: Bool[Tensor, "B T"] | None
    ) -> Float[Tensor, "B T D"]:
        q, k, v = split_heads(self, x, self.shape)
        local = self._local(q, k, v, position, 0, live)
        gathered = self._gathered(*self._gathering(x[:, : self.n_global] if self.causal else x), position, 0, live)
        return join_heads(self, torch.cat([gathered, local[:, gathered.shape[1] :]], dim=1))

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        rows = {"recent": self.window - 1, "first": self.n_global, "gathered": self.n_global}
        return {
            f"{part}_{name}": torch.zeros(
                batch, count, self.shape.kv_heads, self.shape.head_dim, device=device, dtype=dtype
            )
            for part, count in rows.items()
            for name in KEPT
        }

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        q, *new = split_heads(self, x, self.shape)
        following, spread = State(), []
        for name, rows in zip(KEPT, new, strict=True):
            recent = torch.cat([state[f"recent_{name}"].to(rows.dtype), rows], dim=1)
            first = self._filled(state[f"first_{name}"], rows, start)
            spread.append(self._spread(first, recent, start + x.shape[1]))
            following[f"recent_{name}"] = recent[:, recent.shape[1] - (self.window - 1) :].to(first.dtype)
            following[f"first_{name}"] = first
        local = self._local(q, spread[0], spread[1], position, start, None)
        n_first = min(max(self.n_global - start, 0), x.shape[1])
        gathering_q, *gathering_new = self._gathering(x[:, :n_first])
        for name, rows in zip(KEPT, gathering_new, strict=True):
            following[f"gathered_{name}"] = self._filled(state[f"gathered_{name}"], rows, start)
        if n_first:
            k, v = (following[f"gathered_{name}"][:, : start + n_first].to(x.dtype) for name in KEPT)
            gathered = self._gathered(gathering_q, k, v, position, start, None)
            local = torch.cat([gathered, local[:, n_first:]], dim=1)
        return join_heads(self, local), following

    def _gathering(self, x: Float[Tensor, "B T D"]) -> Heads:
        """Queries, keys and values by which the first tokens see."""
        q, k, v = (
            rearrange(project(x), "B T (H K) -> B T H K", K=self.shape.head_dim)
            for project in (self.gathering_query, self.gathering_key, self.gathering_value)
        )
        return q, k, v

    def _filled(
        self, first: Float[Tensor, "B F G K"], new: Float[Tensor, "B T G K"], start: int
    ) -> Float[Tensor, "B F G K"]:
        """The rows of the first tokens, with those that the new ones add."""
        added = min(max(self.n_global - start, 0), new.shape[1])
        return torch.cat([first[:, :start], new[:, :added].to(first.dtype), first[:, start + added :]], dim=1)

    def _spread(
        self, first: Float[Tensor, "B F G K"], recent: Float[Tensor, "B P G K"], n_key: int
    ) -> Float[Tensor, "B S G K"]:
        """Rows at their places in the sequence; nothing where no later token looks."""
        known = recent[:, max(recent.shape[1] - n_key, 0) :]
        gap = max(n_key - known.shape[1] - self.n_global, 0)
        nothing = torch.zeros_like(known[:, :1]).expand(-1, gap, -1, -1)
        head = first[:, : n_key - known.shape[1]].to(known.dtype)
        return torch.cat([head, nothing, known], dim=1)

    def _local(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B S G K"],
        v: Float[Tensor, "B S G K"],
        position: PositionModule,
        start: int,
        live: Bool[Tensor, "B S"] | None,
    ) -> Float[Tensor, "B T H K"]:
        n_query, n_key = q.shape[1], k.shape[1]
        q, k = position.rotate(q, k, start)
        logits = scaled_logits(q, k, self.scale, position.score_bias(n_query, n_key, start))
        seen = visible_keys(n_query, n_key, None, live, q.device, causal=self.causal)
        near = window_and_global(n_query, n_key, self.window, self.n_global, self.causal, q.device)
        return weighted_values(masked_softmax(logits, seen & near), v)

    def _gathered(
        self,
        q: Float[Tensor, "B P H K"],
        k: Float[Tensor, "B S G K"],
        v: Float[Tensor, "B S G K"],
        position: PositionModule,
        start: int,
        live: Bool[Tensor, "B L"] | None,
    ) -> Float[Tensor, "B F H K"]:
        """What the first tokens among the queries see."""
        q = q[:, : max(self.n_global - start, 0)]
        n_query, n_key = q.shape[1], k.shape[1]
        q, k = position.rotate(q, k, start)
        logits = scaled_logits(q, k, self.scale, position.score_bias(n_query, n_key, start))
        place = torch.arange(n_key, device=q.device)
        seen = (place <= place[start : start + n_query, None]) | (not self.causal)
        if live is not None:
            seen = seen & live[:, None, None, :n_key] & live[:, None, start : start + n_query, None]
        return weighted_values(masked_softmax(logits, seen), v)


@register
@dataclass(frozen=True, kw_only=True)
class Longformer(AbstractMixer):
    """Attention in a window, and a few first tokens that all see and that see all, by projections of their own."""

    kind: ClassVar[str] = "longformer"
    paper: ClassVar[str] = "Longformer: The Long-Document Transformer, Beltagy et al. 2020, arXiv:2004.05150"
    proof: ClassVar[str] = "test_longformer_as_an_encoder_equals_transformers"
    reference: ClassVar[str] = "transformers LongformerSelfAttention"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING, Hook.ROTATE, Hook.SCALE, Hook.SCORE_BIAS})
    directions: ClassVar[frozenset[Direction]] = BOTH_DIRECTIONS

    kv_heads: int = attention.kv_heads_field()
    queries_per_kv: int = attention.queries_per_kv_field()
    head_dim: int = attention.head_dim_field()
    window: int = choice(
        8, 16, 32, 64, 128, default=16, help="tokens each query sees, itself included, and as many ahead in an encoder"
    )
    first: int = choice(2, 4, 8, default=4, help="tokens at the start of the text that every token sees")

    def build(self, dims: Dims) -> MixerModule:
        return LongformerModule(
            d_model=dims.d_model,
            shape=self.head_shape(),
            window=self.window,
            n_global=self.first,
            causal=dims.direction == Direction.CAUSAL,
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.kv_heads * self.queries_per_kv, kv_heads=self.kv_heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        """Scores in view; `causal` counts visible tokens only."""
        shape = self.head_shape()
        first = min(self.first, length)
        keys = sum(self._visible(t) for t in range(length)) / length
        if not causal:
            reach = self.window if dims.direction == Direction.CAUSAL else 2 * self.window - 1
            keys = float(min(length, reach + first))
        projected = first if dims.direction == Direction.CAUSAL else length
        gathering = (
            2.0 * dims.d_model * shape.head_dim * (shape.heads * first + 2 * shape.kv_heads * projected) / length
        )
        return attention.projection_flops(dims.d_model, shape) + attention.score_flops(shape, keys) + gathering

    def canonical(self, dims: Dims) -> AbstractMixer:
        """A window beyond the longest text is one that ends with it."""
        return self if self.window <= dims.max_len else dataclasses.replace(self, window=dims.max_len)

    def check(self, dims: Dims) -> None:
        if not 2 <= self.first < dims.train_len:
            raise InfeasibleArchitecture(
                f"model.mixer.longformer.first must be at least 2, so that the first tokens see each other, and below "
                f"the training length {dims.train_len}; got {self.first}; choose another"
            )

    def _visible(self, place: int) -> int:
        """Keys that a causal query at this place sees."""
        if place < self.first:
            return place + 1
        return min(place + 1, self.window) + min(self.first, max(place + 1 - self.window, 0))
