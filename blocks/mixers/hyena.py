"""Hyena: a gated convolution as long as the sequence, whose filter is a small network of the distance."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from blocks.families import (
    AbstractMixer,
    Context,
    Dims,
    HeadShape,
    Hook,
    MixerModule,
    PositionModule,
    Role,
    State,
    linear,
    mark,
)
from blocks.mixers import recurrence
from blocks.ops.gated_scan import widened
from blocks.ops.long_convolution import BLOCK, ConvolutionNeeds, choose_long_convolution
from blocks.ops.precision import full_precision
from blocks.ops.short_convolution import short_convolution
from blocks.registry import register
from search_space.domains import choice

FREQUENCIES = 4
"""Sines and cosines of the distance that the filter's network sees, beside the distance itself."""
SLOWEST, FASTEST = math.log(100) / 1.5, math.log(100) / 0.3
"""Decay rates over the longest sequence: a channel falls to a hundredth within 0.3 to 1.5 times its length."""
TAPS = 3


class ImplicitFilter(nn.Module):
    """h_t = exp(-rate t/L) * network(t/L, sines of t/L) per channel (Poli et al. 2023, eq. 7), at distances below L.

    All is computed in float32 or wider: the sines multiply what rounding does to their argument.
    """

    def __init__(self, channels: int, width: int, longest: int) -> None:
        super().__init__()
        self.longest = longest
        self.enter = linear(1 + 2 * FREQUENCIES, width, Role.QUERY, bias=True)
        self.middle = linear(width, width, Role.QUERY, bias=True)
        self.leave = linear(width, channels, Role.QUERY)
        self.frequency = mark(nn.Parameter(torch.full((width,), 10.0)), Role.SCALAR)

    def forward(self, n_taps: int) -> Float[Tensor, "T W"]:
        """The taps at distances 0 to n_taps - 1."""
        device, (frequency,) = self.frequency.device, widened(self.frequency)
        with full_precision(device):
            share = torch.arange(n_taps, device=device, dtype=frequency.dtype)[:, None] / self.longest
            harmonics = torch.arange(1, FREQUENCIES + 1, device=device, dtype=frequency.dtype) * 2 * math.pi
            inputs = torch.cat([share, torch.sin(share * harmonics), torch.cos(share * harmonics)], dim=-1)
            hidden = torch.sin(frequency * _mapped(self.enter, inputs))
            hidden = torch.sin(_mapped(self.middle, hidden))
            return _mapped(self.leave, hidden) * torch.exp(-self.rates() * share)

    def rates(self) -> Float[Tensor, "W"]:
        """How fast each channel fades over the longest sequence."""
        weight = self.leave.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        return torch.linspace(SLOWEST, FASTEST, weight.shape[0], device=weight.device, dtype=wide)


def _mapped(layer: nn.Linear, x: Float[Tensor, "T W"]) -> Float[Tensor, "T U"]:
    return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


class HyenaModule(MixerModule):
    """y = x_1 * (h conv (x_2 * v) + d * (x_2 * v)), each of x_1, x_2 and v convolved over three tokens before.

    A convolution has no state of fixed size: decoding keeps every earlier x_2 * v.
    """

    def __init__(self, *, d_model: int, width: int, filter_width: int, longest: int) -> None:
        super().__init__()
        self.width = width
        self.longest = longest
        self.query = linear(d_model, width, Role.QUERY)
        self.key = linear(d_model, width, Role.KEY)
        self.value = linear(d_model, width, Role.VALUE)
        taps = torch.zeros(3 * width, TAPS)
        taps[:, -1] = 1.0
        self.taps = mark(nn.Parameter(taps), Role.CONVOLUTION, fan_in=TAPS, fan_out=TAPS)
        self.filter = ImplicitFilter(width, filter_width, longest)
        self.skip = mark(nn.Parameter(torch.ones(width)), Role.SCALAR)
        self.out = linear(width, d_model, Role.MIXER_OUT)
        chosen = choose_long_convolution(ConvolutionNeeds())
        self.convolve = chosen.run
        self.backends = {"long convolution": chosen.record}

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        x = recurrence.masked(x, context.live)
        history = x.new_zeros(x.shape[0], TAPS - 1, 3 * self.width)
        gate, u = self._inputs(self._projected(x), history)
        u = recurrence.masked(u, context.live)
        return self._join(self.convolve(u, self.filter(x.shape[1])), u, gate)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        return {
            "inputs": torch.zeros(batch, TAPS - 1, 3 * self.width, device=device, dtype=dtype),
            "past": torch.zeros(batch, 0, self.width, device=device, dtype=dtype),
        }

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        projected, new = self._projected(x), x.shape[1]
        gate, u = self._inputs(projected, state["inputs"])
        kept = torch.cat([state["inputs"], projected.to(state["inputs"].dtype)], dim=1)[:, new:]
        past = torch.cat([state["past"], u.to(state["past"].dtype)], dim=1)
        taps = self.filter(past.shape[1])
        mixed = (past * taps.flip(0)).sum(1, keepdim=True) if new == 1 else self.convolve(past, taps)[:, -new:]
        return self._join(mixed, u, gate), {"inputs": kept, "past": past}

    def _projected(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T W"]:
        return torch.cat([self.query(x), self.key(x), self.value(x)], dim=-1)

    def _inputs(
        self, projected: Float[Tensor, "B T W"], history: Float[Tensor, "B R W"]
    ) -> tuple[Float[Tensor, "B T U"], Float[Tensor, "B T U"]]:
        """The outer gate, and what the long convolution takes."""
        gate, inner, value = short_convolution(projected, self.taps, history).chunk(3, dim=-1)
        return gate, inner * value

    def _join(
        self, mixed: Float[Tensor, "B T W"], u: Float[Tensor, "B T W"], gate: Float[Tensor, "B T W"]
    ) -> Float[Tensor, "B T D"]:
        return self.out(((mixed + self.skip * u) * gate).to(u.dtype))


@register
@dataclass(frozen=True, kw_only=True)
class Hyena(AbstractMixer):
    """Each channel is convolved with a learned filter of full length between two gates; nothing looks at content."""

    kind: ClassVar[str] = "hyena"
    paper: ClassVar[str] = (
        "Hyena Hierarchy: Towards Larger Convolutional Language Models, Poli et al. 2023, arXiv:2302.10866"
    )
    proof: ClassVar[str] = "test_hyena_is_a_gated_direct_convolution"
    reference: ClassVar[str] = "torch conv1d"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING})
    absorbs: ClassVar[frozenset[Role]] = frozenset({Role.QUERY})
    """The filter's maps run over places, not over tokens."""

    width: int = choice(32, 64, 128, 256, default=128, help="channels that are convolved; decoding keeps one per token")
    filter_width: int = choice(16, 32, 64, default=32, help="width of the network that gives the filter")

    def build(self, dims: Dims) -> MixerModule:
        return HyenaModule(d_model=dims.d_model, width=self.width, filter_width=self.filter_width, longest=dims.max_len)

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=1, kv_heads=1, head_dim=self.width)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        """The filter is made once per pass and shared by its rows, and is left out."""
        direct = float(min(BLOCK, length)) if not causal else (min(BLOCK, length) + 1) / 2
        carried, block = 0.0, BLOCK
        while block < length:
            # Half of the tokens are carried by two transforms of 2C, at 2.5 n log n each, and a complex product.
            carried += (2 * 2.5 * 2 * block * math.log2(2 * block) + 6 * block) / (2 * block)
            block *= 2
        return 8.0 * dims.d_model * self.width + self.width * (2.0 * direct + carried + 2.0 * 3 * TAPS)
