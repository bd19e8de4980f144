"""No feed-forward network: a layer is its mixer alone."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from blocks.families import AbstractFFN, Dims
from blocks.registry import register


class NoFFN(nn.Module):
    """Stands where an FFN would; a placement leaves out the sublayer, its norms included."""


@register
@dataclass(frozen=True, kw_only=True)
class NoneConfig(AbstractFFN):
    """Mixers alone: all parameters go into mixing tokens, in more or wider layers."""

    kind: ClassVar[str] = "none"
    paper: ClassVar[str] = (
        "Augmenting Self-attention with Persistent Memory, Sukhbaatar et al. 2019, section 3, arXiv:1907.01470"
    )
    proof: ClassVar[str] = "test_without_an_ffn_a_layer_is_its_mixer_and_has_no_second_norm"
    reference: ClassVar[str] = "the mixer half of a layer"
    width_factor: ClassVar[float] = 1.0
    grows: ClassVar[bool] = False
    dense: ClassVar[bool] = False

    @property
    def expansion(self) -> float:  # type: ignore[override]
        """Nothing grows with it."""
        return 1.0

    def build(self, dims: Dims) -> nn.Module:
        return NoFFN()

    def flops_per_token(self, dims: Dims) -> float:
        return 0.0
