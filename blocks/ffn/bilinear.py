"""Three matrices and no activation."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from blocks.families import AbstractFFN, Dims
from blocks.ffn.modules import GatedFFN, expansion_field, gated_flops
from blocks.registry import register


def _identity(x: Tensor) -> Tensor:
    return x


@register
@dataclass(frozen=True, kw_only=True)
class Bilinear(AbstractFFN):
    """W2 (W1 x * V x): no activation at all, exactly quadratic in its input."""

    kind: ClassVar[str] = "bilinear"
    paper: ClassVar[str] = "GLU Variants Improve Transformer, Shazeer 2020, eq. 5, arXiv:2002.05202"
    proof: ClassVar[str] = "test_gated_forms_multiply_an_activated_gate"
    reference: ClassVar[str] = "its published formula, written out in the test"
    width_factor: ClassVar[float] = 2 / 3

    expansion: float = expansion_field()

    def build(self, dims: Dims) -> nn.Module:
        return GatedFFN(dims, _identity)

    def flops_per_token(self, dims: Dims) -> float:
        return gated_flops(dims)
