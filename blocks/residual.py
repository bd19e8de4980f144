"""Residual forms: how the residual stream passes from layer to layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from blocks.families import AbstractResidual, Dims, LayerCall, ResidualModule
from blocks.registry import register


class PlainResidual(ResidualModule):
    """Each layer reads the output of the one before."""

    def forward(self, x: Float[Tensor, "B T D"], layers: Sequence[LayerCall]) -> Float[Tensor, "B T D"]:
        for layer in layers:
            x = layer(x, None)
        return x


@register
@dataclass(frozen=True, kw_only=True)
class Plain(AbstractResidual):
    """Each layer reads the output of the one before, and nothing else."""

    kind: ClassVar[str] = "plain"
    paper: ClassVar[str] = "Attention Is All You Need, Vaswani et al. 2017, section 3.1, arXiv:1706.03762"

    def build(self, dims: Dims) -> ResidualModule:
        return PlainResidual()
