"""Residual forms: how the residual stream passes from layer to layer.

Layers are numbered from 0 in code. `layers` everywhere maps the stream over one whole layer, mixer and FFN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from blocks import registry
from blocks.families import (
    AbstractMixer,
    AbstractPlacement,
    AbstractResidual,
    Dims,
    InfeasibleArchitecture,
    LayerCall,
    ResidualModule,
    Role,
    Values,
    mark,
)
from blocks.model import ModelConfig
from blocks.registry import register
from search_space.domains import choice, float_range


class PlainResidual(ResidualModule):
    """Each layer reads the output of the one before."""

    def forward(self, x: Float[Tensor, "B T D"], layers: Sequence[LayerCall]) -> Float[Tensor, "B T D"]:
        for layer in layers:
            x = layer(x, None)
        return x


class SharedValues(ResidualModule):
    """Layers after the first use share x own values + (1 - share) x values of the first layer."""

    def __init__(self, layers: int, share: float, learned: bool) -> None:
        super().__init__()
        self.share = mark(nn.Parameter(torch.full((layers - 1,), share)), Role.SCALAR) if learned else None
        self.fixed = share

    def forward(self, x: Float[Tensor, "B T D"], layers: Sequence[LayerCall]) -> Float[Tensor, "B T D"]:
        first = None
        for index, layer in enumerate(layers):
            share = self.fixed if self.share is None or index == 0 else self.share[index - 1]
            values = Values(first=first, share=share)
            x = layer(x, values)
            first = values.own if first is None else first
        return x


class InputLambdas(ResidualModule):
    """Before layer l the stream becomes keep_l x stream + add_l x embedded input."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.keep = mark(nn.Parameter(torch.ones(layers)), Role.SCALAR)
        self.add = mark(nn.Parameter(torch.zeros(layers)), Role.SCALAR)

    def forward(self, x: Float[Tensor, "B T D"], layers: Sequence[LayerCall]) -> Float[Tensor, "B T D"]:
        start = x
        for index, layer in enumerate(layers):
            x = layer((self.keep[index] * x + self.add[index] * start).to(x.dtype), None)
        return x


class UnetSkips(ResidualModule):
    """The output of layer i is added, weighted, to the input of layer L - 1 - i, where they are not neighbours."""

    def __init__(self, layers: int, start: float) -> None:
        super().__init__()
        self.count = skips(layers)
        self.weight = mark(nn.Parameter(torch.full((self.count,), start)), Role.SCALAR) if self.count else None

    def forward(self, x: Float[Tensor, "B T D"], layers: Sequence[LayerCall]) -> Float[Tensor, "B T D"]:
        kept: list[Tensor] = []
        for index, layer in enumerate(layers):
            source = len(layers) - 1 - index
            if self.weight is not None and source < self.count:
                x = (x + self.weight[source] * kept[source]).to(x.dtype)
            x = layer(x, None)
            if index < self.count:
                kept.append(x)
        return x


def skips(layers: int) -> int:
    """Layers whose output skips at least one layer on its way to the mirrored one."""
    return max((layers - 1) // 2, 0)


class StochasticDepth(ResidualModule):
    """In training, what layer l adds is dropped with probability rate x (l + 1) / layers, and scaled up where kept."""

    def __init__(self, layers: int, rate: float, unit: str) -> None:
        super().__init__()
        self.rates = tuple(rate * (layer + 1) / layers for layer in range(layers))
        self.by_row = unit == "row"

    def forward(self, x: Float[Tensor, "B T D"], layers: Sequence[LayerCall]) -> Float[Tensor, "B T D"]:
        for rate, layer in zip(self.rates, layers, strict=True):
            y = layer(x, None)
            x = x + self._dropped(y - x, rate) if self.training else y
        return x

    def _dropped(self, branch: Float[Tensor, "B T D"], rate: float) -> Float[Tensor, "B T D"]:
        kept = torch.ones_like(branch[:, :1, :1] if self.by_row else branch)
        return branch * F.dropout(kept, rate)


def require_additive(config: ModelConfig, kind: str) -> None:
    """Raise InfeasibleArchitecture unless the layers of the config add to the stream and otherwise leave it alone."""
    if config.placement.additive:
        return
    able = [name for name, other in registry.variants(AbstractPlacement).items() if other.additive]
    raise InfeasibleArchitecture(
        f"model.residual.kind={kind!r} scales what a layer adds to the residual stream, and with "
        f"model.placement.kind={config.placement.kind!r} a layer norms the stream itself; placements that do: "
        f"{', '.join(able)}"
    )


@register
@dataclass(frozen=True, kw_only=True)
class Plain(AbstractResidual):
    """Each layer reads the output of the one before, and nothing else."""

    kind: ClassVar[str] = "plain"
    paper: ClassVar[str] = "Attention Is All You Need, Vaswani et al. 2017, section 3.1, arXiv:1706.03762"
    proof: ClassVar[str] = "test_pre_and_post_equal_torch"
    reference: ClassVar[str] = "x + branch(x), as in torch nn.TransformerEncoderLayer"

    def build(self, dims: Dims) -> ResidualModule:
        return PlainResidual()


@register
@dataclass(frozen=True, kw_only=True)
class ValueResidual(AbstractResidual):
    """Every layer's values are mixed with those of the first layer, which keeps early detail in reach."""

    kind: ClassVar[str] = "value_residual"
    paper: ClassVar[str] = (
        "Value Residual Learning For Alleviating Attention Concentration In Transformers, Zhou et al. 2024, "
        "arXiv:2410.17897"
    )
    proof: ClassVar[str] = "test_value_residual_mixes_in_the_values_of_the_first_layer"
    reference: ClassVar[str] = "its published formula, written out in the test"

    share: float = choice(
        0.25, 0.5, 0.75, default=0.5, help="share of a layer's own values at the start; the rest is the first layer's"
    )
    learned: bool = choice(True, False, default=True, help="whether each layer learns its share or keeps it")

    def build(self, dims: Dims) -> ResidualModule:
        return SharedValues(dims.layers, self.share, self.learned) if dims.layers > 1 else PlainResidual()

    def canonical(self, config: ModelConfig) -> AbstractResidual:
        return self if config.layers > 1 else Plain()

    def check(self, config: ModelConfig) -> None:
        first, *others = config.layer_mixers()
        if not first.value_projection:
            able = [kind for kind, other in registry.variants(AbstractMixer).items() if other.value_projection]
            raise InfeasibleArchitecture(
                f"model.residual.kind='value_residual' mixes values over layers, and model.mixer.kind={first.kind!r} "
                f"has no values of its own to mix; mixers that do: {', '.join(able)}"
            )
        for other in others:
            if other.kind != first.kind or other.head_shape() != first.head_shape():
                raise InfeasibleArchitecture(
                    f"model.residual.kind='value_residual' needs the same kind of mixer with the same heads in every "
                    f"layer; got {first.kind!r} with {_shape(first)} and {other.kind!r} with {_shape(other)}; "
                    f"set model.pattern to 'uniform', or give both the same kind, kv_heads and head_dim"
                )


def _shape(mixer: AbstractMixer) -> str:
    shape = mixer.head_shape()
    return f"{shape.heads} heads, {shape.kv_heads} of them key/value heads, of width {shape.head_dim}"


@register
@dataclass(frozen=True, kw_only=True)
class X0Lambdas(AbstractResidual):
    """Before every layer the embedded input is mixed in again with a learned weight, which starts at zero."""

    kind: ClassVar[str] = "x0_lambdas"
    paper: ClassVar[str] = "modded-nanogpt: Speedrunning the NanoGPT Baseline, Jordan et al. 2024"
    proof: ClassVar[str] = "test_each_form_has_a_setting_that_is_the_plain_form"
    reference: ClassVar[str] = "the plain form, which it is at its neutral setting"

    def build(self, dims: Dims) -> ResidualModule:
        return InputLambdas(dims.layers)


@register
@dataclass(frozen=True, kw_only=True)
class Unet(AbstractResidual):
    """The output of an early layer is added, with a learned weight, to the input of its mirror image among the late."""

    kind: ClassVar[str] = "unet_skips"
    paper: ClassVar[str] = (
        "modded-nanogpt: Speedrunning the NanoGPT Baseline, Jordan et al. 2024, after U-Net, Ronneberger et al. 2015, "
        "arXiv:1505.04597"
    )
    proof: ClassVar[str] = "test_skips_join_mirrored_layers_that_are_no_neighbours"
    reference: ClassVar[str] = "its published formula, written out in the test"

    start: float = choice(0.0, 1.0, default=1.0, help="weight of every skip at the start; 0 is the plain form")

    def build(self, dims: Dims) -> ResidualModule:
        return UnetSkips(dims.layers, self.start)

    def canonical(self, config: ModelConfig) -> AbstractResidual:
        return self if skips(config.layers) else Plain()


@register
@dataclass(frozen=True, kw_only=True)
class LayerDrop(AbstractResidual):
    """In training, what a layer adds is dropped at random, the deeper the more often; evaluation uses every layer."""

    kind: ClassVar[str] = "stochastic_depth"
    paper: ClassVar[str] = "Deep Networks with Stochastic Depth, Huang et al. 2016, eq. 4, arXiv:1603.09382"
    proof: ClassVar[str] = "test_the_last_layer_reaches_its_target_rate_and_the_mean_is_kept"
    reference: ClassVar[str] = "its published rates, and the mean over draws"

    rate: float = float_range(
        0.0, 0.5, default=0.1, help="probability for the last layer; it falls linearly to the first"
    )
    unit: str = choice(
        "row", "element", default="row", help="what is dropped at once: all a layer adds to a sequence, or one number"
    )

    def build(self, dims: Dims) -> ResidualModule:
        return StochasticDepth(dims.layers, self.rate, self.unit)

    def canonical(self, config: ModelConfig) -> AbstractResidual:
        return self if self.rate > 0 else Plain()

    def check(self, config: ModelConfig) -> None:
        require_additive(config, self.kind)
