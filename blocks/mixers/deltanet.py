"""DeltaNet: a fast-weight memory that overwrites what a key held instead of adding to it."""

from dataclasses import dataclass
from typing import ClassVar

from blocks.families import AbstractMixer, Dims, HeadShape, Hook, MixerModule
from blocks.mixers import recurrence
from blocks.mixers.delta_rules import DeltaModule, NoDecay, mixed_flops, negative_eigenvalues_field
from blocks.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Deltanet(AbstractMixer):
    """A memory of fixed size in which writing under a key replaces what was there; good at exact recall."""

    kind: ClassVar[str] = "deltanet"
    paper: ClassVar[str] = (
        "Linear Transformers Are Secretly Fast Weight Programmers, Schlag et al. 2021, arXiv:2102.11174; Parallelizing "
        "Linear Transformers with the Delta Rule over Sequence Length, Yang et al. 2024, arXiv:2406.06484; Unlocking "
        "State-Tracking in Linear RNNs Through Negative Eigenvalues, Grazzi et al. 2024, arXiv:2411.12537"
    )
    proof: ClassVar[str] = "test_deltanet_is_its_recurrence_over_unit_queries_and_keys"
    reference: ClassVar[str] = "flash-linear-attention delta_rule_recurrence"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING, Hook.ROTATE})
    packs: ClassVar[bool] = True

    heads: int = recurrence.heads_field()
    head_dim: int = recurrence.head_dim_field()
    conv_width: int = recurrence.conv_width_field()
    negative_eigenvalues: bool = negative_eigenvalues_field()

    def build(self, dims: Dims) -> MixerModule:
        return DeltaModule(
            d_model=dims.d_model,
            shape=self.head_shape(),
            value_dim=self.head_dim,
            conv_width=self.conv_width,
            strongest=2.0 if self.negative_eigenvalues else 1.0,
            decay=NoDecay(self.heads),
            output=recurrence.PlainOutput(dims.d_model, self.heads, self.head_dim),
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.heads, kv_heads=self.heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        output = 2.0 * dims.d_model * self.heads * self.head_dim
        return output + mixed_flops(
            dims.d_model, self.head_shape(), self.head_dim, self.conv_width, length, causal, per_channel=False
        )
