"""Rebased: linear attention whose weights are squares of a product, over normed queries and keys."""

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import AbstractMixer, Dims, HeadShape, Hook, MixerModule, Role, mark
from blocks.mixers.kernels import KernelModule, kernel_flops
from blocks.registry import register
from search_space.domains import choice


class SquareFeatures(nn.Module):
    """Features whose product is (q.k)^2 / K, after a layer norm with gain and bias (Aksenov et al. 2024, eq. 6 and 7).

    Each pair of channels counts once: K (K + 1) / 2 features.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.gain = mark(nn.Parameter(torch.ones(head_dim)), Role.GAIN)
        self.bias = mark(nn.Parameter(torch.zeros(head_dim)), Role.BIAS)
        pairs = list(itertools.combinations_with_replacement(range(head_dim), 2))
        self.rows, self.columns = [row for row, _ in pairs], [column for _, column in pairs]
        self.factors = [head_dim**-0.5 * (1.0 if row == column else math.sqrt(2)) for row, column in pairs]

    def forward(self, x: Float[Tensor, "B T H K"], start: int) -> Float[Tensor, "B T H F"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = nn.functional.layer_norm(x.to(wide), x.shape[-1:], self.gain.to(wide), self.bias.to(wide))
        products = normed[..., self.rows] * normed[..., self.columns]
        return products * torch.tensor(self.factors, dtype=wide, device=x.device)


@register
@dataclass(frozen=True, kw_only=True)
class Rebased(AbstractMixer):
    """Weights are squares, so that a key can be ignored altogether; a state of fixed size, few query channels."""

    kind: ClassVar[str] = "rebased"
    paper: ClassVar[str] = (
        "Linear Transformers with Learnable Kernel Functions are Better In-Context Models, Aksenov et al. 2024, "
        "arXiv:2402.10644"
    )
    proof: ClassVar[str] = "test_rebased_equals_flash_linear_attention"
    reference: ClassVar[str] = "flash-linear-attention naive_parallel_rebased"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING})
    """No rotation: the norm stands between queries and the features, and its bias is not turned."""
    packs: ClassVar[bool] = True

    heads: int = choice(1, 2, 4, 8, default=4, help="heads")
    head_dim: int = choice(
        4, 8, 16, default=16, help="query and key channels per head; the state grows with their square"
    )
    value_dim: int = choice(8, 16, 32, 64, default=32, help="value channels per head")

    def build(self, dims: Dims) -> MixerModule:
        return KernelModule(
            d_model=dims.d_model,
            shape=self.head_shape(),
            value_dim=self.value_dim,
            features=SquareFeatures(self.head_dim),
            feature_dim=self._feature_dim(),
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.heads, kv_heads=self.heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        return kernel_flops(dims.d_model, self.head_shape(), self.value_dim, self._feature_dim(), length, causal)

    def _feature_dim(self) -> int:
        return self.head_dim * (self.head_dim + 1) // 2
