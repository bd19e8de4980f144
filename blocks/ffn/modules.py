"""The two shapes of feed-forward network: two matrices, and three with a gate."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import Dims, Role, linear
from search_space.domains import choice

Activation = Callable[[Tensor], Tensor]


def expansion_field() -> Any:
    """Inner width over model width."""
    return choice(
        2.0, 3.0, 4.0, default=4.0, sizing=True, help="inner width over model width of the two-matrix FFN of equal size"
    )


class PlainFFN(nn.Module):
    """W2 a(W1 x)."""

    def __init__(self, dims: Dims, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.w_in = linear(dims.d_model, dims.d_ff, Role.FFN_IN)
        self.w_out = linear(dims.d_ff, dims.d_model, Role.FFN_OUT)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.w_out(self.activation(self.w_in(x)))


class GatedFFN(nn.Module):
    """W2 (a(W1 x) * V x); the activation acts on the gate W1."""

    def __init__(self, dims: Dims, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.w_gate = linear(dims.d_model, dims.d_ff, Role.FFN_GATE)
        self.w_in = linear(dims.d_model, dims.d_ff, Role.FFN_IN)
        self.w_out = linear(dims.d_ff, dims.d_model, Role.FFN_OUT)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.w_out(self.activation(self.w_gate(x)) * self.w_in(x))


def plain_flops(dims: Dims) -> float:
    """Forward FLOPs per token of two matrices."""
    return 4.0 * dims.d_model * dims.d_ff


def gated_flops(dims: Dims) -> float:
    """Forward FLOPs per token of three matrices."""
    return 6.0 * dims.d_model * dims.d_ff
