"""Two matrices with a sigmoid-weighted linear unit between."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.nn import functional as F

from blocks.families import AbstractFFN, Dims
from blocks.ffn.modules import PlainFFN, expansion_field, plain_flops
from blocks.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Silu(AbstractFFN):
    """W2 silu(W1 x): smooth and not monotone, with a small negative part."""

    kind: ClassVar[str] = "silu"
    paper: ClassVar[str] = (
        "Sigmoid-Weighted Linear Units for Neural Network Function Approximation in Reinforcement Learning, "
        "Elfwing et al. 2017, eq. 5, arXiv:1702.03118"
    )
    proof: ClassVar[str] = "test_forms_equal_x_transformers"
    reference: ClassVar[str] = "x-transformers FeedForward"
    width_factor: ClassVar[float] = 1.0

    expansion: float = expansion_field()

    def build(self, dims: Dims) -> nn.Module:
        return PlainFFN(dims, F.silu)

    def flops_per_token(self, dims: Dims) -> float:
        return plain_flops(dims)
