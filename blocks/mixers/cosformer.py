"""Cosformer: linear attention over non-negative features, reweighted by the cosine of the distance."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from blocks.families import AbstractMixer, Dims, HeadShape, Hook, InfeasibleArchitecture, MixerModule, Role
from blocks.mixers import recurrence
from blocks.mixers.kernels import KernelModule, kernel_flops
from blocks.registry import register


class CosineFeatures(nn.Module):
    """Features whose product is relu(q).relu(k) cos(pi (i - j) / 2M) (Qin et al. 2022, eq. 10), 0 <= i, j < M."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.longest = longest

    def forward(self, x: Float[Tensor, "B T H K"], start: int) -> Float[Tensor, "B T H F"]:
        end = start + x.shape[1]
        if end > self.longest:
            raise InfeasibleArchitecture(
                f"model.mixer.kind='cosformer' weighs distances below {self.longest}, its model.max_len, and was run "
                f"on {end} positions; run it on at most {self.longest}, or raise max_len"
            )
        positive = F.relu(x.to(torch.promote_types(x.dtype, torch.float32)))
        place = torch.arange(start, end, device=x.device, dtype=positive.dtype)[:, None, None]
        angle = place * (math.pi / (2 * self.longest))
        return torch.cat([positive * angle.cos(), positive * angle.sin()], dim=-1)


@register
@dataclass(frozen=True, kw_only=True)
class Cosformer(AbstractMixer):
    """Linear attention that prefers near tokens, by a cosine which falls to zero over the longest sequence."""

    kind: ClassVar[str] = "cosformer"
    paper: ClassVar[str] = "cosFormer: Rethinking Softmax in Attention, Qin et al. 2022, arXiv:2202.08791"
    proof: ClassVar[str] = "test_cosformer_is_its_quadratic_form"
    reference: ClassVar[str] = "its quadratic form, written out in the test"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING})
    packs: ClassVar[bool] = True

    heads: int = recurrence.heads_field()
    head_dim: int = recurrence.head_dim_field()

    def build(self, dims: Dims) -> MixerModule:
        return KernelModule(
            d_model=dims.d_model,
            shape=self.head_shape(),
            value_dim=self.head_dim,
            features=CosineFeatures(dims.max_len),
            feature_dim=2 * self.head_dim,
        )

    def scale_free(self) -> frozenset[Role]:
        return frozenset({Role.QUERY, Role.KEY})

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.heads, kv_heads=self.heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        return kernel_flops(dims.d_model, self.head_shape(), self.head_dim, 2 * self.head_dim, length, causal)
