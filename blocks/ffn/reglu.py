"""Three matrices with a rectified gate."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.nn import functional as F

from blocks.families import AbstractFFN, Dims
from blocks.ffn.modules import GatedFFN, expansion_field, gated_flops
from blocks.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Reglu(AbstractFFN):
    """W2 (relu(W1 x) * V x): a gate that is closed exactly where its input is negative."""

    kind: ClassVar[str] = "reglu"
    paper: ClassVar[str] = "GLU Variants Improve Transformer, Shazeer 2020, eq. 5, arXiv:2002.05202"
    proof: ClassVar[str] = "test_gated_forms_multiply_an_activated_gate"
    reference: ClassVar[str] = "its published formula, written out in the test"
    width_factor: ClassVar[float] = 2 / 3

    expansion: float = expansion_field()

    def build(self, dims: Dims) -> nn.Module:
        return GatedFFN(dims, F.relu)

    def flops_per_token(self, dims: Dims) -> float:
        return gated_flops(dims)
