"""Two matrices with a squared rectifier between."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from blocks.families import AbstractFFN, Dims
from blocks.ffn.modules import PlainFFN, expansion_field, plain_flops
from blocks.registry import register


def _squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


@register
@dataclass(frozen=True, kw_only=True)
class ReluSquared(AbstractFFN):
    """W2 relu(W1 x)^2: sparse and cheap; strong at small scale."""

    kind: ClassVar[str] = "relu_squared"
    paper: ClassVar[str] = (
        "Primer: Searching for Efficient Transformers for Language Modeling, So et al. 2021, arXiv:2109.08668"
    )
    proof: ClassVar[str] = "test_plain_forms_are_two_matrices_around_their_activation"
    reference: ClassVar[str] = "its published formula, written out in the test"
    width_factor: ClassVar[float] = 1.0

    expansion: float = expansion_field()

    def build(self, dims: Dims) -> nn.Module:
        return PlainFFN(dims, _squared)

    def flops_per_token(self, dims: Dims) -> float:
        return plain_flops(dims)
