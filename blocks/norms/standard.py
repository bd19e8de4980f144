"""LayerNorm and RMSNorm. Each states its own epsilon: torch's defaults differ between norms and dtypes."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from blocks.families import AbstractNorm, Role, mark
from blocks.registry import register
from search_space.domains import choice

LAYERNORM_EPS = 1e-5
RMSNORM_EPS = 1e-6


def _gain(width: int, present: bool) -> nn.Parameter | None:
    return mark(nn.Parameter(torch.ones(width)), Role.GAIN) if present else None


def _in(dtype: torch.dtype, parameter: nn.Parameter | None) -> Tensor | None:
    return None if parameter is None else parameter.to(dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) x gain + bias, either of which may be missing."""

    def __init__(self, width: int, *, gain: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.width = width
        self.gain = _gain(width, gain)
        self.bias = mark(nn.Parameter(torch.zeros(width)), Role.BIAS) if bias else None

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return F.layer_norm(x, (self.width,), _in(x.dtype, self.gain), _in(x.dtype, self.bias), LAYERNORM_EPS)


class RMSNorm(nn.Module):
    """x / sqrt(mean square + eps) x gain, which may be missing; the mean may be of the first channels only."""

    def __init__(self, width: int, *, gain: bool = True, share: float = 1.0) -> None:
        super().__init__()
        self.width = width
        self.first = math.ceil(share * width)
        self.gain = _gain(width, gain)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        gain = _in(x.dtype, self.gain)
        if self.first == self.width:
            return F.rms_norm(x, (self.width,), gain, RMSNORM_EPS)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = wide[..., : self.first].square().mean(-1, keepdim=True)
        y = (wide * torch.rsqrt(mean + RMSNORM_EPS)).to(x.dtype)
        return y if gain is None else y * gain


@register
@dataclass(frozen=True, kw_only=True)
class LayerNormConfig(AbstractNorm):
    """Centred and scaled to unit variance, with a gain and a bias per channel."""

    kind: ClassVar[str] = "layernorm"
    paper: ClassVar[str] = "Layer Normalization, Ba et al. 2016, eq. 4, arXiv:1607.06450"
    proof: ClassVar[str] = "test_layernorm_equals_torch_and_ignores_shift_and_scale"
    reference: ClassVar[str] = "torch nn.LayerNorm"

    gain: bool = choice(
        True, False, default=True, opt_in=True, neutral=True, help="whether each channel has a learned gain"
    )
    bias: bool = choice(
        True, False, default=True, opt_in=True, neutral=True, help="whether each channel has a learned bias"
    )

    def build(self, width: int) -> nn.Module:
        return LayerNorm(width, gain=self.gain, bias=self.bias)


@register
@dataclass(frozen=True, kw_only=True)
class RMSNormConfig(AbstractNorm):
    """Scaled to unit root mean square, with a gain per channel; not centred."""

    kind: ClassVar[str] = "rmsnorm"
    paper: ClassVar[str] = "Root Mean Square Layer Normalization, Zhang and Sennrich 2019, eq. 4, arXiv:1910.07467"
    proof: ClassVar[str] = "test_rmsnorm_equals_llama_and_ignores_scale_but_not_shift"
    reference: ClassVar[str] = "transformers LlamaRMSNorm"

    gain: bool = choice(
        True, False, default=True, opt_in=True, neutral=True, help="whether each channel has a learned gain"
    )

    share: float = choice(
        1.0,
        0.25,
        0.0625,
        default=1.0,
        opt_in=True,
        neutral=1.0,
        help="share of the channels, the first ones, whose mean square is taken (pRMSNorm, section 4.2)",
    )

    def build(self, width: int) -> nn.Module:
        return RMSNorm(width, gain=self.gain, share=self.share)
