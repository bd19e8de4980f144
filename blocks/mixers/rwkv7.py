"""RWKV-7: the delta rule with decays per channel, a strength per channel, and separate keys to remove and to write."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

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
    mark,
)
from blocks.mixers import heads, recurrence
from blocks.ops.gated_scan import empty_state
from blocks.ops.rank_one_scan import CHUNK, RankOneNeeds, choose_rank_one_scan, chunked, rank_one_flops, recurrent
from blocks.registry import register
from search_space.domains import choice

FASTEST = math.exp(-0.5)
"""Bound of the log decays: no channel keeps less than exp(-0.61) of itself per token (Peng et al. 2025, eq. 12)."""


class Rwkv7Module(MixerModule):
    """The time mixing of RWKV-7 (Peng et al. 2025, eq. 3-20), without the value residual over layers.

    S_t = S_{t-1} (diag(w) - u^T (a * u)) + v^T k' with u the unit removal key and k' the replacement key.
    """

    def __init__(self, *, d_model: int, n_heads: int, head_dim: int, rank: int) -> None:
        super().__init__()
        self.n_heads, self.head_dim = n_heads, head_dim
        width = n_heads * head_dim
        self.mix = mark(nn.Parameter(torch.full((6, d_model), 0.5)), Role.SCALAR)
        self.query = linear(d_model, width, Role.QUERY)
        self.key = linear(d_model, width, Role.KEY)
        self.value = linear(d_model, width, Role.VALUE)
        self.decay_down = linear(d_model, rank, Role.QUERY)
        self.decay_up = linear(rank, width, Role.QUERY)
        self.decay_start = mark(nn.Parameter(torch.linspace(-6.0, -1.0, width)), Role.BIAS)
        self.rate = recurrence.LowRank(d_model, rank, width, bias=True)
        self.gate_down = linear(d_model, rank, Role.QUERY)
        self.gate_up = linear(rank, width, Role.QUERY)
        self.removal = mark(nn.Parameter(torch.full((width,), 0.85)), Role.GAIN)
        self.replacement = mark(nn.Parameter(torch.ones(width)), Role.GAIN)
        self.bonus = mark(nn.Parameter(torch.zeros(n_heads, head_dim)), Role.GAIN)
        self.norm = recurrence.HeadNorm(n_heads, head_dim, centred=True)
        self.shift = mark(nn.Parameter(torch.zeros(n_heads, head_dim)), Role.BIAS)
        self.out = linear(width, d_model, Role.MIXER_OUT)
        chosen = choose_rank_one_scan(RankOneNeeds())
        self.scan = chosen.run
        self.backends = {"rank-one scan": chosen.record}

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        x = recurrence.masked(x, context.live)
        inputs, gate = self._inputs(x, x.new_zeros(x.shape[0], 1, x.shape[2]), context)
        return self._join(self.scan(*inputs), inputs, gate)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        return {
            "state": empty_state(batch, self.n_heads, self.head_dim, self.head_dim, device, dtype),
            "last": torch.zeros(batch, 1, self.mix.shape[1], device=device, dtype=dtype),
        }

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        inputs, gate = self._inputs(x, state["last"].to(x.dtype), Context())
        run = recurrent if x.shape[1] == 1 else chunked
        mixed, after = run(*inputs, state["state"])
        return self._join(mixed, inputs, gate), {"state": after, "last": x[:, -1:].to(state["last"].dtype)}

    def _inputs(
        self, x: Float[Tensor, "B T D"], last: Float[Tensor, "B 1 D"], context: Context
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Float[Tensor, "B T W"]]:
        """What the scan takes, and the output gate."""
        before, live = torch.cat([last, x[:, :-1]], dim=1), context.live
        if context.segments is not None:
            before = torch.where(recurrence.starts(context.segments)[:, :, None], 0.0, before)
        difference = before - x
        for_query, for_decay, for_key, for_value, for_rate, for_gate = (x + difference * mix for mix in self.mix)
        wide = torch.promote_types(x.dtype, torch.float32)
        q, key, v = self.query(for_query), self.key(for_key), self.value(for_value)
        logits = self.decay_up(torch.tanh(self.decay_down(for_decay))).to(wide) + self.decay_start
        rate = torch.sigmoid(self.rate(for_rate).to(wide))
        gate = self.gate_up(torch.sigmoid(self.gate_down(for_gate)))
        removal = F.normalize(self._split((key * self.removal).to(wide)), dim=-1, eps=recurrence.UNIT_EPS)
        replacement = self._split(key * (1 + (rate - 1) * self.replacement))
        if context.segments is not None:
            # What is removed is read before the decay clears the state.
            removal = torch.where(recurrence.starts(context.segments)[:, :, None, None], 0.0, removal)
        parts = (self._split(q), replacement, self._split(v), -removal, removal * self._split(rate))
        log_decay = recurrence.decays_within(-FASTEST * torch.sigmoid(self._split(logits)), context.segments)
        if live is None:
            return (*parts, log_decay), gate
        alive = live[:, :, None, None]
        q, k, v, a, b = (torch.where(alive, part, 0.0) for part in parts)
        return (q, k, v, a, b, torch.where(alive, log_decay, 0.0)), gate

    def _join(
        self, mixed: Float[Tensor, "B T H V"], inputs: tuple[Tensor, ...], gate: Float[Tensor, "B T W"]
    ) -> Float[Tensor, "B T D"]:
        q, k, v = inputs[:3]
        current = (q * k * self.bonus).sum(-1, keepdim=True) * v
        y = self.norm(mixed) + self.shift + current
        return self.out(rearrange(y, "B T H V -> B T (H V)").to(gate.dtype) * gate)

    def _split(self, x: Float[Tensor, "B T W"]) -> Float[Tensor, "B T H K"]:
        return recurrence.split_heads(x, self.n_heads)


@register
@dataclass(frozen=True, kw_only=True)
class Rwkv7(AbstractMixer):
    """A recurrent memory that decays, removes and writes per channel, each by gates that see the previous token too."""

    kind: ClassVar[str] = "rwkv7"
    paper: ClassVar[str] = 'RWKV-7 "Goose" with Expressive Dynamic State Evolution, Peng et al. 2025, arXiv:2503.14456'
    proof: ClassVar[str] = "test_rwkv7_is_its_equations"
    reference: ClassVar[str] = (
        "its published recurrence, token by token; flash-linear-attention dplr_recurrence for its scan"
    )
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING})
    packs: ClassVar[bool] = True

    heads: int = recurrence.heads_field()
    head_dim: int = choice(8, 16, 32, 64, default=32, help="channels per head; the state holds heads x head_dim^2")
    rank: int = choice(8, 16, 32, default=16, help="width through which decays, rates and gates are computed")

    def build(self, dims: Dims) -> MixerModule:
        return Rwkv7Module(d_model=dims.d_model, n_heads=self.heads, head_dim=self.head_dim, rank=self.rank)

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.heads, kv_heads=self.heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        width = self.heads * self.head_dim
        chunk = min(CHUNK, length)
        pairs = heads.mean_visible(chunk, chunk) if causal else float(chunk)
        projections = 8.0 * dims.d_model * width + 6.0 * self.rank * (dims.d_model + width)
        return projections + rank_one_flops(
            heads=self.heads, key_dim=self.head_dim, value_dim=self.head_dim, chunk=chunk, pairs=pairs
        )
