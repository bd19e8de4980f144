"""Lion: the sign of a momentum as the update."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from blocks.registry import register
from runners.optimize import AbstractOptimizer, paced, parameter_groups
from search_space.domains import float_range


@register
@dataclass(frozen=True, kw_only=True)
class Lion(AbstractOptimizer):
    """The sign of a momentum, with decoupled weight decay on matrices only: half the state of Adam."""

    kind: ClassVar[str] = "lion"
    paper: ClassVar[str] = (
        "Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, algorithm 2, arXiv:2302.06675"
    )

    learning_rate: float = float_range(
        1e-6, 1e-1, default=1e-3, log=True, live="value", help="Peak learning rate; a third to a tenth of AdamW's"
    )
    weight_decay: float = float_range(
        0.0,
        10.0,
        default=1.0,
        opt_in=True,
        live="value",
        help="Pull of matrices towards zero, per step and unit of learning rate; 3 to 10 times AdamW's",
    )
    beta1: float = float_range(
        0.0, 0.99, default=0.9, opt_in=True, live="rest", help="Share of the momentum in the update"
    )
    beta2: float = float_range(0.8, 0.9999, default=0.99, opt_in=True, live="rest", help="Memory of the momentum")

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        decayed, kept = parameter_groups(model)
        groups = [*paced(decayed, self.weight_decay, self.learning_rate), *paced(kept, 0.0, self.learning_rate)]
        return SignMomentum(groups, {"lr": self.learning_rate, "betas": (self.beta1, self.beta2)})


class SignMomentum(torch.optim.Optimizer):
    """The update of Lion; groups hold `lr`, `weight_decay` and `betas`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; takes no closure."""
        assert closure is None, "takes no closure"
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not held:
                continue
            gradients = [parameter.grad for parameter in held]
            momenta = [self._momentum(parameter) for parameter in held]
            updates = torch._foreach_lerp(gradients, momenta, beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(held, 1.0 - lr * group["weight_decay"])
            torch._foreach_add_(held, updates, alpha=-lr)
            torch._foreach_lerp_(momenta, gradients, 1.0 - beta2)

    def _momentum(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: torch.Tensor = state["momentum"]
        return momentum
