"""Constant factors inside a model, at branches and at linear maps found by their role."""

from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import Role


class Multiply(nn.Module):
    """A constant times the input."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return x * self.factor


class _Scaled:
    """A forward hook that multiplies what a module returns."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * self.factor


def multiply_outputs(module: nn.Module, role: Role, factor: float) -> None:
    """Let every linear map of a role inside the module return so many times its output."""
    if factor == 1:
        return
    for part in module.modules():
        if isinstance(part, nn.Linear) and getattr(part.weight, "role", None) == role:
            part.register_forward_hook(_Scaled(factor))
