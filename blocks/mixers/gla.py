"""Gated linear attention: what every key channel keeps of its past depends on the token."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from blocks.families import AbstractMixer, Dims, HeadShape, Hook, MixerModule
from blocks.mixers import recurrence
from blocks.mixers.gated_scans import GatedScanModule, mixed_flops
from blocks.registry import register
from search_space.domains import choice

TEMPERATURE = 16
"""The root taken of the gates, which brings them near one (Yang et al. 2023, section 4.4)."""


class ChannelDecay(nn.Module):
    """Queries scaled by K^-1/2; a decay sigmoid(x W_1 W_2 + b)^(1/16) per key channel."""

    def __init__(self, d_model: int, shape: HeadShape, rank: int) -> None:
        super().__init__()
        self.heads = shape.heads
        self.logits = recurrence.LowRank(d_model, rank, shape.heads * shape.head_dim, bias=True)

    def forward(
        self, x: Float[Tensor, "B T D"], q: Float[Tensor, "B T H K"], k: Float[Tensor, "B T H K"]
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T H K"], Float[Tensor, "B T H K"]]:
        logits = recurrence.split_heads(self.logits(x), self.heads)
        log_decay = F.logsigmoid(logits.to(torch.promote_types(q.dtype, torch.float32))) / TEMPERATURE
        return q * q.shape[3] ** -0.5, k, log_decay


@register
@dataclass(frozen=True, kw_only=True)
class Gla(AbstractMixer):
    """A sum of the past in which each key channel is kept or let go token by token."""

    kind: ClassVar[str] = "gla"
    paper: ClassVar[str] = (
        "Gated Linear Attention Transformers with Hardware-Efficient Training, Yang et al. 2023, arXiv:2312.06635"
    )
    proof: ClassVar[str] = "test_gla_is_its_recurrence_under_sixteenth_root_gates"
    reference: ClassVar[str] = "flash-linear-attention naive_recurrent_gla"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING})
    packs: ClassVar[bool] = True

    heads: int = recurrence.heads_field()
    head_dim: int = recurrence.head_dim_field()
    value_factor: int = recurrence.value_factor_field(2)
    gate_rank: int = choice(4, 16, default=16, opt_in=True, help="width through which the gates are computed")

    def build(self, dims: Dims) -> MixerModule:
        shape, value_dim = self.head_shape(), self.value_factor * self.head_dim
        return GatedScanModule(
            d_model=dims.d_model,
            shape=shape,
            value_dim=value_dim,
            gate=ChannelDecay(dims.d_model, shape, self.gate_rank),
            output=recurrence.GatedOutput(dims.d_model, self.heads, value_dim),
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.heads, kv_heads=self.heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        value_dim, key_width = self.value_factor * self.head_dim, self.heads * self.head_dim
        projections = 2.0 * dims.d_model * self.heads * (2 * self.head_dim + 3 * value_dim)
        gates = 2.0 * self.gate_rank * (dims.d_model + key_width)
        return projections + gates + mixed_flops(self.head_shape(), value_dim, length, causal, per_channel=True)
