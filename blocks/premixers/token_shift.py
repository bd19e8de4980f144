"""A mix of each token with the one before it, channel by channel."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import AbstractPremixer, Context, Dims, MixerModule, PositionModule, Role, State, mark
from blocks.registry import register


class TokenShiftModule(MixerModule):
    """x_t + mix * (x_{t-1} - x_t), with zeros before the first token; starts as the identity."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.mix = mark(nn.Parameter(torch.zeros(d_model)), Role.SCALAR)

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        if context.live is not None:
            x = x * context.live[:, :, None]
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        if context.segments is not None:
            joined = context.segments[:, 1:] == context.segments[:, :-1]
            before = before * nn.functional.pad(joined, (1, 0))[:, :, None]
        return x + self.mix.to(x.dtype) * (before - x)

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
    """Each channel is a learned mix of this token and the one before it: what a convolution over two tokens costs."""

    kind: ClassVar[str] = "token_shift"
    paper: ClassVar[str] = "RWKV: Reinventing RNNs for the Transformer Era, Peng et al. 2023, eq. 9, arXiv:2305.13048"
    proof: ClassVar[str] = "test_it_mixes_as_rwkv_does"
    reference: ClassVar[str] = "its published formula, written out in the test"
    packs: ClassVar[bool] = True

    def build(self, dims: Dims) -> MixerModule:
        return TokenShiftModule(dims.d_model)

    def flops_per_token(self, dims: Dims) -> float:
        return 2.0 * dims.d_model
