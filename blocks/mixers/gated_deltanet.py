"""Gated DeltaNet: the delta rule on a memory whose heads also forget, token by token."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import AbstractMixer, Dims, HeadShape, Hook, MixerModule, Role, linear
from blocks.mixers import recurrence
from blocks.mixers.delta_rules import DeltaModule, mixed_flops, negative_eigenvalues_field
from blocks.registry import register


class HeadDecay(nn.Module):
    """One log decay per head, -exp(A) * softplus(x W + b) (Yang et al. 2025, section 3.4, after Mamba2)."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.logits = linear(d_model, heads, Role.QUERY)
        self.decay = recurrence.StepDecay(heads, 1)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H 1"]:
        return self.decay(self.logits(x)[..., None])


@register
@dataclass(frozen=True, kw_only=True)
class GatedDeltanet(AbstractMixer):
    """A memory that overwrites what a key held and can also clear a whole head at once."""

    kind: ClassVar[str] = "gated_deltanet"
    paper: ClassVar[str] = (
        "Gated Delta Networks: Improving Mamba2 with Delta Rule, Yang et al. 2024, arXiv:2412.06464; Unlocking "
        "State-Tracking in Linear RNNs Through Negative Eigenvalues, Grazzi et al. 2024, arXiv:2411.12537"
    )
    proof: ClassVar[str] = "test_decays_per_head_equal_flash_linear_attention_and_qwen3_next"
    reference: ClassVar[str] = "flash-linear-attention naive_recurrent_gated_delta_rule; transformers Qwen3-Next"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING, Hook.ROTATE})
    packs: ClassVar[bool] = True

    heads: int = recurrence.heads_field()
    head_dim: int = recurrence.head_dim_field()
    value_factor: int = recurrence.value_factor_field(2)
    conv_width: int = recurrence.conv_width_field()
    negative_eigenvalues: bool = negative_eigenvalues_field()

    def build(self, dims: Dims) -> MixerModule:
        value_dim = self.value_factor * self.head_dim
        return DeltaModule(
            d_model=dims.d_model,
            shape=self.head_shape(),
            value_dim=value_dim,
            conv_width=self.conv_width,
            strongest=2.0 if self.negative_eigenvalues else 1.0,
            decay=HeadDecay(dims.d_model, self.heads),
            output=recurrence.GatedOutput(dims.d_model, self.heads, value_dim),
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.heads, kv_heads=self.heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        value_dim = self.value_factor * self.head_dim
        outside = 2.0 * dims.d_model * self.heads * (2 * value_dim + 1)
        return outside + mixed_flops(
            dims.d_model, self.head_shape(), value_dim, self.conv_width, length, causal, per_channel=False
        )
