"""Three matrices with a logistic gate."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from blocks.families import AbstractFFN, Dims
from blocks.ffn.modules import GatedFFN, expansion_field, gated_flops
from blocks.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Glu(AbstractFFN):
    """W2 (sigmoid(W1 x) * V x): the original gated linear unit; the gate lies between 0 and 1."""

    kind: ClassVar[str] = "glu"
    paper: ClassVar[str] = (
        "Language Modeling with Gated Convolutional Networks, Dauphin et al. 2017, eq. 1, arXiv:1612.08083"
    )
    proof: ClassVar[str] = "test_gated_forms_multiply_an_activated_gate"
    reference: ClassVar[str] = "its published formula, written out in the test"
    width_factor: ClassVar[float] = 2 / 3

    expansion: float = expansion_field()

    def build(self, dims: Dims) -> nn.Module:
        return GatedFFN(dims, torch.sigmoid)

    def flops_per_token(self, dims: Dims) -> float:
        return gated_flops(dims)
