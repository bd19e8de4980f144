"""Residual forms that gate or weigh: gru_gate, highway_gate and depth_average.

Each acts on what a whole layer changes, mixer and FFN together. Gates mix the stream before and after a layer, which
keeps its scale under any placement.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import AbstractResidual, Dims, LayerCall, ResidualModule, Role, linear, mark
from blocks.registry import register
from search_space.domains import choice


def _shut(d_model: int, start: float) -> nn.Parameter:
    """What is taken from the gate's logit: the larger, the less of a layer gets through at first."""
    return mark(nn.Parameter(torch.full((d_model,), start)), Role.BIAS)


class GruGate(nn.Module):
    """A GRU's step from the stream x by what a layer adds, y (GTrXL, eqs. in section 3.2).

    r = sigmoid(W_r y + U_r x), z = sigmoid(W_z y + U_z x - b), h = tanh(W_g y + U_g (r x)); (1 - z) x + z h.
    """

    def __init__(self, d_model: int, start: float) -> None:
        super().__init__()
        self.reset_y, self.update_y, self.new_y = (linear(d_model, d_model, Role.FFN_GATE) for _ in range(3))
        self.reset_x, self.update_x, self.new_x = (linear(d_model, d_model, Role.FFN_GATE) for _ in range(3))
        self.shut = _shut(d_model, start)

    def forward(self, x: Float[Tensor, "B T D"], y: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        reset = torch.sigmoid(self.reset_y(y) + self.reset_x(x))
        update = torch.sigmoid(self.update_y(y) + self.update_x(x) - self.shut.to(x.dtype))
        new = torch.tanh(self.new_y(y) + self.new_x(reset * x))
        return (1 - update) * x + update * new


class HighwayGate(nn.Module):
    """x + sigmoid(W x - b) y: how much of what a layer adds, y, gets through, channel by channel."""

    def __init__(self, d_model: int, start: float) -> None:
        super().__init__()
        self.transform = linear(d_model, d_model, Role.FFN_GATE)
        self.shut = _shut(d_model, start)

    def forward(self, x: Float[Tensor, "B T D"], y: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return x + torch.sigmoid(self.transform(x) - self.shut.to(x.dtype)) * y


class Gates(ResidualModule):
    """A gate behind every layer, told of the stream and of what the layer adds."""

    def __init__(self, gates: Sequence[nn.Module]) -> None:
        super().__init__()
        self.gates = nn.ModuleList(gates)

    def forward(self, x: Float[Tensor, "B T D"], layers: Sequence[LayerCall]) -> Float[Tensor, "B T D"]:
        for gate, layer in zip(self.gates, layers, strict=True):
            x = gate(x, layer(x, None) - x)
        return x


class DepthAverage(ResidualModule):
    """Behind layer i the stream is a learned sum of the embedded input and the outputs of layers 0..i."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        rows = [torch.zeros(layer + 2) for layer in range(layers)]
        for row in rows:
            row[-1] = 1.0
        self.weights = nn.ParameterList(mark(nn.Parameter(row), Role.SCALAR) for row in rows)

    def forward(self, x: Float[Tensor, "B T D"], layers: Sequence[LayerCall]) -> Float[Tensor, "B T D"]:
        seen = [x]
        for weights, layer in zip(self.weights, layers, strict=True):
            seen.append(layer(x, None))
            x = torch.stack([weight * one for weight, one in zip(weights, seen, strict=True)]).sum(0).to(x.dtype)
        return x


@register
@dataclass(frozen=True, kw_only=True)
class GruGated(AbstractResidual):
    """A GRU decides how much of each layer enters the stream; it starts nearly shut, which steadies training."""

    kind: ClassVar[str] = "gru_gate"
    paper: ClassVar[str] = (
        "Stabilizing Transformers for Reinforcement Learning (GTrXL), Parisotto et al. 2019, section 3.2, "
        "arXiv:1910.06764"
    )
    proof: ClassVar[str] = "test_the_gru_gate_is_its_published_formula"
    reference: ClassVar[str] = "its published formula, written out in the test"

    start: float = choice(0.0, 1.0, 2.0, default=2.0, help="how far the gate is shut at first; the paper takes 2")

    def build(self, dims: Dims) -> ResidualModule:
        return Gates([GruGate(dims.d_model, self.start) for _ in range(dims.layers)])

    def flops_per_token(self, dims: Dims) -> float:
        return 12.0 * dims.layers * dims.d_model**2


@register
@dataclass(frozen=True, kw_only=True)
class HighwayGated(AbstractResidual):
    """A gate read from the stream decides, channel by channel, how much of a layer's change gets through."""

    kind: ClassVar[str] = "highway_gate"
    paper: ClassVar[str] = (
        "Highway Networks, Srivastava et al. 2015, eq. 3, arXiv:1505.00387; over pre-norm layers it is the 'output' "
        "gate of GTrXL, Parisotto et al. 2019, section 3.2, arXiv:1910.06764"
    )
    proof: ClassVar[str] = "test_an_open_highway_gate_is_plain_and_a_shut_one_passes_nothing"
    reference: ClassVar[str] = "the plain residual form"

    start: float = choice(0.0, 1.0, 2.0, default=2.0, help="how far the gate is shut at first")

    def build(self, dims: Dims) -> ResidualModule:
        return Gates([HighwayGate(dims.d_model, self.start) for _ in range(dims.layers)])

    def flops_per_token(self, dims: Dims) -> float:
        return 2.0 * dims.layers * dims.d_model**2


@register
@dataclass(frozen=True, kw_only=True)
class DenseFormer(AbstractResidual):
    """Behind every layer the stream becomes a learned sum of all streams so far; it starts as the plain form."""

    kind: ClassVar[str] = "depth_average"
    paper: ClassVar[str] = (
        "DenseFormer: Enhancing Information Flow in Transformers via Depth Weighted Averaging, Pagliardini et al. "
        "2024, section 3, arXiv:2402.02622"
    )
    proof: ClassVar[str] = "test_the_depth_average_starts_plain_and_sums_what_it_has_seen"
    reference: ClassVar[str] = "the plain residual form"

    def build(self, dims: Dims) -> ResidualModule:
        return DepthAverage(dims.layers)
