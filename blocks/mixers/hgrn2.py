"""HGRN2: gated linear attention that writes to a channel just what it forgets there."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from blocks.families import AbstractMixer, Dims, HeadShape, Hook, MixerModule, Role, linear
from blocks.mixers import recurrence
from blocks.mixers.gated_scans import GatedScanModule, mixed_flops
from blocks.registry import register
from search_space.domains import choice


class TiedDecay(nn.Module):
    """Decays f = floor + (1 - floor) * sigmoid(key), keys 1 - f, queries through SiLU (Qin et al. 2024, eq. 9)."""

    def __init__(self, floor: float) -> None:
        super().__init__()
        self.floor = floor

    def forward(
        self, x: Float[Tensor, "B T D"], q: Float[Tensor, "B T H K"], k: Float[Tensor, "B T H K"]
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T H K"], Float[Tensor, "B T H K"]]:
        logits = k.to(torch.promote_types(k.dtype, torch.float32))
        forgotten = (1 - self.floor) * torch.sigmoid(-logits)
        if self.floor == 0:
            return F.silu(q), forgotten, F.logsigmoid(logits)
        return F.silu(q), forgotten, torch.log1p(-forgotten)


class WholeOutput(nn.Module):
    """All heads normalised together and mapped to the model width."""

    def __init__(self, d_model: int, width: int) -> None:
        super().__init__()
        self.norm = recurrence.HeadNorm(1, width)
        self.out = linear(width, d_model, Role.MIXER_OUT)

    def forward(self, y: Float[Tensor, "B T H V"], x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.out(self.norm(rearrange(y, "B T H V -> B T 1 (H V)")).squeeze(2))


@register
@dataclass(frozen=True, kw_only=True)
class Hgrn2(AbstractMixer):
    """Each channel moves towards the new value by just as much as it forgets; no separate keys."""

    kind: ClassVar[str] = "hgrn2"
    paper: ClassVar[str] = "HGRN2: Gated Linear RNNs with State Expansion, Qin et al. 2024, arXiv:2404.07904"
    proof: ClassVar[str] = "test_hgrn2_is_gla_with_keys_tied_to_the_gates"
    reference: ClassVar[str] = "flash-linear-attention naive_recurrent_gla"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING})
    packs: ClassVar[bool] = True

    heads: int = recurrence.heads_field()
    head_dim: int = recurrence.head_dim_field()
    forget_floor: float = choice(
        0.0,
        0.5,
        0.9,
        default=0.0,
        help="least share of a channel that is kept per token; higher suits upper layers, which look further back",
    )

    def build(self, dims: Dims) -> MixerModule:
        return GatedScanModule(
            d_model=dims.d_model,
            shape=self.head_shape(),
            value_dim=self.head_dim,
            gate=TiedDecay(self.forget_floor),
            output=WholeOutput(dims.d_model, self.heads * self.head_dim),
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.heads, kv_heads=self.heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        projections = 8.0 * dims.d_model * self.heads * self.head_dim
        return projections + mixed_flops(self.head_shape(), self.head_dim, length, causal, per_channel=True)
