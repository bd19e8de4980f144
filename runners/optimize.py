"""Optimisers, learning-rate schedules and parameter groups."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from blocks.families import MATRICES
from blocks.init import learning_rate_factor
from blocks.model import ModelConfig
from blocks.registry import register
from search_space.domains import float_range


class AbstractOptimizer:
    """How gradients become updates."""

    kind: ClassVar[str]
    paper: ClassVar[str]
    learning_rate: float
    """Peak of the schedule."""

    def check(self, model: ModelConfig) -> None:
        """Raises InfeasibleArchitecture when this optimiser cannot train the model as its init rule asks."""

    @abstractmethod
    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """An optimiser over every parameter of the model; learning rates start at the peak."""


class AbstractSchedule:
    """How the learning rate moves over the budget."""

    kind: ClassVar[str]
    paper: ClassVar[str]

    @abstractmethod
    def factor(self, progress: float) -> float:
        """Share of the peak learning rate at a share of the token budget, both in 0 to 1."""


@register
@dataclass(frozen=True, kw_only=True)
class AdamW(AbstractOptimizer):
    """Adam with decoupled weight decay on matrices only."""

    kind: ClassVar[str] = "adamw"
    paper: ClassVar[str] = "Loshchilov & Hutter 2019, Decoupled Weight Decay Regularization, algorithm 2"

    learning_rate: float = float_range(
        1e-5, 1e-1, default=3e-3, log=True, live="value", help="Peak learning rate; search it with the architecture"
    )
    weight_decay: float = float_range(
        0.0,
        1.0,
        default=0.1,
        opt_in=True,
        live="value",
        help="Pull of matrices towards zero, per step and unit of learning rate",
    )
    beta1: float = float_range(0.0, 0.99, default=0.9, opt_in=True, live="rest", help="Memory of the gradient mean")
    beta2: float = float_range(
        0.8, 0.9999, default=0.95, opt_in=True, live="rest", help="Memory of the squared gradient"
    )
    epsilon: float = float_range(
        1e-12, 1e-3, default=1e-8, log=True, opt_in=True, live="value", help="Floor of the denominator"
    )

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        decayed, kept = parameter_groups(model)
        groups = [*paced(decayed, self.weight_decay, self.learning_rate), *paced(kept, 0.0, self.learning_rate)]
        return torch.optim.AdamW(
            groups,
            lr=self.learning_rate,
            betas=(self.beta1, self.beta2),
            eps=self.epsilon,
            fused=True,
        )


@register
@dataclass(frozen=True, kw_only=True)
class Cosine(AbstractSchedule):
    """Linear warm-up, then half a cosine down to a final share."""

    kind: ClassVar[str] = "cosine"
    paper: ClassVar[str] = "Loshchilov & Hutter 2017, SGDR, eq. 5, without restarts"

    warmup: float = float_range(0.0, 0.5, default=0.1, opt_in=True, help="Share of the budget spent warming up")
    final: float = float_range(0.0, 1.0, default=0.1, opt_in=True, help="Share of the peak left at the end")

    def factor(self, progress: float) -> float:
        if progress < self.warmup:
            return progress / self.warmup
        done = (progress - self.warmup) / (1.0 - self.warmup)
        return self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * done))


@register
@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(AbstractSchedule):
    """Linear warm-up, a plateau at the peak, then linear decay to zero."""

    kind: ClassVar[str] = "wsd"
    paper: ClassVar[str] = "Hu et al. 2024, MiniCPM, section 4; linear decay after Hägele et al. 2024"

    warmup: float = float_range(0.0, 0.5, default=0.1, opt_in=True, help="Share of the budget spent warming up")
    decay: float = float_range(0.0, 0.5, default=0.2, opt_in=True, help="Share of the budget spent decaying")

    def factor(self, progress: float) -> float:
        if progress < self.warmup:
            return progress / self.warmup
        if progress > 1.0 - self.decay:
            return (1.0 - progress) / self.decay
        return 1.0


class Course:
    """The optimiser's settings over the tokens of a trial: those it began with, then what replaced them."""

    def __init__(self, first: AbstractOptimizer, changes: Sequence[tuple[int, AbstractOptimizer]]) -> None:
        """`changes` are in order, each with the training tokens from which on it holds."""
        self._settings = (first, *(settings for _, settings in changes))
        self._begins = tuple(tokens for tokens, _ in changes)
        self._adopted = 0

    def adopt(self, optimizer: torch.optim.Optimizer, model: nn.Module, tokens: int) -> AbstractOptimizer:
        """The settings after so many tokens, put into the optimiser; its state stays."""
        due = sum(begin <= tokens for begin in self._begins)
        if due != self._adopted:
            fresh = self._settings[due].build(model)
            for group, other in zip(optimizer.param_groups, fresh.param_groups, strict=True):
                group.update({name: value for name, value in other.items() if name != "params"})
            self._adopted = due
        return self._settings[due]


def parameter_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters that decay (matrices) and those that do not, by role; shared ones once."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        role = getattr(parameter, "role", None)
        assert role is not None, f"parameter {name} carries no role; mark it where its module is built"
        (decayed if role in MATRICES else kept).append(parameter)
    return decayed, kept


def paced(parameters: list[nn.Parameter], weight_decay: float, learning_rate: float) -> list[dict[str, Any]]:
    """A group for each learning-rate factor that the init rule gave; decay per step is the same in all of them."""
    by_factor: dict[float, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_factor.setdefault(learning_rate_factor(parameter), []).append(parameter)
    return [
        {"params": group, "weight_decay": weight_decay / factor, "lr": learning_rate * factor, "factor": factor}
        for factor, group in by_factor.items()
    ]


def set_learning_rate(
    optimizer: torch.optim.Optimizer, config: AbstractOptimizer, schedule: AbstractSchedule, progress: float
) -> float:
    """The learning rate at a share of the budget, put into every group of the optimiser times the group's factor."""
    learning_rate = config.learning_rate * schedule.factor(progress)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("factor", 1.0)
    return learning_rate
