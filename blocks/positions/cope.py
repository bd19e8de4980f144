"""Contextual positions: each query counts the tokens that its own gates let through."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import einsum, repeat
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import CAUSAL_ONLY, AbstractPosition, Dims, Direction, HeadShape, Hook, PositionModule, Role, mark
from blocks.ops.distance import distances
from blocks.ops.precision import full_precision
from blocks.ops.relative import against_rows
from blocks.ops.running_sum import running_sum
from blocks.registry import register
from search_space.domains import choice


def counted_positions(gates: Float[Tensor, "B H T S"], start: int) -> Float[Tensor, "B H T S"]:
    """p_ij: the sum of query i's gates over the keys from j to the query itself; keys after it are not counted."""
    past = distances(gates.shape[2], gates.shape[3], start, gates.device) >= 0
    return running_sum((gates * past).flatten(0, 2).flip(-1)).flip(-1).reshape(gates.shape)


def interpolated(scores: Float[Tensor, "B H T N"], place: Float[Tensor, "B H T S"]) -> Float[Tensor, "B H T S"]:
    """Each query's score at real places between whole ones; places past the last score stand there."""
    place = place.clamp_max(scores.shape[-1] - 1)
    below = place.floor()
    share = place - below
    return scores.gather(-1, below.long()) * (1 - share) + scores.gather(-1, place.ceil().long()) * share


class CopeModule(PositionModule):
    """Adds q e[p], e interpolated, p counted with gates sigmoid(q k / sqrt(K)); one table for all heads and layers.

    Starts at zero, without positions.
    """

    def __init__(self, rows: int, head_dim: int) -> None:
        super().__init__()
        self.table = mark(nn.Parameter(torch.zeros(rows, head_dim)), Role.BIAS_TABLE)

    def content_bias(
        self, q: Float[Tensor, "B T H K"], k: Float[Tensor, "B S G K"], start: int = 0
    ) -> Float[Tensor, "B H T S"]:
        wide = torch.promote_types(q.dtype, torch.float32)
        keys = repeat(k.to(wide), "B S G K -> B S (G R) K", R=q.shape[2] // k.shape[2])
        with full_precision(q.device):
            logits = einsum(q.to(wide), keys, "B T H K, B S H K -> B H T S") * q.shape[3] ** -0.5
        return interpolated(against_rows(q, self.table[:, None]), counted_positions(logits.sigmoid(), start))


@register
@dataclass(frozen=True, kw_only=True)
class Cope(AbstractPosition):
    """Each query counts only tokens it gates in, words or sentences say, and reads positions off that count."""

    kind: ClassVar[str] = "cope"
    paper: ClassVar[str] = (
        "Contextual Position Encoding: Learning to Count What's Important, section 4, Golovneva et al. 2024, "
        "arXiv:2405.18719"
    )
    proof: ClassVar[str] = "test_contextual_positions_equal_x_transformers"
    reference: ClassVar[str] = "x-transformers CoPE"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.CONTENT_BIAS})
    directions: ClassVar[frozenset[Direction]] = CAUSAL_ONLY

    farthest: int = choice(16, 32, 64, default=64, help="counts from here on share one vector")

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        return CopeModule(min(self.farthest, dims.max_len) + 1, heads.head_dim)

    def canonical(self, dims: Dims) -> AbstractPosition:
        return dataclasses.replace(self, farthest=min(self.farthest, dims.max_len))

    def flops_per_token(self, dims: Dims, heads: HeadShape, length: int, causal: bool) -> float:
        keys = (length + 1) / 2 if causal else float(length)
        return 2.0 * heads.heads * heads.head_dim * (keys + min(self.farthest, dims.max_len) + 1)
