"""Rules derived for one placement: t_fixup, fixup, deepnorm and magneto. Each needs what that placement provides."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from blocks.families import RESIDUAL_OUTPUTS, AbstractInit, Dims, Direction, Role, Trait
from blocks.init import TABLES
from blocks.inits.draws import normal
from blocks.placements.scaled import deepnorm_constants
from blocks.registry import register

BRANCH_VALUES = RESIDUAL_OUTPUTS | {Role.VALUE, Role.FFN_IN, Role.FFN_GATE}
"""Matrices that what a branch adds is proportional to; queries and keys only choose among it."""


def xavier(role: Role, fan_in: int, fan_out: int) -> float:
    """Xavier's deviation; rows of tables have unit norm."""
    return fan_out**-0.5 if role in TABLES else math.sqrt(2 / (fan_in + fan_out))


def scaled_values(role: Role, fan_in: int, fan_out: int, factor: float) -> float:
    """Xavier's deviation, times the factor for what a branch adds in proportion to."""
    return xavier(role, fan_in, fan_out) * (factor if role in BRANCH_VALUES else 1.0)


@register
@dataclass(frozen=True, kw_only=True)
class TFixup(AbstractInit):
    """Xavier, and 0.67 x layers^-1/4 on values, outputs, FFN and tables: trains with neither norms nor warm-up."""

    kind: ClassVar[str] = "t_fixup"
    paper: ClassVar[str] = (
        "Improving Transformer Optimization Through Better Initialization, Huang et al. 2020 (ICML), section 3.2; "
        "0.67 x layers^-1/4 as for its encoder where no source is read, (9 x layers)^-1/4 for decoders that read one"
    )
    proof: ClassVar[str] = "test_every_matrix_has_the_standard_deviation_of_its_rule"
    reference: ClassVar[str] = "the published deviations, by role in the test"
    needs: ClassVar[frozenset[Trait]] = frozenset({Trait.NO_NORM})

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        return xavier(role, fan_in, fan_out) * (0.67 * layers**-0.25 if role in BRANCH_VALUES | TABLES else 1.0)

    def for_side(self, dims: Dims) -> AbstractInit:
        return TFixupDecoder() if dims.direction == Direction.CAUSAL else self

    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        normal(weight, std, generator)


@dataclass(frozen=True, kw_only=True)
class TFixupDecoder(TFixup):
    """The rule for decoders that read a source, and for the embedding; no rule by itself."""

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        return xavier(role, fan_in, fan_out) * ((9 * layers) ** -0.25 if role in BRANCH_VALUES | TABLES else 1.0)


@register
@dataclass(frozen=True, kw_only=True)
class FixupInit(AbstractInit):
    """He's rule over the root of the number of branches; the last map of each branch and the head start at 0."""

    kind: ClassVar[str] = "fixup"
    paper: ClassVar[str] = (
        "Fixup Initialization: Residual Learning Without Normalization, Zhang et al. 2019, section 3, arXiv:1901.09321"
    )
    proof: ClassVar[str] = "test_every_matrix_has_the_standard_deviation_of_its_rule"
    reference: ClassVar[str] = "the published deviations, by role in the test"
    needs: ClassVar[frozenset[Trait]] = frozenset({Trait.BRANCH_BIASES})
    opens_later: ClassVar[bool] = True

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        if role in RESIDUAL_OUTPUTS or role == Role.HEAD:
            return 0.0
        return fan_out**-0.5 if role in TABLES else math.sqrt(2 / fan_in) * (2 * layers) ** -0.5

    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        normal(weight, std, generator)


@register
@dataclass(frozen=True, kw_only=True)
class DeepNormInit(AbstractInit):
    """Xavier, and (8 x layers)^-1/4 on values, outputs and FFN: the partner of DeepNorm's residual scale."""

    kind: ClassVar[str] = "deepnorm"
    paper: ClassVar[str] = "DeepNet: Scaling Transformers to 1,000 Layers, Wang et al. 2022, table 2, arXiv:2203.00555"
    proof: ClassVar[str] = "test_every_matrix_has_the_standard_deviation_of_its_rule"
    reference: ClassVar[str] = "the published deviations, by role in the test"
    needs: ClassVar[frozenset[Trait]] = frozenset({Trait.SCALED_RESIDUAL})

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        return scaled_values(role, fan_in, fan_out, (8 * layers) ** -0.25)

    def for_side(self, dims: Dims) -> AbstractInit:
        return DeepNormSide(beta=deepnorm_constants(dims)[1])

    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        normal(weight, std, generator)


@dataclass(frozen=True, kw_only=True)
class DeepNormSide(DeepNormInit):
    """The rule on one side of an encoder-decoder; no rule by itself."""

    beta: float
    """Factor on values, outputs and FFN."""

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        return scaled_values(role, fan_in, fan_out, self.beta)


@register
@dataclass(frozen=True, kw_only=True)
class Magneto(AbstractInit):
    """Xavier, and sqrt(ln(2 x layers)) on values, outputs and FFN: the partner of norms inside branches."""

    kind: ClassVar[str] = "magneto"
    paper: ClassVar[str] = "Foundation Transformers (Magneto), Wang et al. 2022, section 2.2, arXiv:2210.06423"
    proof: ClassVar[str] = "test_every_matrix_has_the_standard_deviation_of_its_rule"
    reference: ClassVar[str] = "the published deviations, by role in the test"
    needs: ClassVar[frozenset[Trait]] = frozenset({Trait.INNER_NORMS})

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        return scaled_values(role, fan_in, fan_out, math.sqrt(math.log(2 * layers)))

    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        normal(weight, std, generator)
