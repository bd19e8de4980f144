"""Three matrices with a SiLU gate."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.nn import functional as F

from blocks.families import AbstractFFN, Dims
from blocks.ffn.modules import GatedFFN, expansion_field, gated_flops
from blocks.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Swiglu(AbstractFFN):
    """W2 (silu(W1 x) * V x), two thirds the width at equal parameters: the FFN of Llama."""

    kind: ClassVar[str] = "swiglu"
    paper: ClassVar[str] = "GLU Variants Improve Transformer, Shazeer 2020, eq. 6, arXiv:2002.05202"
    proof: ClassVar[str] = "test_swiglu_equals_llama"
    reference: ClassVar[str] = "transformers LlamaMLP"
    width_factor: ClassVar[float] = 2 / 3

    expansion: float = expansion_field()

    def build(self, dims: Dims) -> nn.Module:
        return GatedFFN(dims, F.silu)

    def flops_per_token(self, dims: Dims) -> float:
        return gated_flops(dims)
