"""A penalty on attention logits that grows linearly with distance."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from blocks.families import AbstractPosition, Dims, HeadShape, Hook, PositionModule
from blocks.ops.distance import distances
from blocks.registry import register


def slopes(heads: int, device: torch.device) -> Float[Tensor, "H"]:
    """The penalty per token of each head, for any number of heads.

    A power of two n gives 2^(-8/n), 2^(-16/n), ...; other counts take those of the power below, then every second one
    of the power above.
    """
    lower = 2 ** math.floor(math.log2(heads))
    first = torch.arange(1, lower + 1, device=device, dtype=torch.float32) * (-8 / lower)
    second = torch.arange(1, 2 * (heads - lower) + 1, 2, device=device, dtype=torch.float32) * (-4 / lower)
    return torch.exp2(torch.cat([first, second]))


class AlibiModule(PositionModule):
    """Subtracts slope times distance from each logit, on both sides alike."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.register_buffer("anchor", torch.empty(0), persistent=False)

    def score_bias(self, n_query: int, n_key: int, start: int = 0) -> Float[Tensor, "H T S"]:
        device = self.get_buffer("anchor").device
        return -slopes(self.heads, device)[:, None, None] * distances(n_query, n_key, start, device).abs()


@register
@dataclass(frozen=True, kw_only=True)
class Alibi(AbstractPosition):
    """Each head lowers its logits in proportion to distance, at a fixed rate of its own; extends to longer text."""

    kind: ClassVar[str] = "alibi"
    paper: ClassVar[str] = (
        "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation, Press et al. 2021, "
        "arXiv:2108.12409"
    )
    proof: ClassVar[str] = "test_alibi_equals_bloom_up_to_a_shift_per_row_and_x_transformers"
    reference: ClassVar[str] = "transformers build_alibi_tensor of Bloom; x-transformers"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.SCORE_BIAS})

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        return AlibiModule(heads.heads)
