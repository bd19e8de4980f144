"""The placement on the unit sphere: ngpt."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import RESIDUAL_OUTPUTS, AbstractNorm, AbstractPlacement, Dims, Role, mark
from blocks.init import TABLES, role_of
from blocks.multipliers import Multiply
from blocks.placements.branches import Branch, Gain, Layer
from blocks.placements.inner import BuildNorm, heads_of, linears, norm_outputs
from blocks.registry import register
from search_space.domains import choice

READERS = frozenset({Role.QUERY, Role.KEY, Role.VALUE, Role.FFN_IN, Role.FFN_GATE, Role.ROUTER, Role.HEAD})
"""Matrices that read the residual stream: their rows are vectors of it."""


class OnSphere(nn.Module):
    """unit(x + a (unit(f(x)) - x)): a step of learned size per channel towards the branch's direction."""

    def __init__(self, width: int, dropout: nn.Module) -> None:
        super().__init__()
        self.dropout = dropout
        self.step = mark(nn.Parameter(torch.full((width,), 0.05)), Role.GAIN)

    def forward(self, x: Float[Tensor, "B T D"], branch: Branch) -> Float[Tensor, "B T D"]:
        towards = unit(branch(x)) - x
        return unit(x + self.dropout(self.step.to(x.dtype) * towards))


def unit(x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
    """Rows of length 1."""
    return nn.functional.normalize(x, dim=-1, eps=1e-6)


class OnSphereLayer(nn.Module):
    """A layer whose input is brought to length 1 first."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Float[Tensor, "B T D"], *args: Any) -> Float[Tensor, "B T D"]:
        return self.layer(unit(x), *args)


class UnitHeads(nn.Module):
    """Every head brought to length 1; for queries then times a learned factor per channel, which starts as given."""

    def __init__(self, heads: int, width: int, factor: float | None) -> None:
        super().__init__()
        self.heads = heads
        self.gain = None if factor is None else mark(nn.Parameter(torch.full((width,), factor)), Role.GAIN)

    def forward(self, x: Float[Tensor, "B T W"]) -> Float[Tensor, "B T W"]:
        heads = unit(rearrange(x, "B T (H K) -> B T H K", H=self.heads))
        y = rearrange(heads, "B T H K -> B T (H K)")
        return y if self.gain is None else y * self.gain.to(x.dtype)


def scale_for_unit_weights(dims: Dims, mixer: nn.Module, ffn: nn.Module) -> None:
    """Let logits and activations keep their usual size over maps of unit rows (nGPT, eqs. 15, 16, 20 and 21).

    Queries carry the product of both learned factors of the paper, and the head width, since logits are divided by its
    root afterwards; what goes into the nonlinearity of the FFN is multiplied by the root of the model width.
    """
    shape = heads_of(mixer)

    def heads(count: int, factor: float | None) -> BuildNorm:
        full = count * shape.head_dim
        return lambda width: UnitHeads(count, width, factor) if width == full else nn.Identity()

    def scaled(factor: float) -> BuildNorm:
        return lambda width: nn.Sequential(Multiply(factor), Gain(width, 1.0))

    norm_outputs(mixer, Role.QUERY, heads(shape.heads, float(shape.head_dim)))
    norm_outputs(mixer, Role.KEY, heads(shape.kv_heads, None))
    gated = any(True for _ in linears(ffn, Role.FFN_GATE))
    norm_outputs(ffn, Role.FFN_GATE, scaled(math.sqrt(dims.d_model)))
    norm_outputs(ffn, Role.FFN_IN, scaled(1.0 if gated else math.sqrt(dims.d_model)))


def to_unit_vectors(model: nn.Module, width: int) -> None:
    """Bring every vector of the residual stream's width in matrices and the embedding to length 1, in place."""
    for name, parameter in model.named_parameters():
        role = role_of(name, parameter)
        reads, writes = (-1, -2) if parameter.dim() == 2 else (-2, -1)
        axis = reads if role in READERS else writes if role in RESIDUAL_OUTPUTS else -1
        if role in READERS | RESIDUAL_OUTPUTS | TABLES and parameter.shape[axis] == width:
            parameter.div_(torch.linalg.vector_norm(parameter, dim=axis, keepdim=True).clamp_min(1e-6))


@register
@dataclass(frozen=True, kw_only=True)
class Ngpt(AbstractPlacement):
    """The residual stream lies on the unit sphere, and each branch turns it by a learned step."""

    kind: ClassVar[str] = "ngpt"
    paper: ClassVar[str] = (
        "nGPT: Normalized Transformer with Representation Learning on the Hypersphere, Loshchilov et al. 2024, "
        "section 2 and table 1, arXiv:2410.01131"
    )
    proof: ClassVar[str] = "test_ngpt_stays_on_the_unit_sphere"
    reference: ClassVar[str] = "the unit sphere"
    final_norm: ClassVar[bool] = True
    additive: ClassVar[bool] = False

    weights: str = choice(
        "free",
        "unit",
        default="free",
        opt_in=True,
        neutral="free",
        help="unit: after every step each vector of the stream's width in a matrix is brought to length 1, and heads "
        "and activations are scaled to fit, as in the paper",
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
        if self.weights == "unit":
            scale_for_unit_weights(dims, mixer, ffn)
        layer_module = Layer(mixer, OnSphere(dims.d_model, dropout), ffn, OnSphere(dims.d_model, dropout))
        return OnSphereLayer(layer_module)

    def settle(self, model: nn.Module, d_model: int) -> None:
        if self.weights == "unit":
            to_unit_vectors(model, d_model)
