"""Three matrices with a clamped SiLU gate around one."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import AbstractFFN, Dims, Role, linear
from blocks.ffn.modules import expansion_field, gated_flops
from blocks.registry import register
from search_space.domains import choice

SHARPNESS = 1.702
"""The slope at which x sigmoid(slope x) comes nearest to GELU."""


class ClampedSwiglu(nn.Module):
    """W2 ((u + offset) * g sigmoid(1.702 g)) where g = min(W1 x, limit) and u = V x cut to plus or minus limit."""

    def __init__(self, dims: Dims, limit: float, offset: float) -> None:
        super().__init__()
        self.limit = limit
        self.offset = offset
        self.w_gate = linear(dims.d_model, dims.d_ff, Role.FFN_GATE)
        self.w_in = linear(dims.d_model, dims.d_ff, Role.FFN_IN)
        self.w_out = linear(dims.d_ff, dims.d_model, Role.FFN_OUT)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        gate = self.w_gate(x).clamp(max=self.limit)
        up = self.w_in(x).clamp(-self.limit, self.limit)
        return self.w_out((up + self.offset) * gate * torch.sigmoid(SHARPNESS * gate))


@register
@dataclass(frozen=True, kw_only=True)
class ClampedSwigluConfig(AbstractFFN):
    """SwiGLU with both factors clamped and one added to the linear one: cannot blow up, passes its gate when V is 0."""

    kind: ClassVar[str] = "clamped_swiglu"
    paper: ClassVar[str] = "gpt-oss-120b & gpt-oss-20b Model Card, OpenAI 2025, section 2.2, arXiv:2508.10925"
    proof: ClassVar[str] = "test_clamped_swiglu_equals_gpt_oss"
    reference: ClassVar[str] = "transformers GptOssExperts"
    width_factor: ClassVar[float] = 2 / 3

    expansion: float = expansion_field()
    offset: float = choice(0.0, 1.0, default=1.0, opt_in=True, help="what is added to the linear factor")

    def build(self, dims: Dims) -> nn.Module:
        return ClampedSwiglu(dims, limit=7.0, offset=self.offset)

    def flops_per_token(self, dims: Dims) -> float:
        return gated_flops(dims)
