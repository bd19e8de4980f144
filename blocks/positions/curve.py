"""A learned curve: a small network from one number to a bias per head, shared by the schemes that learn one."""

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import Role, mark
from blocks.ops.precision import full_precision


class Curve(nn.Module):
    """One number to a bias per head through one hidden layer.

    Starts as torch draws linear maps. The last layer has no bias: a constant on all logits changes no softmax.
    """

    def __init__(self, hidden: int, heads: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.hidden = nn.Linear(1, hidden)
        self.out = nn.Linear(hidden, heads, bias=False)
        self.activation = activation
        for parameter, role in (
            (self.hidden.weight, Role.BIAS_TABLE),
            (self.hidden.bias, Role.BIAS),
            (self.out.weight, Role.BIAS_TABLE),
        ):
            assert isinstance(parameter, nn.Parameter)
            mark(parameter, role)

    def forward(self, x: Float[Tensor, "*A"]) -> Float[Tensor, "*A H"]:
        """In the precision of x."""
        with full_precision(x.device):
            inner = F.linear(x[..., None], self.hidden.weight.to(x.dtype), self.hidden.bias.to(x.dtype))
            return F.linear(self.activation(inner), self.out.weight.to(x.dtype))
