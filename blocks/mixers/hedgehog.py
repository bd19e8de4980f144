"""Hedgehog: linear attention over learned features that are themselves softmaxes."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import AbstractMixer, Dims, HeadShape, Hook, MixerModule, Role, mark
from blocks.mixers import recurrence
from blocks.mixers.kernels import KernelModule, kernel_flops
from blocks.ops.precision import full_precision
from blocks.registry import register


class SpikyFeatures(nn.Module):
    """softmax([Wx, -Wx]) with a matrix W per head that starts as the identity (Zhang et al. 2024, section 4.2)."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = mark(nn.Parameter(torch.eye(head_dim).repeat(heads, 1, 1)), Role.SCALAR)

    def forward(self, x: Float[Tensor, "B T H K"], start: int) -> Float[Tensor, "B T H F"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        with full_precision(x.device):
            mapped = einsum(x.to(wide), self.weight.to(wide), "B T H K, H F K -> B T H F")
        return torch.softmax(torch.cat([mapped, -mapped], dim=-1), dim=-1)


@register
@dataclass(frozen=True, kw_only=True)
class Hedgehog(AbstractMixer):
    """Linear attention that learns features as spiky as a softmax; a state of fixed size."""

    kind: ClassVar[str] = "hedgehog"
    paper: ClassVar[str] = (
        "The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry, Zhang et al. 2024, "
        "arXiv:2402.04347"
    )
    proof: ClassVar[str] = "test_hedgehog_is_its_quadratic_form"
    reference: ClassVar[str] = "its quadratic form, written out in the test"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING})
    """No rotation: products of these features do not depend on distances only."""
    packs: ClassVar[bool] = True

    heads: int = recurrence.heads_field()
    head_dim: int = recurrence.head_dim_field()

    def build(self, dims: Dims) -> MixerModule:
        return KernelModule(
            d_model=dims.d_model,
            shape=self.head_shape(),
            value_dim=self.head_dim,
            features=SpikyFeatures(self.heads, self.head_dim),
            key_features=SpikyFeatures(self.heads, self.head_dim),
            feature_dim=2 * self.head_dim,
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.heads, kv_heads=self.heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        mapped = 2 * 2.0 * self.heads * self.head_dim**2
        attended = kernel_flops(dims.d_model, self.head_shape(), self.head_dim, 2 * self.head_dim, length, causal)
        return attended + mapped
