"""A bias on attention logits from a small network on the logarithm of distance."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from blocks.families import AbstractPosition, Dims, HeadShape, Hook, PositionModule
from blocks.ops.toeplitz import every_distance, over_pairs
from blocks.positions.curve import Curve
from blocks.registry import register
from search_space.domains import choice


class DynamicModule(PositionModule):
    """Adds a learned function of sign(d) log(1 + |d|), shared by all layers."""

    def __init__(self, heads: int, hidden: int) -> None:
        super().__init__()
        self.curve = Curve(hidden, heads, F.silu)

    def score_bias(self, n_query: int, n_key: int, start: int = 0) -> Float[Tensor, "H T S"]:
        weight = self.curve.out.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        distance = every_distance(n_query, n_key, start, weight.device).to(wide)
        return over_pairs(self.curve(distance.sign() * distance.abs().log1p()).T, n_key)


@register
@dataclass(frozen=True, kw_only=True)
class Dynamic(AbstractPosition):
    """A small network on the logarithm of distance makes each head's bias: smooth, and defined at every distance."""

    kind: ClassVar[str] = "dynamic"
    paper: ClassVar[str] = (
        "Swin Transformer V2: Scaling Up Capacity and Resolution, eq. 3 and 4, Liu et al. 2021, arXiv:2111.09883"
    )
    proof: ClassVar[str] = "test_dynamic_bias_equals_x_transformers"
    reference: ClassVar[str] = "x-transformers DynamicPositionBias"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.SCORE_BIAS})

    hidden: int = choice(16, 32, 64, default=32, help="hidden units of the network")

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        return DynamicModule(heads.heads, self.hidden)

    def flops_per_token(self, dims: Dims, heads: HeadShape, length: int, causal: bool) -> float:
        return self.hidden * (2.0 + 2.0 * heads.heads) * (2 * length - 1) / length
