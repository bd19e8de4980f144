"""Two matrices with a rectifier between."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.nn import functional as F

from blocks.families import AbstractFFN, Dims
from blocks.ffn.modules import PlainFFN, expansion_field, plain_flops
from blocks.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Relu(AbstractFFN):
    """W2 relu(W1 x): the original FFN; sparse inner activations."""

    kind: ClassVar[str] = "relu"
    paper: ClassVar[str] = "Attention Is All You Need, Vaswani et al. 2017, eq. 2, arXiv:1706.03762"
    proof: ClassVar[str] = "test_plain_forms_are_two_matrices_around_their_activation"
    reference: ClassVar[str] = "its published formula, written out in the test"
    width_factor: ClassVar[float] = 1.0

    expansion: float = expansion_field()

    def build(self, dims: Dims) -> nn.Module:
        return PlainFFN(dims, F.relu)

    def flops_per_token(self, dims: Dims) -> float:
        return plain_flops(dims)
