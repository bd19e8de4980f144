"""Placements that differ within a layer or over depth: sub_ln, normformer, hybridnorm, mix_ln and macaron."""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import AbstractNorm, AbstractPlacement, Dims, Role, Trait
from blocks.multipliers import Multiply
from blocks.placements.branches import AbstractEvenPlacement, Around, Layer, Sublayer, run_ffn
from blocks.placements.inner import norm_inputs, norm_outputs, scale_heads
from blocks.placements.normed import Pre
from blocks.registry import register
from search_space.domains import choice


def pre_layer(dims: Dims, norm: AbstractNorm, mixer: nn.Module, ffn: nn.Module, dropout: nn.Module) -> Layer:
    """A pre-norm layer."""
    around_mixer, around_ffn = (Around(dropout, before=norm.build(dims.d_model)) for _ in range(2))
    return Layer(mixer, around_mixer, ffn, around_ffn)


@register
@dataclass(frozen=True, kw_only=True)
class SubLn(AbstractPlacement):
    """Pre-norm with a second norm inside each sublayer, before its output map: large stable learning rates."""

    kind: ClassVar[str] = "sub_ln"
    paper: ClassVar[str] = "Foundation Transformers (Magneto), Wang et al. 2022, section 2.1, arXiv:2210.06423"
    proof: ClassVar[str] = "test_sub_ln_norms_what_enters_both_output_maps"
    reference: ClassVar[str] = "its published formula, written out in the test"
    final_norm: ClassVar[bool] = True
    provides: ClassVar[frozenset[Trait]] = frozenset({Trait.INNER_NORMS})
    reaches: ClassVar[frozenset[Role]] = frozenset({Role.MIXER_OUT, Role.FFN_OUT})

    def build(
        self,
        dims: Dims,
        layer: int,
        norm: AbstractNorm,
        mixer: nn.Module,
        ffn: nn.Module,
        dropout: nn.Module,
    ) -> nn.Module:
        norm_inputs(mixer, Role.MIXER_OUT, norm.build)
        norm_inputs(ffn, Role.FFN_OUT, norm.build)
        return pre_layer(dims, norm, mixer, ffn, dropout)

    def sublayer(self, dims: Dims, layer: int, norm: AbstractNorm, branch: nn.Module, dropout: nn.Module) -> nn.Module:
        norm_inputs(branch, Role.MIXER_OUT, norm.build)
        norm_inputs(branch, Role.FFN_OUT, norm.build)
        return Sublayer(Around(dropout, before=norm.build(dims.d_model)), branch)


@register
@dataclass(frozen=True, kw_only=True)
class NormFormer(AbstractPlacement):
    """Pre-norm with a norm after attention and one inside the FFN: evens out gradients over depth."""

    kind: ClassVar[str] = "normformer"
    paper: ClassVar[str] = (
        "NormFormer: Improved Transformer Pretraining with Extra Normalization, Shleifer et al. 2021, section 3, "
        "arXiv:2110.09456"
    )
    proof: ClassVar[str] = "test_without_their_inner_norms_sub_ln_and_normformer_are_pre"
    reference: ClassVar[str] = "pre-norm, which it is without its inner norms"
    final_norm: ClassVar[bool] = True
    reaches: ClassVar[frozenset[Role]] = frozenset({Role.FFN_OUT})

    scaled_heads: bool = choice(
        False,
        True,
        default=False,
        opt_in=True,
        neutral=False,
        help="whether each head's output has a learned factor, as in the paper",
    )

    def build(
        self,
        dims: Dims,
        layer: int,
        norm: AbstractNorm,
        mixer: nn.Module,
        ffn: nn.Module,
        dropout: nn.Module,
    ) -> nn.Module:
        if self.scaled_heads:
            scale_heads(mixer)
        norm_inputs(ffn, Role.FFN_OUT, norm.build)
        before_mixer, after_mixer, before_ffn = (norm.build(dims.d_model) for _ in range(3))
        around_mixer = Around(dropout, before=before_mixer, after=after_mixer)
        return Layer(mixer, around_mixer, ffn, Around(dropout, before=before_ffn))


@register
@dataclass(frozen=True, kw_only=True)
class HybridNorm(AbstractPlacement):
    """Norms on queries, keys and values inside the mixer, and post-norm's clean input for the FFN."""

    kind: ClassVar[str] = "hybridnorm"
    paper: ClassVar[str] = "HybridNorm, Zhuo et al. 2025, eq. 6 and 7, arXiv:2503.04598"
    proof: ClassVar[str] = "test_hybridnorm_norms_queries_keys_and_values_and_the_stream_before_the_ffn"
    reference: ClassVar[str] = "its published formula, written out in the test"
    final_norm: ClassVar[bool] = True
    additive: ClassVar[bool] = False
    norms_stream: ClassVar[bool] = True
    reaches: ClassVar[frozenset[Role]] = frozenset({Role.QUERY, Role.KEY, Role.VALUE})

    def build(
        self,
        dims: Dims,
        layer: int,
        norm: AbstractNorm,
        mixer: nn.Module,
        ffn: nn.Module,
        dropout: nn.Module,
    ) -> nn.Module:
        for role in sorted(self.reaches):
            norm_outputs(mixer, role, norm.build)
        return Layer(mixer, Around(dropout), ffn, Around(dropout, entry=norm.build(dims.d_model)))


@register
@dataclass(frozen=True, kw_only=True)
class MixLn(AbstractEvenPlacement):
    """Post-norm in the first layers, pre-norm in the rest: gradients of even size over depth."""

    kind: ClassVar[str] = "mix_ln"
    paper: ClassVar[str] = (
        "Mix-LN: Unleashing the Power of Deeper Layers by Combining Pre-LN and Post-LN, Li et al. 2024, section 3, "
        "arXiv:2412.13795"
    )
    proof: ClassVar[str] = "test_mix_ln_is_post_first_and_pre_after"
    reference: ClassVar[str] = "layers of post and of pre"
    final_norm: ClassVar[bool] = True
    additive: ClassVar[bool] = False
    norms_stream: ClassVar[bool] = True

    post_share: float = choice(0.25, 0.5, default=0.25, help="share of the layers, the first ones, that are post-norm")

    def _n_post(self, dims: Dims) -> int:
        return int(self.post_share * dims.layers)

    def canonical(self, dims: Dims) -> AbstractPlacement:
        return self if self._n_post(dims) else Pre()

    def around(self, dims: Dims, layer: int, norm: AbstractNorm, dropout: nn.Module) -> nn.Module:
        built = norm.build(dims.d_model)
        return Around(dropout, outer=built) if self.layer_form(dims, layer) else Around(dropout, before=built)

    def layer_form(self, dims: Dims, layer: int) -> bool:
        """Whether the layer is post-norm."""
        return layer < self._n_post(dims)


class MacaronLayer(nn.Module):
    """An FFN at half weight, then a layer whose FFN has half weight too."""

    def __init__(self, first: nn.Module, rest: Layer) -> None:
        super().__init__()
        self.first = first
        self.rest = rest

    def forward(self, x: Float[Tensor, "B T D"], *args: Any) -> Float[Tensor, "B T D"]:
        return self.rest(self.first(x, *args), *args)


@register
@dataclass(frozen=True, kw_only=True)
class Macaron(AbstractPlacement):
    """Half an FFN before the mixer and half after it, each under pre-norm: the layer as a second-order splitting."""

    kind: ClassVar[str] = "macaron"
    paper: ClassVar[str] = (
        "Understanding and Improving Transformer From a Multi-Particle Dynamic System Point of View, Lu et al. 2019, "
        "eq. 13, arXiv:1906.02762"
    )
    proof: ClassVar[str] = "test_macaron_is_half_an_ffn_the_mixer_and_half_an_ffn"
    reference: ClassVar[str] = "its published formula, written out in the test"
    final_norm: ClassVar[bool] = True
    ffns: ClassVar[int] = 2

    def without_ffn(self) -> AbstractPlacement:
        return Pre()

    def build(
        self,
        dims: Dims,
        layer: int,
        norm: AbstractNorm,
        mixer: nn.Module,
        ffn: nn.Module,
        dropout: nn.Module,
    ) -> nn.Module:
        rest = pre_layer(dims, norm, mixer, ffn, dropout)
        if not rest.has_ffn:
            return rest
        rest.around_ffn.scale = Multiply(0.5)
        around = Around(dropout, before=norm.build(dims.d_model), scale=Multiply(0.5))
        return MacaronLayer(Sublayer(around, EveryCall(twin(ffn))), rest)


class EveryCall(nn.Module):
    """An FFN that may be called with a layer's arguments."""

    def __init__(self, ffn: nn.Module) -> None:
        super().__init__()
        self.ffn = ffn

    def forward(self, x: Float[Tensor, "B T D"], *args: Any) -> Float[Tensor, "B T D"]:
        return run_ffn(self.ffn, args, x)


def twin(module: nn.Module) -> nn.Module:
    """A copy with parameters of its own that carry the same marks."""
    other = copy.deepcopy(module)
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        vars(theirs).update(vars(mine))
    return other
