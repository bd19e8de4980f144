"""The inner products of sinusoidal positions as a bias on attention logits."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from blocks.families import AbstractPosition, Dims, HeadShape, Hook, PositionModule
from blocks.ops.toeplitz import every_distance, over_pairs
from blocks.ops.turning import plain_frequencies
from blocks.registry import register
from search_space.domains import choice

BASE = 10000.0


class SandwichModule(PositionModule):
    """Adds sum_i (cos(w_i d) - 1) / (8 h / H) for head h = 1..H.

    The constant in it changes no softmax, and keeps near distances near zero, where numbers are exact.
    """

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.width = width
        self.register_buffer("anchor", torch.empty(0), persistent=False)

    def score_bias(self, n_query: int, n_key: int, start: int = 0) -> Float[Tensor, "H T S"]:
        anchor = self.get_buffer("anchor")
        wide = torch.promote_types(anchor.dtype, torch.float32)
        distance = every_distance(n_query, n_key, start, anchor.device).to(wide)
        frequency = plain_frequencies(self.width, BASE, anchor.device, wide)
        product = ((distance[:, None] * frequency).cos() - 1).sum(-1)
        compression = 8 * torch.arange(1, self.heads + 1, device=anchor.device, dtype=wide) / self.heads
        return over_pairs(product / compression[:, None], n_key)


@register
@dataclass(frozen=True, kw_only=True)
class Sandwich(AbstractPosition):
    """Logits fall with distance as products of sinusoidal positions do, each head at its own rate; no parameters."""

    kind: ClassVar[str] = "sandwich"
    paper: ClassVar[str] = (
        "Dissecting Transformer Length Extrapolation via the Lens of Receptive Field Analysis, section 5, Chi et al. "
        "2023, arXiv:2212.10356"
    )
    proof: ClassVar[str] = "test_sandwich_is_the_product_of_sinusoidal_positions_up_to_a_constant_per_head"
    reference: ClassVar[str] = "products of sinusoidal positions"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.SCORE_BIAS})

    width: int = choice(
        32, 64, 128, default=128, opt_in=True, help="channels of the sinusoids whose products are the bias"
    )

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        return SandwichModule(heads.heads, self.width)
