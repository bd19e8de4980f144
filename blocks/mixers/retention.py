"""Retention: linear attention whose heads forget at fixed rates, without a denominator."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import AbstractMixer, Dims, HeadShape, Hook, MixerModule
from blocks.mixers import recurrence
from blocks.mixers.gated_scans import GatedScanModule, mixed_flops
from blocks.registry import register


class FixedDecay(nn.Module):
    """Queries scaled by K^-1/2; head h keeps 1 - 2^(-5-h) of its state per token (Sun et al. 2023, eq. 8)."""

    def forward(
        self, x: Float[Tensor, "B T D"], q: Float[Tensor, "B T H K"], k: Float[Tensor, "B T H K"]
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T H K"], Float[Tensor, "B T H 1"]]:
        wide = torch.promote_types(q.dtype, torch.float32)
        lost = 2.0 ** (-5 - torch.arange(q.shape[2], device=q.device, dtype=wide))
        log_decay = torch.log1p(-lost)[None, None, :, None].expand(*q.shape[:3], 1)
        return q * q.shape[3] ** -0.5, k, log_decay


@register
@dataclass(frozen=True, kw_only=True)
class Retention(AbstractMixer):
    """Each head is a sum of the past that fades at its own fixed rate; the last of many heads hardly forgets."""

    kind: ClassVar[str] = "retention"
    paper: ClassVar[str] = (
        "Retentive Network: A Successor to Transformer for Large Language Models, Sun et al. 2023, arXiv:2307.08621"
    )
    proof: ClassVar[str] = "test_retention_is_its_parallel_form_under_group_norm"
    reference: ClassVar[str] = "flash-linear-attention naive_retention"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING, Hook.ROTATE})
    packs: ClassVar[bool] = True

    heads: int = recurrence.heads_field()
    head_dim: int = recurrence.head_dim_field()
    value_factor: int = recurrence.value_factor_field(1)

    def build(self, dims: Dims) -> MixerModule:
        value_dim = self.value_factor * self.head_dim
        return GatedScanModule(
            d_model=dims.d_model,
            shape=self.head_shape(),
            value_dim=value_dim,
            gate=FixedDecay(),
            output=recurrence.GatedOutput(dims.d_model, self.heads, value_dim, centred=True),
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.heads, kv_heads=self.heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        value_dim = self.value_factor * self.head_dim
        projections = 2.0 * dims.d_model * self.heads * (2 * self.head_dim + 3 * value_dim)
        return projections + mixed_flops(self.head_shape(), value_dim, length, causal, per_channel=False)
