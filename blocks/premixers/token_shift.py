"""A mix of each token with the one before it, or with both its neighbours, channel by channel."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import (
    BOTH_DIRECTIONS,
    AbstractPremixer,
    Context,
    Dims,
    Direction,
    MixerModule,
    PositionModule,
    Role,
    State,
    mark,
)
from blocks.registry import register


class TokenShiftModule(MixerModule):
    """x_t + mix * (x_{t-1} - x_t), with zeros before the first token; starts as the identity.

    With `ahead`, the mean of both neighbours stands for the one before, with zeros beyond either end.
    """

    def __init__(self, d_model: int, ahead: bool = False) -> None:
        super().__init__()
        self.ahead = ahead
        self.mix = mark(nn.Parameter(torch.zeros(d_model)), Role.SCALAR)

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        if context.live is not None:
            x = x * context.live[:, :, None]
        earlier, later = x[:, :-1], x[:, 1:]
        if context.segments is not None:
            joined = (context.segments[:, 1:] == context.segments[:, :-1])[:, :, None]
            earlier, later = earlier * joined, later * joined
        beside = nn.functional.pad(earlier, (0, 0, 1, 0))
        if self.ahead:
            beside = (beside + nn.functional.pad(later, (0, 0, 0, 1))) / 2
        return x + self.mix.to(x.dtype) * (beside - x)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        return {"last": torch.zeros(batch, 1, self.mix.shape[0], device=device, dtype=dtype)}

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        joined = torch.cat([state["last"].to(x.dtype), x], dim=1)
        return x + self.mix.to(x.dtype) * (joined[:, :-1] - x), {"last": joined[:, -1:].to(state["last"].dtype)}


@register
@dataclass(frozen=True, kw_only=True)
class TokenShift(AbstractPremixer):
    """Each channel is a learned mix of this token and the one before it: what a convolution over two tokens costs.

    In an encoder it is mixed with the mean of both its neighbours.
    """

    kind: ClassVar[str] = "token_shift"
    paper: ClassVar[str] = "RWKV: Reinventing RNNs for the Transformer Era, Peng et al. 2023, eq. 9, arXiv:2305.13048"
    proof: ClassVar[str] = "test_it_mixes_as_rwkv_does"
    reference: ClassVar[str] = "its published formula, written out in the test"
    directions: ClassVar[frozenset[Direction]] = BOTH_DIRECTIONS
    packs: ClassVar[bool] = True

    def build(self, dims: Dims) -> MixerModule:
        return TokenShiftModule(dims.d_model, ahead=dims.direction == Direction.BIDIRECTIONAL)

    def flops_per_token(self, dims: Dims) -> float:
        return 2.0 * dims.d_model
