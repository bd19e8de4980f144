"""Init rules: a standard deviation for every drawn parameter, from its role and its own fans.

Query, key and value matrices are separate parameters: each is drawn by its own fans, never by those of a fused matrix.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from blocks.families import MATRICES, RESIDUAL_OUTPUTS, AbstractInit, Role
from blocks.registry import register
from search_space.canon import seed_from
from search_space.domains import choice

DRAWN = MATRICES | {Role.EMBEDDING, Role.POSITION}
"""Roles a rule draws; parameters of other roles start as built."""
TABLES = frozenset({Role.EMBEDDING, Role.POSITION})
"""Roles whose rows are vectors of the residual stream: fan_out is the model width."""
GPT2_STD = 0.02


def initialise(model: nn.Module, rule: AbstractInit, layers: int, seed: int) -> None:
    """Draw every parameter of a drawn role, each from its own generator seeded by (seed, parameter name).

    A shared parameter has one name and is drawn once, by the role it was marked with.
    """
    for name, parameter in model.named_parameters():
        role = role_of(name, parameter)
        if role not in DRAWN:
            continue
        fan_in, fan_out = parameter.fans  # type: ignore[attr-defined]
        assert min(fan_in, fan_out) > 0, f"{name} has role {role} and fans {fan_in}, {fan_out}; mark it with both"
        generator = torch.Generator().manual_seed(seed_from(seed, name))
        with torch.no_grad():
            rule.fill(parameter, rule.std(role, fan_in, fan_out, layers), generator)


def role_of(name: str, parameter: nn.Parameter) -> Role:
    """The role a parameter was marked with; every parameter of a model has one."""
    role = getattr(parameter, "role", None)
    assert isinstance(role, Role), f"parameter {name} has no role; build it with families.linear or families.mark"
    return role


def _normal(weight: Tensor, std: float, generator: torch.Generator) -> None:
    weight.normal_(0.0, std, generator=generator)


@register
@dataclass(frozen=True, kw_only=True)
class ScaledNormal(AbstractInit):
    """N(0, 0.02) everywhere; both residual outputs of a layer divided by sqrt(2 x layers), as in GPT-2."""

    kind: ClassVar[str] = "scaled_normal"
    paper: ClassVar[str] = "Language Models are Unsupervised Multitask Learners, Radford et al. 2019, section 2.3"

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        return GPT2_STD / math.sqrt(2 * layers) if role in RESIDUAL_OUTPUTS else GPT2_STD

    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        _normal(weight, std, generator)


@register
@dataclass(frozen=True, kw_only=True)
class Xavier(AbstractInit):
    """Variance 2 / (fan_in + fan_out) for every matrix; embedding rows have unit expected norm."""

    kind: ClassVar[str] = "xavier"
    paper: ClassVar[str] = (
        "Understanding the Difficulty of Training Deep Feedforward Neural Networks, Glorot and Bengio 2010, eq. 16"
    )

    distribution: str = choice(
        "normal", "uniform", default="normal", opt_in=True, help="shape of the draw; the variance is the same"
    )

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        return fan_out**-0.5 if role in TABLES else math.sqrt(2 / (fan_in + fan_out))

    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        if self.distribution == "uniform":
            bound = math.sqrt(3) * std
            weight.uniform_(-bound, bound, generator=generator)
        else:
            _normal(weight, std, generator)


@register
@dataclass(frozen=True, kw_only=True)
class SmallInit(AbstractInit):
    """Variance 2 / (5 d) for inputs and tables; std 2 / (layers x sqrt(d)) for residual outputs, as in GPT-NeoX."""

    kind: ClassVar[str] = "small_init"
    paper: ClassVar[str] = (
        "GPT-NeoX-20B, Black et al. 2022, arXiv:2204.06745, after Transformers without Tears, Nguyen and Salazar 2019"
    )

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        if role in RESIDUAL_OUTPUTS:
            return 2 / (layers * math.sqrt(fan_out))
        return math.sqrt(2 / (5 * (fan_out if role in TABLES else fan_in)))

    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        _normal(weight, std, generator)
