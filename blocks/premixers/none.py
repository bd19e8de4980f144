"""No block before the mixer."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from blocks.families import (
    BOTH_DIRECTIONS,
    AbstractPremixer,
    Context,
    Dims,
    Direction,
    MixerModule,
    PositionModule,
    State,
)
from blocks.registry import register


class Passing(MixerModule):
    """The input, unchanged."""

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        return x

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        return {}

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        return x, state


@register
@dataclass(frozen=True, kw_only=True)
class NoPremixer(AbstractPremixer):
    """The mixer gets its input as it is."""

    kind: ClassVar[str] = "none"
    paper: ClassVar[str] = "Attention Is All You Need, Vaswani et al. 2017, arXiv:1706.03762"
    proof: ClassVar[str] = "test_no_premixer_passes_its_input"
    reference: ClassVar[str] = "the identity"
    directions: ClassVar[frozenset[Direction]] = BOTH_DIRECTIONS
    packs: ClassVar[bool] = True

    def build(self, dims: Dims) -> MixerModule:
        return Passing()

    def flops_per_token(self, dims: Dims) -> float:
        return 0.0
