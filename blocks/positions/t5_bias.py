"""A learned bias on attention logits per head and bucket of distances."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from blocks.families import AbstractPosition, Dims, Direction, HeadShape, Hook, PositionModule, Role, mark
from blocks.ops.distance import distances
from blocks.registry import register

BUCKETS = 32
FARTHEST = 128
"""Distances from here on share the last bucket; rounding lets it begin a little before."""


def two_sided_buckets(distance: Int[Tensor, "T S"]) -> Int[Tensor, "T S"]:
    """Half the buckets for the past and the token itself, the other half for the future."""
    half = BUCKETS // 2
    return buckets(distance.abs(), half) + torch.where(distance < 0, half, 0)


def buckets(distance: Int[Tensor, "T S"], count: int = BUCKETS) -> Int[Tensor, "T S"]:
    """The first half of the distances' buckets hold one each, larger ones share the rest at equal ratios.

    The future is distance 0.
    """
    exact = count // 2
    past = distance.clamp_min(0)
    ratio = torch.log(past.clamp_min(1).float() / exact) / math.log(FARTHEST / exact)
    coarse = exact + (ratio * (count - exact)).long()
    return torch.where(past < exact, past, coarse.clamp_max(count - 1))


class T5BiasModule(PositionModule):
    """One table for all layers; unlike T5 itself, logits keep their factor head_dim^-1/2. Starts without any bias."""

    def __init__(self, heads: int, direction: Direction) -> None:
        super().__init__()
        self.buckets = buckets if direction == Direction.CAUSAL else two_sided_buckets
        self.table = mark(nn.Parameter(torch.zeros(BUCKETS, heads)), Role.BIAS_TABLE)

    def score_bias(self, n_query: int, n_key: int, start: int = 0) -> Float[Tensor, "H T S"]:
        bucket = self.buckets(distances(n_query, n_key, start, self.table.device))
        return rearrange(nn.functional.embedding(bucket, self.table), "T S H -> H T S")


@register
@dataclass(frozen=True, kw_only=True)
class T5Bias(AbstractPosition):
    """Each head learns a bias on its logits for every bucket of distances; the table is shared by all layers."""

    kind: ClassVar[str] = "t5_bias"
    paper: ClassVar[str] = (
        "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, section 2.1, Raffel et al. "
        "2020, arXiv:1910.10683"
    )
    proof: ClassVar[str] = "test_t5_buckets_and_bias_equal_transformers_and_x_transformers"
    reference: ClassVar[str] = "transformers T5Attention; x-transformers"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.SCORE_BIAS})

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        return T5BiasModule(heads.heads, dims.direction)
