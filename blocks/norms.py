"""Norms over the model width. Every one states its own epsilon: torch's defaults differ between norms and dtypes."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from blocks.families import AbstractNorm, Role, mark
from blocks.registry import register

LAYERNORM_EPS = 1e-5
RMSNORM_EPS = 1e-6


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) x gain + bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = mark(nn.Parameter(torch.ones(width)), Role.GAIN)
        self.bias = mark(nn.Parameter(torch.zeros(width)), Role.BIAS)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return F.layer_norm(x, self.gain.shape, self.gain.to(x.dtype), self.bias.to(x.dtype), LAYERNORM_EPS)


class RMSNorm(nn.Module):
    """x / sqrt(mean square + eps) x gain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = mark(nn.Parameter(torch.ones(width)), Role.GAIN)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return F.rms_norm(x, self.gain.shape, self.gain.to(x.dtype), RMSNORM_EPS)


@register
@dataclass(frozen=True, kw_only=True)
class LayerNormConfig(AbstractNorm):
    """Centred and scaled to unit variance, with a gain and a bias per channel."""

    kind: ClassVar[str] = "layernorm"
    paper: ClassVar[str] = "Layer Normalization, Ba et al. 2016, eq. 4, arXiv:1607.06450"

    def build(self, width: int) -> nn.Module:
        return LayerNorm(width)


@register
@dataclass(frozen=True, kw_only=True)
class RMSNormConfig(AbstractNorm):
    """Scaled to unit root mean square, with a gain per channel; not centred."""

    kind: ClassVar[str] = "rmsnorm"
    paper: ClassVar[str] = "Root Mean Square Layer Normalization, Zhang and Sennrich 2019, eq. 4, arXiv:1910.07467"

    def build(self, width: int) -> nn.Module:
        return RMSNorm(width)
