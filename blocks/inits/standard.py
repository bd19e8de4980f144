"""Rules of one formula per role: scaled_normal, xavier, small_init, wang, kaiming, lecun and table."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from blocks.families import RESIDUAL_OUTPUTS, AbstractInit, Role
from blocks.init import TABLES
from blocks.inits.draws import normal, uniform
from blocks.registry import register
from search_space.domains import choice

GPT2_STD = 0.02


@register
@dataclass(frozen=True, kw_only=True)
class ScaledNormal(AbstractInit):
    """N(0, 0.02) everywhere; both residual outputs of a layer divided by sqrt(2 x layers), as in GPT-2."""

    kind: ClassVar[str] = "scaled_normal"
    paper: ClassVar[str] = "Language Models are Unsupervised Multitask Learners, Radford et al. 2019, section 2.3"
    proof: ClassVar[str] = "test_every_matrix_has_the_standard_deviation_of_its_rule"
    reference: ClassVar[str] = "the published deviations, by role in the test"

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        return GPT2_STD / math.sqrt(2 * layers) if role in RESIDUAL_OUTPUTS else GPT2_STD

    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        normal(weight, std, generator)


@register
@dataclass(frozen=True, kw_only=True)
class Xavier(AbstractInit):
    """Variance 2 / (fan_in + fan_out) for every matrix; embedding rows have unit expected norm."""

    kind: ClassVar[str] = "xavier"
    paper: ClassVar[str] = (
        "Understanding the Difficulty of Training Deep Feedforward Neural Networks, Glorot and Bengio 2010, eq. 16"
    )
    proof: ClassVar[str] = "test_every_matrix_has_the_standard_deviation_of_its_rule"
    reference: ClassVar[str] = "the published deviations, by role in the test"

    distribution: str = choice(
        "normal", "uniform", default="normal", opt_in=True, help="shape of the draw; the variance is the same"
    )

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        return fan_out**-0.5 if role in TABLES else math.sqrt(2 / (fan_in + fan_out))

    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        if self.distribution == "uniform":
            uniform(weight, std, generator)
        else:
            normal(weight, std, generator)


@register
@dataclass(frozen=True, kw_only=True)
class SmallInit(AbstractInit):
    """Variance 2 / (5 d) for inputs and tables; std 2 / (layers x sqrt(d)) for residual outputs, as in GPT-NeoX."""

    kind: ClassVar[str] = "small_init"
    paper: ClassVar[str] = (
        "GPT-NeoX-20B, Black et al. 2022, arXiv:2204.06745, after Transformers without Tears, Nguyen and Salazar 2019"
    )
    proof: ClassVar[str] = "test_every_matrix_has_the_standard_deviation_of_its_rule"
    reference: ClassVar[str] = "the published deviations, by role in the test"

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        if role in RESIDUAL_OUTPUTS:
            return 2 / (layers * math.sqrt(fan_out))
        return math.sqrt(2 / (5 * (fan_out if role in TABLES else fan_in)))

    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        normal(weight, std, generator)


@register
@dataclass(frozen=True, kw_only=True)
class Wang(AbstractInit):
    """Variance 1 / fan_in for inputs; std 2 / (layers x sqrt(d)) for residual outputs, as in GPT-J."""

    kind: ClassVar[str] = "wang"
    paper: ClassVar[str] = "GPT-J-6B and Mesh Transformer JAX, Wang and Komatsuzaki 2021"
    proof: ClassVar[str] = "test_every_matrix_has_the_standard_deviation_of_its_rule"
    reference: ClassVar[str] = "the published deviations, by role in the test"

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        if role in RESIDUAL_OUTPUTS:
            return 2 / (layers * math.sqrt(fan_out))
        return (fan_out if role in TABLES else fan_in) ** -0.5

    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        normal(weight, std, generator)


@register
@dataclass(frozen=True, kw_only=True)
class Kaiming(AbstractInit):
    """Variance 2 / fan_in for every matrix: keeps the scale of signals through rectifiers; rows of unit norm."""

    kind: ClassVar[str] = "kaiming"
    paper: ClassVar[str] = "Delving Deep into Rectifiers, He et al. 2015, eq. 10, arXiv:1502.01852"
    proof: ClassVar[str] = "test_every_matrix_has_the_standard_deviation_of_its_rule"
    reference: ClassVar[str] = "the published deviations, by role in the test"

    amplifies: ClassVar[bool] = True

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        return fan_out**-0.5 if role in TABLES else math.sqrt(2 / fan_in)

    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        normal(weight, std, generator)


@register
@dataclass(frozen=True, kw_only=True)
class Lecun(AbstractInit):
    """Variance 1 / fan_in for every matrix: keeps the scale of signals through linear maps; rows of unit norm."""

    kind: ClassVar[str] = "lecun"
    paper: ClassVar[str] = "Efficient BackProp, LeCun et al. 1998, eq. 16"
    proof: ClassVar[str] = "test_every_matrix_has_the_standard_deviation_of_its_rule"
    reference: ClassVar[str] = "the published deviations, by role in the test"

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        return (fan_out if role in TABLES else fan_in) ** -0.5

    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        normal(weight, std, generator)


@register
@dataclass(frozen=True, kw_only=True)
class Table(AbstractInit):
    """Rows of unit norm, "Xavier" for queries, keys, values and FFN inputs, 0.02 / sqrt(2 x layers) for outputs."""

    kind: ClassVar[str] = "table"
    paper: ClassVar[str] = (
        "A table that circulates in tutorials, after Attention Is All You Need, Vaswani et al. 2017, section 3.4, and "
        "Language Models are Unsupervised Multitask Learners, Radford et al. 2019, section 2.3"
    )
    proof: ClassVar[str] = "test_the_table_as_printed_is_he_s_rule_and_not_xavier_s"
    reference: ClassVar[str] = "the printed formulas"

    reading: str = choice(
        "printed",
        "xavier",
        default="xavier",
        help="'printed' is sqrt(2 / d), which is He's rule and not Xavier's; 'xavier' is what its name says",
    )

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        if role in RESIDUAL_OUTPUTS:
            return GPT2_STD / math.sqrt(2 * layers)
        if role in TABLES or role == Role.HEAD:
            return (fan_out if role in TABLES else fan_in) ** -0.5
        return math.sqrt(2 / (fan_in if self.reading == "printed" else fan_in + fan_out))

    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        normal(weight, std, generator)
