"""Relative keys: a learned vector per distance, added to the key."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from blocks.families import AbstractPosition, Dims, Direction, HeadShape, Hook, PositionModule, Role, mark
from blocks.ops.distance import distances
from blocks.ops.relative import against_rows, by_pair
from blocks.registry import register
from search_space.domains import choice


def clipped_rows(
    n_query: int, n_key: int, start: int, farthest: int, direction: Direction, device: torch.device
) -> Int[Tensor, "T S"]:
    """The row of each pair's distance in a table whose row 0 is distance 0, or, looking both ways, -farthest."""
    distance = distances(n_query, n_key, start, device)
    if direction == Direction.CAUSAL:
        return distance.clamp(0, farthest)
    return distance.clamp(-farthest, farthest) + farthest


def row_count(farthest: int, direction: Direction) -> int:
    """Rows of such a table."""
    return farthest + 1 if direction == Direction.CAUSAL else 2 * farthest + 1


class ShawModule(PositionModule):
    """Logits q (k + a) / sqrt(K), a the table's row of the clipped distance; one table for all heads and layers.

    Starts at zero, without positions.
    """

    def __init__(self, farthest: int, head_dim: int, direction: Direction) -> None:
        super().__init__()
        self.farthest = farthest
        self.direction = direction
        self.relative_keys = mark(nn.Parameter(torch.zeros(row_count(farthest, direction), head_dim)), Role.BIAS_TABLE)

    def content_bias(
        self, q: Float[Tensor, "B T H K"], k: Float[Tensor, "B S G K"], start: int = 0
    ) -> Float[Tensor, "B H T S"]:
        row = clipped_rows(q.shape[1], k.shape[1], start, self.farthest, self.direction, q.device)
        return by_pair(against_rows(q, self.relative_keys[:, None]) * q.shape[3] ** -0.5, row)


@register
@dataclass(frozen=True, kw_only=True)
class Shaw(AbstractPosition):
    """Every query also looks for distances: keys get a learned vector per distance, one for all that lie far."""

    kind: ClassVar[str] = "shaw"
    paper: ClassVar[str] = (
        "Self-Attention with Relative Position Representations, eq. 4, Shaw et al. 2018, arXiv:1803.02155"
    )
    proof: ClassVar[str] = "test_shaw_adds_a_vector_per_clipped_distance_to_each_key"
    reference: ClassVar[str] = "its published formula, written out in the test"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.CONTENT_BIAS})

    farthest: int = choice(8, 16, 32, 64, default=16, help="distances from here on share one vector")

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        return ShawModule(min(self.farthest, dims.max_len - 1), heads.head_dim, dims.direction)

    def canonical(self, dims: Dims) -> AbstractPosition:
        return dataclasses.replace(self, farthest=min(self.farthest, dims.max_len - 1))

    def flops_per_token(self, dims: Dims, heads: HeadShape, length: int, causal: bool) -> float:
        rows = row_count(min(self.farthest, dims.max_len - 1), dims.direction)
        return 2.0 * heads.heads * heads.head_dim * rows
