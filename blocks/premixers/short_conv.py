"""A short convolution before the mixer, causal or symmetric."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

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
from blocks.ops.short_convolution import short_convolution
from blocks.registry import register
from search_space.domains import choice


class ShortConvModule(MixerModule):
    """Each channel a weighted sum of its last few values; starts as the identity, every tap trainable at once.

    With `ahead`, of as many of its next values as well: zeros stand beyond either end.
    """

    def __init__(self, d_model: int, width: int, ahead: bool = False) -> None:
        super().__init__()
        self.width, self.ahead = width, width - 1 if ahead else 0
        n_taps = width + self.ahead
        taps = torch.zeros(d_model, n_taps)
        taps[:, width - 1] = 1.0
        self.taps = mark(nn.Parameter(taps), Role.CONVOLUTION, fan_in=n_taps, fan_out=n_taps)

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        if context.live is not None:
            x = x * context.live[:, :, None]
        reaching = F.pad(x, (0, 0, 0, self.ahead))
        history = x.new_zeros(x.shape[0], self.width - 1 + self.ahead, x.shape[2])
        return short_convolution(reaching, self.taps, history)[:, self.ahead :]

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
    """A depthwise convolution: each channel mixes its last few tokens, which gives attention adjacent pairs.

    In an encoder it reaches as far ahead.
    """

    kind: ClassVar[str] = "short_conv"
    paper: ClassVar[str] = (
        "Hungry Hungry Hippos: Towards Language Modeling with State Space Models, Fu et al. 2022, arXiv:2212.14052; "
        "Mamba: Linear-Time Sequence Modeling with Selective State Spaces, Gu and Dao 2023, arXiv:2312.00752"
    )
    proof: ClassVar[str] = "test_short_convolution_equals_a_depthwise_convolution"
    reference: ClassVar[str] = "torch conv1d(groups=channels)"

    directions: ClassVar[frozenset[Direction]] = BOTH_DIRECTIONS

    width: int = choice(
        2, 3, 4, default=4, help="tokens each channel mixes, the current one included, and as many ahead in an encoder"
    )

    def build(self, dims: Dims) -> MixerModule:
        return ShortConvModule(dims.d_model, self.width, ahead=dims.direction == Direction.BIDIRECTIONAL)

    def flops_per_token(self, dims: Dims) -> float:
        taps = self.width if dims.direction == Direction.CAUSAL else 2 * self.width - 1
        return 2.0 * dims.d_model * taps
