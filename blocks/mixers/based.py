"""Based: linear attention whose weights are the second-order Taylor expansion of the exponential."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import AbstractMixer, Dims, HeadShape, Hook, MixerModule
from blocks.mixers.kernels import KernelModule, kernel_flops
from blocks.registry import register
from search_space.domains import choice


class TaylorFeatures(nn.Module):
    """Features whose product is 1 + x + x^2/2 with x = q.k / sqrt(K), never below 1/2 (Arora et al. 2024, eq. 3)."""

    def forward(self, x: Float[Tensor, "B T H K"], start: int) -> Float[Tensor, "B T H F"]:
        scaled = x.to(torch.promote_types(x.dtype, torch.float32)) * x.shape[-1] ** -0.25
        squares = (scaled[..., :, None] * scaled[..., None, :]).flatten(-2) / math.sqrt(2)
        return torch.cat([torch.ones_like(scaled[..., :1]), scaled, squares], dim=-1)


@register
@dataclass(frozen=True, kw_only=True)
class Based(AbstractMixer):
    """Close to softmax for small logits, with a state of fixed size; few query channels, as the state squares them."""

    kind: ClassVar[str] = "based"
    paper: ClassVar[str] = (
        "Simple Linear Attention Language Models Balance the Recall-Throughput Tradeoff, Arora et al. 2024, "
        "arXiv:2402.18668"
    )
    proof: ClassVar[str] = "test_based_equals_flash_linear_attention"
    reference: ClassVar[str] = "flash-linear-attention naive_parallel_based"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING, Hook.ROTATE})
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
            features=TaylorFeatures(),
            feature_dim=self._feature_dim(),
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.heads, kv_heads=self.heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        return kernel_flops(dims.d_model, self.head_shape(), self.value_dim, self._feature_dim(), length, causal)

    def _feature_dim(self) -> int:
        return 1 + self.head_dim + self.head_dim**2
