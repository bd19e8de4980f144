"""Placements: where norms stand around the mixer and the FFN of one layer. n is a norm, f a sublayer."""

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import AbstractNorm, AbstractPlacement, Dims
from blocks.registry import register


class PreLayer(nn.Module):
    """x + f(n(x)) for the mixer, then for the FFN."""

    def __init__(self, dims: Dims, norm: AbstractNorm, mixer: nn.Module, ffn: nn.Module, dropout: nn.Module) -> None:
        super().__init__()
        self.mixer_norm = norm.build(dims.d_model)
        self.mixer = mixer
        self.ffn_norm = norm.build(dims.d_model)
        self.ffn = ffn
        self.dropout = dropout

    def forward(self, x: Float[Tensor, "B T D"], *args: Any) -> Float[Tensor, "B T D"]:
        x = x + self.dropout(self.mixer(self.mixer_norm(x), *args))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class PostLayer(nn.Module):
    """n(x + f(x)) for the mixer, then for the FFN."""

    def __init__(self, dims: Dims, norm: AbstractNorm, mixer: nn.Module, ffn: nn.Module, dropout: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer
        self.mixer_norm = norm.build(dims.d_model)
        self.ffn = ffn
        self.ffn_norm = norm.build(dims.d_model)
        self.dropout = dropout

    def forward(self, x: Float[Tensor, "B T D"], *args: Any) -> Float[Tensor, "B T D"]:
        x = self.mixer_norm(x + self.dropout(self.mixer(x, *args)))
        return self.ffn_norm(x + self.dropout(self.ffn(x)))


class SandwichLayer(nn.Module):
    """x + n2(f(n1(x))) for the mixer, then for the FFN."""

    def __init__(self, dims: Dims, norm: AbstractNorm, mixer: nn.Module, ffn: nn.Module, dropout: nn.Module) -> None:
        super().__init__()
        self.mixer_norm = norm.build(dims.d_model)
        self.mixer = mixer
        self.mixer_out_norm = norm.build(dims.d_model)
        self.ffn_norm = norm.build(dims.d_model)
        self.ffn = ffn
        self.ffn_out_norm = norm.build(dims.d_model)
        self.dropout = dropout

    def forward(self, x: Float[Tensor, "B T D"], *args: Any) -> Float[Tensor, "B T D"]:
        x = x + self.dropout(self.mixer_out_norm(self.mixer(self.mixer_norm(x), *args)))
        return x + self.dropout(self.ffn_out_norm(self.ffn(self.ffn_norm(x))))


class ParallelLayer(nn.Module):
    """x + mixer(n(x)) + ffn(n(x)) with one norm."""

    def __init__(self, dims: Dims, norm: AbstractNorm, mixer: nn.Module, ffn: nn.Module, dropout: nn.Module) -> None:
        super().__init__()
        self.norm = norm.build(dims.d_model)
        self.mixer = mixer
        self.ffn = ffn
        self.dropout = dropout

    def forward(self, x: Float[Tensor, "B T D"], *args: Any) -> Float[Tensor, "B T D"]:
        normed = self.norm(x)
        return x + self.dropout(self.mixer(normed, *args)) + self.dropout(self.ffn(normed))


@register
@dataclass(frozen=True, kw_only=True)
class Pre(AbstractPlacement):
    """Norm before each sublayer and before the head: an identity path from end to end; trains without warm-up."""

    kind: ClassVar[str] = "pre"
    paper: ClassVar[str] = "On Layer Normalization in the Transformer Architecture, Xiong et al. 2020, arXiv:2002.04745"
    final_norm: ClassVar[bool] = True

    def build(
        self,
        dims: Dims,
        layer: int,
        norm: AbstractNorm,
        mixer: nn.Module,
        ffn: nn.Module,
        dropout: nn.Module,
    ) -> nn.Module:
        return PreLayer(dims, norm, mixer, ffn, dropout)


@register
@dataclass(frozen=True, kw_only=True)
class Post(AbstractPlacement):
    """Norm after each residual addition, none before the head: the original form; wants warm-up when deep."""

    kind: ClassVar[str] = "post"
    paper: ClassVar[str] = "Attention Is All You Need, Vaswani et al. 2017, section 3.1, arXiv:1706.03762"
    final_norm: ClassVar[bool] = False
    additive: ClassVar[bool] = False

    def build(
        self,
        dims: Dims,
        layer: int,
        norm: AbstractNorm,
        mixer: nn.Module,
        ffn: nn.Module,
        dropout: nn.Module,
    ) -> nn.Module:
        return PostLayer(dims, norm, mixer, ffn, dropout)


@register
@dataclass(frozen=True, kw_only=True)
class Sandwich(AbstractPlacement):
    """Norm before and after each sublayer, inside the residual branch: every branch adds unit scale at the start."""

    kind: ClassVar[str] = "sandwich"
    paper: ClassVar[str] = (
        "CogView: Mastering Text-to-Image Generation via Transformers, Ding et al. 2021, arXiv:2105.13290"
    )
    final_norm: ClassVar[bool] = True

    def build(
        self,
        dims: Dims,
        layer: int,
        norm: AbstractNorm,
        mixer: nn.Module,
        ffn: nn.Module,
        dropout: nn.Module,
    ) -> nn.Module:
        return SandwichLayer(dims, norm, mixer, ffn, dropout)


@register
@dataclass(frozen=True, kw_only=True)
class Parallel(AbstractPlacement):
    """Mixer and FFN read one norm and are added together: fewer steps in depth at the same parameters."""

    kind: ClassVar[str] = "parallel"
    paper: ClassVar[str] = (
        "PaLM: Scaling Language Modeling with Pathways, Chowdhery et al. 2022, section 2, arXiv:2204.02311"
    )
    final_norm: ClassVar[bool] = True

    def build(
        self,
        dims: Dims,
        layer: int,
        norm: AbstractNorm,
        mixer: nn.Module,
        ffn: nn.Module,
        dropout: nn.Module,
    ) -> nn.Module:
        return ParallelLayer(dims, norm, mixer, ffn, dropout)
