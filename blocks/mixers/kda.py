"""Kimi delta attention: the delta rule on a memory in which every key channel forgets at its own pace."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import AbstractMixer, Dims, HeadShape, Hook, MixerModule, Role, linear
from blocks.mixers import recurrence
from blocks.mixers.delta_rules import DeltaModule, mixed_flops, negative_eigenvalues_field
from blocks.registry import register


class ChannelDecay(nn.Module):
    """One log decay per key channel, -exp(A) * softplus(x W_1 W_2 + b) with A per head (Kimi Team 2025, section 3)."""

    def __init__(self, d_model: int, shape: HeadShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.logits = recurrence.LowRank(d_model, shape.head_dim, shape.heads * shape.head_dim)
        self.decay = recurrence.StepDecay(shape.heads, shape.head_dim)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H K"]:
        return self.decay(recurrence.split_heads(self.logits(x), self.heads))


class SigmoidOutput(nn.Module):
    """Heads normalised, multiplied by a sigmoid gate of low rank, and mapped to the model width."""

    def __init__(self, d_model: int, heads: int, value_dim: int) -> None:
        super().__init__()
        self.norm = recurrence.HeadNorm(heads, value_dim)
        self.gate = recurrence.LowRank(d_model, value_dim, heads * value_dim)
        self.out = linear(heads * value_dim, d_model, Role.MIXER_OUT)

    def forward(self, y: Float[Tensor, "B T H V"], x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        flat = rearrange(self.norm(y), "B T H V -> B T (H V)")
        return self.out(flat * torch.sigmoid(self.gate(x)))


@register
@dataclass(frozen=True, kw_only=True)
class Kda(AbstractMixer):
    """A memory that overwrites what a key held, each key channel fading at a pace of its own, token by token."""

    kind: ClassVar[str] = "kda"
    paper: ClassVar[str] = "Kimi Linear: An Expressive, Efficient Attention Architecture, 2025, arXiv:2510.26692"
    proof: ClassVar[str] = "test_decays_per_channel_equal_kda_of_flash_linear_attention"
    reference: ClassVar[str] = "flash-linear-attention naive_recurrent_kda"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING})
    packs: ClassVar[bool] = True

    heads: int = recurrence.heads_field()
    head_dim: int = recurrence.head_dim_field()
    conv_width: int = recurrence.conv_width_field()
    negative_eigenvalues: bool = negative_eigenvalues_field()

    def build(self, dims: Dims) -> MixerModule:
        shape = self.head_shape()
        return DeltaModule(
            d_model=dims.d_model,
            shape=shape,
            value_dim=self.head_dim,
            conv_width=self.conv_width,
            strongest=2.0 if self.negative_eigenvalues else 1.0,
            decay=ChannelDecay(dims.d_model, shape),
            output=SigmoidOutput(dims.d_model, self.heads, self.head_dim),
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.heads, kv_heads=self.heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        width = self.heads * self.head_dim
        gates = 2 * 2.0 * self.head_dim * (dims.d_model + width)
        return (
            2.0 * dims.d_model * width
            + gates
            + mixed_flops(
                dims.d_model, self.head_shape(), self.head_dim, self.conv_width, length, causal, per_channel=True
            )
        )
