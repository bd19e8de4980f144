"""Muon: hidden matrices move along orthogonal directions, everything else by AdamW."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from blocks.families import MATRICES, InfeasibleArchitecture, Role
from blocks.model import ModelConfig
from blocks.registry import register
from runners.optimize import AbstractOptimizer, paced, parameter_groups
from runners.sharding import laid_like, whole
from search_space.domains import choice, float_range

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration; singular values end between 0.68 and 1.13."""
STEPS = 5
RMS_OF_ADAM = 0.2
"""Root mean square of AdamW's updates as Liu et al. 2025 saw it."""
HIDDEN = MATRICES - {Role.HEAD, Role.ROUTER}
"""Roles of the matrices between hidden layers."""


@register
@dataclass(frozen=True, kw_only=True)
class Muon(AbstractOptimizer):
    """Hidden matrices by orthogonalised momentum, the rest by AdamW, both at AdamW's learning rate."""

    kind: ClassVar[str] = "muon"
    paper: ClassVar[str] = (
        "Jordan et al. 2024, Muon: an optimizer for hidden layers in neural networks; updates scaled after Liu et al. "
        "2025, Muon is Scalable for LLM Training, eq. 4, arXiv:2502.16982"
    )

    learning_rate: float = float_range(
        1e-5, 1e-1, default=3e-3, log=True, live="value", help="Peak learning rate; that of AdamW serves"
    )
    weight_decay: float = float_range(
        0.0,
        1.0,
        default=0.1,
        opt_in=True,
        live="value",
        help="Pull of matrices towards zero, per step and unit of learning rate",
    )
    momentum: float = float_range(
        0.0, 0.999, default=0.95, opt_in=True, live="rest", help="Memory of the momentum of hidden matrices"
    )
    nesterov: bool = choice(True, False, default=True, opt_in=True, help="Look ahead along the momentum")
    beta1: float = float_range(0.0, 0.99, default=0.9, opt_in=True, live="rest", help="AdamW's, for what is no matrix")
    beta2: float = float_range(0.8, 0.9999, default=0.95, opt_in=True, live="rest", help="AdamW's second memory")
    epsilon: float = float_range(
        1e-12, 1e-3, default=1e-8, log=True, opt_in=True, live="value", help="Floor of AdamW's denominator"
    )

    def check(self, model: ModelConfig) -> None:
        factors = {
            model.init.learning_rate_factor(role, width, width, layers)
            for role in HIDDEN
            for width in (64, 128)
            for layers in (1, 2)
        }
        if factors != {1.0}:
            raise InfeasibleArchitecture(
                f"optimizer.kind='muon' has no rule for width and depth: model.init.kind={model.init.kind!r} gives "
                f"hidden matrices learning rates that suit Adam's steps; take optimizer.kind='adamw' or another init"
            )

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        decayed, kept = parameter_groups(model)
        hidden = [parameter for parameter in decayed if parameter.role in HIDDEN and parameter.ndim > 1]  # type: ignore[attr-defined]
        ids = {id(parameter) for parameter in hidden}
        rest = [parameter for parameter in decayed if id(parameter) not in ids]
        groups = [
            *({**group, "orthogonal": True} for group in paced(hidden, self.weight_decay, self.learning_rate)),
            *paced(rest, self.weight_decay, self.learning_rate),
            *paced(kept, 0.0, self.learning_rate),
        ]
        defaults = {
            "lr": self.learning_rate,
            "orthogonal": False,
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "betas": (self.beta1, self.beta2),
            "eps": self.epsilon,
        }
        return OrthogonalMomentum(groups, defaults)


class OrthogonalMomentum(torch.optim.Optimizer):
    """The update of Muon for groups marked `orthogonal`, of AdamW for the others."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; takes no closure."""
        assert closure is None, "takes no closure"
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            if held:
                (self._orthogonal if group["orthogonal"] else self._adamw)(group, held)

    def _orthogonal(self, group: dict[str, Any], held: Sequence[Tensor]) -> None:
        """Matrices of one shape are orthogonalised together."""
        beta = group["momentum"]
        alike: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for parameter in held:
            gradient = parameter.grad
            assert gradient is not None
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            momentum = state["momentum"].lerp_(gradient, 1.0 - beta)
            ahead = gradient.lerp(momentum, beta) if group["nesterov"] else momentum
            alike[parameter.shape].append((parameter, whole(ahead)))
        for shape, pairs in alike.items():
            updates = orthogonalised(torch.stack([ahead for _, ahead in pairs]))
            size = RMS_OF_ADAM * max(shape[-2:]) ** 0.5
            for (parameter, _), update in zip(pairs, updates, strict=True):
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                parameter.add_(laid_like(update, parameter), alpha=-group["lr"] * size)

    def _adamw(self, group: dict[str, Any], held: list[Tensor]) -> None:
        states = [self._adam_state(parameter) for parameter in held]
        beta1, beta2 = group["betas"]
        adamw(
            held,
            [parameter.grad for parameter in held if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _adam_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def orthogonalised(matrices: Tensor) -> Tensor:
    """Near the orthogonal factor U V^T of each matrix [..., M, N] = U S V^T; in bfloat16 on a GPU.

    Five steps of the quintic Newton-Schulz iteration of Jordan et al. 2024 bring every singular value that is not tiny
    beside the largest into 0.68 to 1.13; a matrix of zeros stays zero.
    """
    a, b, c = COEFFICIENTS
    found = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = found.shape[-2] > found.shape[-1]
    found = found.mT if tall else found
    found = found / found.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(STEPS):
        square = found @ found.mT
        found = a * found + (b * square + c * square @ square) @ found
    return (found.mT if tall else found).to(matrices.dtype)
