"""Rotary positions: queries and keys are rotated so that their dot product knows the distance."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from blocks.families import AbstractPosition, Dims, HeadShape, Hook, InfeasibleArchitecture, PositionModule
from blocks.ops.rotation import angles, rotate_pairs
from blocks.registry import register
from search_space.domains import choice

BASE = 10000.0
"""The base of the paper; a head that turns a single pair has no use for another, its frequency being 1."""


def require_even(kind: str, heads: HeadShape) -> None:
    """Raise InfeasibleArchitecture unless channels can be paired."""
    if heads.head_dim % 2:
        raise InfeasibleArchitecture(
            f"model.position.kind={kind!r} rotates channels in pairs and needs an even head_dim; the mixer has "
            f"head_dim {heads.head_dim}; choose an even one"
        )


class RotaryModule(PositionModule):
    """Pair i of a query or key at position p is turned by p * base^(-2i/K)."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.base = base

    def rotate(
        self, q: Float[Tensor, "B T H K"], k: Float[Tensor, "B S G K"], start: int = 0
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B S G K"]]:
        wide = torch.promote_types(q.dtype, torch.float32)
        angle_k = angles(0, k.shape[1], k.shape[3], self.base, k.device, wide)
        if start + q.shape[1] == k.shape[1]:
            angle_q = angle_k[start:]
        else:
            angle_q = angles(start, q.shape[1], q.shape[3], self.base, q.device, wide)
        return rotate_pairs(q, angle_q).to(q.dtype), rotate_pairs(k, angle_k).to(k.dtype)


@register
@dataclass(frozen=True, kw_only=True)
class Rotary(AbstractPosition):
    """Queries and keys are rotated by their position, so that attention depends on distance; no parameters."""

    kind: ClassVar[str] = "rotary"
    paper: ClassVar[str] = (
        "RoFormer: Enhanced Transformer with Rotary Position Embedding, Su et al. 2021, arXiv:2104.09864; Effective "
        "Long-Context Scaling of Foundation Models, section 4.1 on the base, Xiong et al. 2023, arXiv:2309.16039"
    )
    proof: ClassVar[str] = "test_rotary_equals_llama"
    reference: ClassVar[str] = "transformers apply_rotary_pos_emb of Llama; x-transformers"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.ROTATE})

    base: float = choice(
        1000.0,
        10000.0,
        100000.0,
        500000.0,
        default=BASE,
        opt_in=True,
        help="ratio of the slowest to the fastest wavelength, nearly; larger suits longer sequences",
    )

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        return RotaryModule(self.base)

    def check(self, dims: Dims, heads: HeadShape) -> None:
        require_even(self.kind, heads)
