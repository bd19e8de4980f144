"""A short causal convolution before the mixer."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import AbstractPremixer, Context, Dims, MixerModule, PositionModule, Role, State, mark
from blocks.ops.short_convolution import short_convolution
from blocks.registry import register
from search_space.domains import choice


class ShortConvModule(MixerModule):
    """Each channel a weighted sum of its last few values; starts as the identity, every tap trainable at once."""

    def __init__(self, d_model: int, width: int) -> None:
        super().__init__()
        taps = torch.zeros(d_model, width)
        taps[:, -1] = 1.0
        self.taps = mark(nn.Parameter(taps), Role.CONVOLUTION, fan_in=width, fan_out=width)
        self.width = width

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        if context.live is not None:
            x = x * context.live[:, :, None]
        return short_convolution(x, self.taps, x.new_zeros(x.shape[0], self.width - 1, x.shape[2]))

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        return {"inputs": torch.zeros(batch, self.width - 1, self.taps.shape[0], device=device, dtype=dtype)}

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        history = state["inputs"]
        kept = torch.cat([history, x.to(history.dtype)], dim=1)[:, x.shape[1] :]
        return short_convolution(x, self.taps, history), {"inputs": kept}


@register
@dataclass(frozen=True, kw_only=True)
class ShortConv(AbstractPremixer):
    """A depthwise causal convolution: each channel mixes its last few tokens, which gives attention adjacent pairs."""

    kind: ClassVar[str] = "short_conv"
    paper: ClassVar[str] = (
        "Hungry Hungry Hippos: Towards Language Modeling with State Space Models, Fu et al. 2022, arXiv:2212.14052; "
        "Mamba: Linear-Time Sequence Modeling with Selective State Spaces, Gu and Dao 2023, arXiv:2312.00752"
    )
    proof: ClassVar[str] = "test_short_convolution_equals_a_depthwise_convolution"
    reference: ClassVar[str] = "torch conv1d(groups=channels)"

    width: int = choice(2, 3, 4, default=4, help="tokens each channel mixes, the current one included")

    def build(self, dims: Dims) -> MixerModule:
        return ShortConvModule(dims.d_model, self.width)

    def flops_per_token(self, dims: Dims) -> float:
        return 2.0 * dims.d_model * self.width
