"""A learned bias on the share of the text before a query that lies between it and a key."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import (
    CAUSAL_ONLY,
    AbstractPosition,
    Dims,
    Direction,
    HeadShape,
    Hook,
    PositionModule,
    Role,
    mark,
)
from blocks.ops.distance import distances
from blocks.positions.curve import Curve
from blocks.registry import register
from search_space.domains import choice

FIRST_THRESHOLD = 512.0
FIRST_STEEPNESS = 0.1


class FireModule(PositionModule):
    """Adds f(psi(i - j) / psi(max(i, L))) with psi(x) = log(c x + 1); f, c and L are learned, and shared by layers."""

    def __init__(self, heads: int, hidden: int) -> None:
        super().__init__()
        self.curve = Curve(hidden, heads, F.relu)
        self.steepness = mark(nn.Parameter(torch.tensor(FIRST_STEEPNESS)), Role.SCALAR)
        self.threshold = mark(nn.Parameter(torch.tensor(1.0)), Role.SCALAR)
        """L in units of its first value."""

    def progress(self, n_query: int, n_key: int, start: int = 0) -> Float[Tensor, "T S"]:
        """What the network reads: 0 at the query itself, up to 1 at the first token."""
        device = self.threshold.device
        wide = torch.promote_types(self.threshold.dtype, torch.float32)
        steepness = self.steepness.abs().to(wide)
        query = torch.arange(start, start + n_query, device=device, dtype=wide)
        limit = torch.maximum(query, FIRST_THRESHOLD * self.threshold.abs().to(wide))
        distance = distances(n_query, n_key, start, device).clamp_min(0).to(wide)
        tiny = torch.finfo(wide).tiny
        return torch.log1p(steepness * distance) / torch.log1p(steepness * limit).clamp_min(tiny)[:, None]

    def score_bias(self, n_query: int, n_key: int, start: int = 0) -> Float[Tensor, "H T S"]:
        return rearrange(self.curve(self.progress(n_query, n_key, start)), "T S H -> H T S")


@register
@dataclass(frozen=True, kw_only=True)
class Fire(AbstractPosition):
    """A small network reads how far back a key lies as a share of the text so far, so no length is out of its range."""

    kind: ClassVar[str] = "fire"
    paper: ClassVar[str] = (
        "Functional Interpolation for Relative Positions Improves Long Context Transformers, eq. 19, Li et al. 2023, "
        "arXiv:2310.04418"
    )
    proof: ClassVar[str] = "test_fire_is_its_formula_and_learns_its_threshold"
    reference: ClassVar[str] = "its published formula, written out in the test"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.SCORE_BIAS, Hook.PLACE})
    directions: ClassVar[frozenset[Direction]] = CAUSAL_ONLY
    relative: ClassVar[bool] = False

    hidden: int = choice(16, 32, 64, default=32, help="hidden units of the network")

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        return FireModule(heads.heads, self.hidden)

    def flops_per_token(self, dims: Dims, heads: HeadShape, length: int, causal: bool) -> float:
        keys = (length + 1) / 2 if causal else float(length)
        return self.hidden * (2.0 + 2.0 * heads.heads) * keys
