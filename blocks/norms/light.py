"""Norms with next to no parameters, or with no statistics: scalenorm, dyt and derf."""

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

SCALENORM_EPS = 1e-5


class ScaleNorm(nn.Module):
    """g x / max(length of x, eps), with one g for all channels that starts at the root of their number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.length = mark(nn.Parameter(torch.full((1,), math.sqrt(width))), Role.SCALAR)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return F.normalize(x, dim=-1, eps=SCALENORM_EPS) * self.length.to(x.dtype)


class DynamicTanh(nn.Module):
    """gain x tanh(alpha x) + bias, channel by channel: nothing is averaged."""

    def __init__(self, width: int, alpha: float) -> None:
        super().__init__()
        self.alpha = mark(nn.Parameter(torch.full((1,), alpha)), Role.SCALAR)
        self.gain = mark(nn.Parameter(torch.ones(width)), Role.GAIN)
        self.bias = mark(nn.Parameter(torch.zeros(width)), Role.BIAS)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.gain.to(x.dtype) * torch.tanh(self.alpha.to(x.dtype) * x) + self.bias.to(x.dtype)


class DynamicErf(nn.Module):
    """gain x erf(alpha x + shift) + bias, channel by channel, with one shift for all, 0 at the start."""

    def __init__(self, width: int, alpha: float) -> None:
        super().__init__()
        self.alpha = mark(nn.Parameter(torch.full((1,), alpha)), Role.SCALAR)
        self.shift = mark(nn.Parameter(torch.zeros(1)), Role.SCALAR)
        self.gain = mark(nn.Parameter(torch.ones(width)), Role.GAIN)
        self.bias = mark(nn.Parameter(torch.zeros(width)), Role.BIAS)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        bounded = torch.erf(self.alpha.to(x.dtype) * x + self.shift.to(x.dtype))
        return self.gain.to(x.dtype) * bounded + self.bias.to(x.dtype)


@register
@dataclass(frozen=True, kw_only=True)
class ScaleNormConfig(AbstractNorm):
    """Every row brought to one learned length: a single parameter, the direction untouched."""

    kind: ClassVar[str] = "scalenorm"
    paper: ClassVar[str] = "Transformers without Tears, Nguyen and Salazar 2019, eq. 3, arXiv:1910.05895"
    proof: ClassVar[str] = "test_scalenorm_gives_every_row_the_same_length_and_equals_x_transformers"
    reference: ClassVar[str] = "x-transformers ScaleNorm"
    one_factor: ClassVar[bool] = True

    def build(self, width: int) -> nn.Module:
        return ScaleNorm(width)


@register
@dataclass(frozen=True, kw_only=True)
class DynamicTanhConfig(AbstractNorm):
    """No statistics at all: tanh of each channel times a learned slope, then a gain and a bias per channel."""

    kind: ClassVar[str] = "dyt"
    paper: ClassVar[str] = "Transformers without Normalization, Zhu et al. 2025, eq. 2, arXiv:2503.10622"
    proof: ClassVar[str] = "test_dynamic_tanh_equals_x_transformers_and_looks_at_one_channel_at_a_time"
    reference: ClassVar[str] = "x-transformers DynamicTanh"

    alpha: float = choice(0.2, 0.5, 1.0, default=0.5, help="first value of the slope before the tanh")

    def build(self, width: int) -> nn.Module:
        return DynamicTanh(width, self.alpha)


@register
@dataclass(frozen=True, kw_only=True)
class DynamicErfConfig(AbstractNorm):
    """No statistics at all: the error function of each channel times a learned slope plus a learned shift."""

    kind: ClassVar[str] = "derf"
    paper: ClassVar[str] = "Stronger Normalization-Free Transformers, Chen et al. 2025, eq. 10, arXiv:2512.10938"
    proof: ClassVar[str] = "test_derf_is_the_error_function_of_a_line"
    reference: ClassVar[str] = "its published formula, by the standard library's erf"

    alpha: float = choice(0.2, 0.5, 1.0, default=0.5, help="first value of the slope inside the error function")

    def build(self, width: int) -> nn.Module:
        return DynamicErf(width, self.alpha)
