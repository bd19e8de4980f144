"""Placements with one norm per branch, or two: pre, post, sandwich, peri, reordered and parallel."""

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import AbstractNorm, AbstractPlacement, Dims
from blocks.ffn.none import NoFFN
from blocks.placements.branches import AbstractEvenPlacement, Around, run_branch, run_ffn
from blocks.registry import register
from search_space.domains import choice


@register
@dataclass(frozen=True, kw_only=True)
class Pre(AbstractEvenPlacement):
    """Norm before each sublayer and before the head: an identity path from end to end; trains without warm-up."""

    kind: ClassVar[str] = "pre"
    paper: ClassVar[str] = "On Layer Normalization in the Transformer Architecture, Xiong et al. 2020, arXiv:2002.04745"
    proof: ClassVar[str] = "test_pre_and_post_equal_torch"
    reference: ClassVar[str] = "torch nn.TransformerEncoderLayer"
    final_norm: ClassVar[bool] = True

    def around(self, dims: Dims, layer: int, norm: AbstractNorm, dropout: nn.Module) -> nn.Module:
        return Around(dropout, before=norm.build(dims.d_model))


@register
@dataclass(frozen=True, kw_only=True)
class Post(AbstractEvenPlacement):
    """Norm after each residual addition, none before the head: the original form; wants warm-up when deep."""

    kind: ClassVar[str] = "post"
    paper: ClassVar[str] = "Attention Is All You Need, Vaswani et al. 2017, section 3.1, arXiv:1706.03762"
    proof: ClassVar[str] = "test_pre_and_post_equal_torch"
    reference: ClassVar[str] = "torch nn.TransformerEncoderLayer"
    final_norm: ClassVar[bool] = False
    additive: ClassVar[bool] = False
    norms_stream: ClassVar[bool] = True

    def around(self, dims: Dims, layer: int, norm: AbstractNorm, dropout: nn.Module) -> nn.Module:
        return Around(dropout, outer=norm.build(dims.d_model))


@register
@dataclass(frozen=True, kw_only=True)
class Sandwich(AbstractEvenPlacement):
    """Norm before and after each sublayer, inside the residual branch: every branch adds unit scale at the start."""

    kind: ClassVar[str] = "sandwich"
    paper: ClassVar[str] = (
        "CogView: Mastering Text-to-Image Generation via Transformers, Ding et al. 2021, arXiv:2105.13290"
    )
    proof: ClassVar[str] = "test_output_norm_and_sandwich_equal_transformers"
    reference: ClassVar[str] = "transformers Gemma2DecoderLayer"
    final_norm: ClassVar[bool] = True

    def around(self, dims: Dims, layer: int, norm: AbstractNorm, dropout: nn.Module) -> nn.Module:
        return Around(dropout, before=norm.build(dims.d_model), after=norm.build(dims.d_model))


@register
@dataclass(frozen=True, kw_only=True)
class Peri(AbstractEvenPlacement):
    """Sandwich with a norm on the embedding too: the stream starts at unit scale and grows linearly at most."""

    kind: ClassVar[str] = "peri"
    paper: ClassVar[str] = (
        "Peri-LN: Revisiting Layer Normalization in the Transformer Architecture, Kim et al. 2025, arXiv:2502.02732"
    )
    proof: ClassVar[str] = "test_peri_is_sandwich_behind_a_norm_of_the_embedding"
    reference: ClassVar[str] = "sandwich behind a norm of the embedding"
    final_norm: ClassVar[bool] = True
    embedding_norm: ClassVar[bool] = True

    def around(self, dims: Dims, layer: int, norm: AbstractNorm, dropout: nn.Module) -> nn.Module:
        return Around(dropout, before=norm.build(dims.d_model), after=norm.build(dims.d_model))


@register
@dataclass(frozen=True, kw_only=True)
class Reordered(AbstractEvenPlacement):
    """Norm on the output of each sublayer only: sublayers read the residual stream as it is."""

    kind: ClassVar[str] = "reordered"
    paper: ClassVar[str] = "2 OLMo 2 Furious, OLMo team 2024, section 3.2, arXiv:2501.00656"
    proof: ClassVar[str] = "test_output_norm_and_sandwich_equal_transformers"
    reference: ClassVar[str] = "transformers Olmo2DecoderLayer"
    final_norm: ClassVar[bool] = True

    def around(self, dims: Dims, layer: int, norm: AbstractNorm, dropout: nn.Module) -> nn.Module:
        return Around(dropout, after=norm.build(dims.d_model))


class ParallelLayer(nn.Module):
    """x + mixer(n(x)) + ffn(m(x)), where m is n or a norm of its own."""

    def __init__(
        self, mixer: nn.Module, mixer_norm: nn.Module, ffn: nn.Module, ffn_norm: nn.Module | None, dropout: nn.Module
    ) -> None:
        super().__init__()
        self.norm = mixer_norm
        self.mixer = mixer
        self.ffn = ffn
        self.ffn_norm = ffn_norm
        self.dropout = dropout

    def forward(self, x: Float[Tensor, "B T D"], *args: Any) -> Float[Tensor, "B T D"]:
        normed = self.norm(x)
        y = x + self.dropout(run_branch(self.mixer, args, normed))
        return y + self.dropout(run_ffn(self.ffn, args, normed if self.ffn_norm is None else self.ffn_norm(x)))


@register
@dataclass(frozen=True, kw_only=True)
class Parallel(AbstractPlacement):
    """Mixer and FFN read the same stream and are added together: fewer steps in depth at the same parameters."""

    kind: ClassVar[str] = "parallel"
    paper: ClassVar[str] = (
        "PaLM: Scaling Language Modeling with Pathways, Chowdhery et al. 2022, section 2, arXiv:2204.02311; two norms "
        "as in GPT-NeoX-20B, Black et al. 2022, section 2.1, arXiv:2204.06745"
    )
    proof: ClassVar[str] = "test_parallel_adds_both_sublayers_of_one_norm"
    reference: ClassVar[str] = "its published formula, written out in the test"
    final_norm: ClassVar[bool] = True

    norms: int = choice(1, 2, default=1, opt_in=True, neutral=1, help="whether both read one norm or each its own")

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
        if isinstance(ffn, NoFFN):
            return self.without_ffn().build(dims, layer, norm, mixer, ffn, dropout)
        own = norm.build(dims.d_model) if self.norms == 2 else None
        return ParallelLayer(mixer, norm.build(dims.d_model), ffn, own, dropout)
