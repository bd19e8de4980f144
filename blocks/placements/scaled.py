"""Placements that scale the branch or the residual stream: deepnorm, ln_scaling, layerscale, rezero and others."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from blocks.families import AbstractNorm, AbstractPlacement, Dims, Direction, Trait
from blocks.multipliers import Multiply
from blocks.placements.branches import AbstractEvenPlacement, Around, Gain, Shift
from blocks.placements.normed import Pre
from blocks.registry import register
from search_space.domains import choice


def deepnorm_constants(dims: Dims) -> tuple[float, float]:
    """alpha and beta of a stack of layers, or of one side of an encoder-decoder (DeepNet, table 2)."""
    layers, partners = dims.layers, dims.partner_layers
    if not partners:
        return (2 * layers) ** 0.25, (8 * layers) ** -0.25
    if dims.direction == Direction.CAUSAL:
        return (3 * layers) ** 0.25, (12 * layers) ** -0.25
    together = (layers**4 * partners) ** (1 / 16)
    return 0.81 * together, 0.87 / together


@register
@dataclass(frozen=True, kw_only=True)
class DeepNorm(AbstractEvenPlacement):
    """Post-norm of a residual stream scaled up with depth: post-norm that trains at hundreds of layers."""

    kind: ClassVar[str] = "deepnorm"
    paper: ClassVar[str] = "DeepNet: Scaling Transformers to 1,000 Layers, Wang et al. 2022, eq. 1, arXiv:2203.00555"
    proof: ClassVar[str] = "test_deepnorm_scales_the_stream_by_its_constants"
    reference: ClassVar[str] = "its published constants, and post-norm of the scaled stream"
    final_norm: ClassVar[bool] = False
    additive: ClassVar[bool] = False
    norms_stream: ClassVar[bool] = True
    provides: ClassVar[frozenset[Trait]] = frozenset({Trait.SCALED_RESIDUAL})

    def around(self, dims: Dims, layer: int, norm: AbstractNorm, dropout: nn.Module) -> nn.Module:
        return Around(dropout, outer=norm.build(dims.d_model), skip=deepnorm_constants(dims)[0])


@register
@dataclass(frozen=True, kw_only=True)
class LnScaling(AbstractEvenPlacement):
    """Pre-norm whose norms shrink with the root of depth: deep layers add less, and so keep mattering."""

    kind: ClassVar[str] = "ln_scaling"
    paper: ClassVar[str] = "The Curse of Depth in Large Language Models, Sun et al. 2025, eq. 7, arXiv:2502.05795"
    proof: ClassVar[str] = "test_ln_scaling_is_pre_in_the_first_layer_and_fades_with_depth"
    reference: ClassVar[str] = "its published formula, written out in the test"
    final_norm: ClassVar[bool] = True

    def around(self, dims: Dims, layer: int, norm: AbstractNorm, dropout: nn.Module) -> nn.Module:
        if dims.layers == 1:
            return Pre().around(dims, layer, norm, dropout)
        return Around(dropout, before=nn.Sequential(norm.build(dims.d_model), Multiply(self.layer_form(dims, layer))))

    def layer_form(self, dims: Dims, layer: int) -> float:
        """The factor on the layer's norms."""
        return float((layer + 1) ** -0.5)

    def canonical(self, dims: Dims) -> AbstractPlacement:
        return self if dims.layers > 1 else Pre()


@register
@dataclass(frozen=True, kw_only=True)
class LayerScale(AbstractEvenPlacement):
    """Pre-norm whose branches are scaled per channel by learned factors that start small."""

    kind: ClassVar[str] = "layerscale"
    paper: ClassVar[str] = "Going Deeper with Image Transformers, Touvron et al. 2021, eq. 6, arXiv:2103.17239"
    proof: ClassVar[str] = "test_layerscale_scales_each_channel_of_each_branch_of_pre"
    reference: ClassVar[str] = "its published formula, written out in the test"
    final_norm: ClassVar[bool] = True

    start: float = choice(
        1e-6, 1e-5, 0.1, default=0.1, help="first value of the factors; 0.1 to 18 layers, 1e-5 to 24, 1e-6 beyond"
    )

    def around(self, dims: Dims, layer: int, norm: AbstractNorm, dropout: nn.Module) -> nn.Module:
        return Around(dropout, before=norm.build(dims.d_model), scale=Gain(dims.d_model, self.start))


@register
@dataclass(frozen=True, kw_only=True)
class ReZero(AbstractEvenPlacement):
    """No norms; each branch times a learned scalar that starts at 0, so that the model starts as its embedding."""

    kind: ClassVar[str] = "rezero"
    paper: ClassVar[str] = (
        "ReZero is All You Need: Fast Convergence at Large Depth, Bachlechner et al. 2020, eq. 1, arXiv:2003.04887"
    )
    proof: ClassVar[str] = "test_rezero_adds_branches_of_the_bare_stream_times_a_scalar"
    reference: ClassVar[str] = "its published formula, written out in the test"
    final_norm: ClassVar[bool] = False
    uses_norm: ClassVar[bool] = False
    opens_later: ClassVar[bool] = True

    def around(self, dims: Dims, layer: int, norm: AbstractNorm, dropout: nn.Module) -> nn.Module:
        return Around(dropout, scale=Gain(1, 0.0))


@register
@dataclass(frozen=True, kw_only=True)
class NoNorm(AbstractEvenPlacement):
    """No norms at all: branches are added as they are; trains with an init made for it."""

    kind: ClassVar[str] = "no_norm"
    paper: ClassVar[str] = (
        "Improving Transformer Optimization Through Better Initialization, Huang et al. 2020 (ICML), section 3.2"
    )
    proof: ClassVar[str] = "test_without_norms_branches_read_and_join_the_stream_as_it_is"
    reference: ClassVar[str] = "its published formula, written out in the test"
    final_norm: ClassVar[bool] = False
    uses_norm: ClassVar[bool] = False
    provides: ClassVar[frozenset[Trait]] = frozenset({Trait.NO_NORM})

    def around(self, dims: Dims, layer: int, norm: AbstractNorm, dropout: nn.Module) -> nn.Module:
        return Around(dropout)


@register
@dataclass(frozen=True, kw_only=True)
class Fixup(AbstractEvenPlacement):
    """No norms; a scalar bias before and after each branch and a learned multiplier take their place."""

    kind: ClassVar[str] = "fixup"
    paper: ClassVar[str] = (
        "Fixup Initialization: Residual Learning Without Normalization, Zhang et al. 2019, section 3, arXiv:1901.09321"
    )
    proof: ClassVar[str] = "test_without_norms_branches_read_and_join_the_stream_as_it_is"
    reference: ClassVar[str] = "its published formula, written out in the test"
    final_norm: ClassVar[bool] = False
    uses_norm: ClassVar[bool] = False
    provides: ClassVar[frozenset[Trait]] = frozenset({Trait.NO_NORM, Trait.BRANCH_BIASES})

    def around(self, dims: Dims, layer: int, norm: AbstractNorm, dropout: nn.Module) -> nn.Module:
        return Around(dropout, before=Shift(), after=Gain(1, 1.0), scale=Shift())
