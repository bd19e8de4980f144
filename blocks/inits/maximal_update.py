"""Maximal-update parametrisation: init, learning rates and multipliers under which one learning rate fits all widths.

Inner widths are taken to grow with d_model. Adam is assumed: its steps do not depend on the size of gradients.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from blocks.families import MATRICES, RESIDUAL_OUTPUTS, AbstractInit, Dims, Role
from blocks.init import TABLES
from blocks.inits.draws import normal
from blocks.registry import register
from search_space.domains import choice

TABLE_STD = 0.02
BASE_HEAD_DIM = 64
"""Head width at which attention logits are scaled as usual; elsewhere by 8 / head_dim."""
VECTORS = frozenset({Role.GAIN, Role.BIAS, Role.SCALAR})


def hidden_std(role: Role, fan_in: int, fan_out: int, base_width: int) -> float:
    """The deviation of a weight under maximal update."""
    if role in TABLES:
        return TABLE_STD
    if role == Role.HEAD:
        return base_width**-0.5
    if role == Role.ROUTER:
        return math.sqrt(base_width) / fan_in
    return fan_in**-0.5


def width_factor(role: Role, fan_in: int, fan_out: int, base_width: int) -> float:
    """base / width for matrices between hidden layers and for routers, 1 for tables, the head and vectors."""
    if role not in MATRICES or role == Role.HEAD:
        return 1.0
    return base_width / (fan_out if role in RESIDUAL_OUTPUTS else fan_in)


@register
@dataclass(frozen=True, kw_only=True)
class Mup(AbstractInit):
    """Keeps the best learning rate where it is as the model widens: hidden matrices learn slower by base / width."""

    kind: ClassVar[str] = "mup"
    paper: ClassVar[str] = (
        "Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer, Yang et al. 2022, "
        "tables 8 and 9, arXiv:2203.03466"
    )
    proof: ClassVar[str] = "test_learning_rates_and_the_readout_are_those_of_mup"
    reference: ClassVar[str] = "mup MuAdam and MuReadout"

    base_width: int = choice(32, 64, 128, 256, default=64, help="the d_model at which learning rates are as given")

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        return hidden_std(role, fan_in, fan_out, self.base_width)

    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        normal(weight, std, generator)

    def learning_rate_factor(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        return width_factor(role, fan_in, fan_out, self.base_width)

    def logit_multiplier(self, d_model: int) -> float:
        return self.base_width / d_model

    def query_multiplier(self, head_dim: int) -> float:
        return math.sqrt(BASE_HEAD_DIM / head_dim)


@register
@dataclass(frozen=True, kw_only=True)
class CompleteP(AbstractInit):
    """Keeps the best learning rate where it is as the model widens and deepens: branches shrink with depth too."""

    kind: ClassVar[str] = "complete_p"
    paper: ClassVar[str] = (
        "Don't be lazy: CompleteP enables compute-efficient deep transformers, Dey et al. 2025, table 1, "
        "arXiv:2505.01618; exponent 1/2 is Tensor Programs VI: Feature Learning in Infinite-Depth Neural Networks, "
        "Yang et al. 2023, arXiv:2310.02244"
    )
    proof: ClassVar[str] = "test_depth_divides_branches_and_paces_layers"
    reference: ClassVar[str] = "the published multipliers"

    base_width: int = choice(32, 64, 128, 256, default=64, help="the d_model at which learning rates are as given")
    base_layers: int = choice(1, 2, 4, default=2, help="the number of layers at which they are")
    exponent: float = choice(
        0.5, 1.0, default=1.0, help="branches are divided by relative depth to this power; 1/2 is depth-muP"
    )

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        return hidden_std(role, fan_in, fan_out, self.base_width)

    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        normal(weight, std, generator)

    def learning_rate_factor(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        in_layers = role in VECTORS or role in MATRICES - {Role.HEAD}
        by_depth = (layers / self.base_layers) ** (self.exponent - 1) if in_layers else 1.0
        return width_factor(role, fan_in, fan_out, self.base_width) * by_depth

    def canonical(self, dims: Dims) -> AbstractInit:
        return Mup(base_width=self.base_width) if dims.layers == self.base_layers else self

    def branch_multiplier(self, layers: int) -> float:
        return (self.base_layers / layers) ** self.exponent

    def logit_multiplier(self, d_model: int) -> float:
        return self.base_width / d_model

    def query_multiplier(self, head_dim: int) -> float:
        return math.sqrt(BASE_HEAD_DIM / head_dim)
