"""Rotation with a decay: rotary positions whose channel pairs also fade with distance, each at its own rate."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from blocks.families import (
    CAUSAL_ONLY,
    AbstractPosition,
    Dims,
    Direction,
    HeadShape,
    Hook,
    InfeasibleArchitecture,
    PositionModule,
)
from blocks.ops.rotation import angles, rotate_pairs
from blocks.positions.rotary import require_even
from blocks.registry import register

BASE = 10000.0
SCALE_BASE = 512
LONGEST = 65536
"""Above this length the factors leave the range of float32, even centred."""


def log_decay(start: float, n_rows: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Logarithm of ((2i/K + 0.4) / 1.4)^(p/512) for pair i at position p, of shape [T, 1, K/2]."""
    pair = torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim
    position = torch.arange(n_rows, device=device, dtype=dtype) + start
    return position[:, None, None] / SCALE_BASE * torch.log((pair + 0.4) / 1.4)


class XposModule(PositionModule):
    """Queries are multiplied by the decay at their position, keys divided by the decay at theirs.

    Only the ratio counts, so positions are taken from the middle of the keys: that keeps both factors in range.
    """

    def rotate(
        self, q: Float[Tensor, "B T H K"], k: Float[Tensor, "B S G K"], start: int = 0
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B S G K"]]:
        wide = torch.promote_types(q.dtype, torch.float32)
        middle = k.shape[1] / 2
        rotated = []
        for x, first, sign in ((q, start, 1.0), (k, 0, -1.0)):
            rows, head_dim = x.shape[1], x.shape[3]
            decay = torch.exp(sign * log_decay(first - middle, rows, head_dim, x.device, wide))
            turned = rotate_pairs(x, angles(first, rows, head_dim, BASE, x.device, wide))
            rotated.append((turned * torch.cat([decay, decay], dim=-1)).to(x.dtype))
        return rotated[0], rotated[1]


@register
@dataclass(frozen=True, kw_only=True)
class Xpos(AbstractPosition):
    """Rotary positions whose channels also fade with distance, the fast ones first; no parameters."""

    kind: ClassVar[str] = "xpos"
    paper: ClassVar[str] = "A Length-Extrapolatable Transformer, Sun et al. 2022, arXiv:2212.10554"
    proof: ClassVar[str] = "test_xpos_scores_equal_x_transformers"
    reference: ClassVar[str] = "x-transformers RotaryEmbedding(use_xpos=True)"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.ROTATE, Hook.SCALE})
    directions: ClassVar[frozenset[Direction]] = CAUSAL_ONLY

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        return XposModule()

    def check(self, dims: Dims, heads: HeadShape) -> None:
        require_even(self.kind, heads)
        if dims.max_len > LONGEST:
            raise InfeasibleArchitecture(
                f"model.position.kind='xpos' keeps its factors in range up to {LONGEST} positions, and the model is to "
                f"run on {dims.max_len}; evaluate at {LONGEST} or less, or choose another position scheme"
            )
