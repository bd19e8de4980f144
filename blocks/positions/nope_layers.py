"""Rotary positions in most layers, none in every k-th."""

from dataclasses import dataclass
from typing import ClassVar

from blocks.families import AbstractPosition, Dims, HeadShape, Hook, PositionModule
from blocks.positions.none import NoPosition
from blocks.positions.rotary import Rotary, require_even
from blocks.positions.turning import base_field
from blocks.registry import register
from search_space.domains import choice


@register
@dataclass(frozen=True, kw_only=True)
class NopeLayers(AbstractPosition):
    """Rotary positions, but every k-th layer has none and looks up content at any distance."""

    kind: ClassVar[str] = "nope_layers"
    paper: ClassVar[str] = (
        "RoPE to NoPE and Back Again: A New Hybrid Attention Strategy, Yang et al. 2025, arXiv:2501.18795; SmolLM3, "
        "Bakouch et al. 2025"
    )
    proof: ClassVar[str] = "test_every_kth_layer_has_no_positions_as_in_smollm3"
    reference: ClassVar[str] = "the layers of SmolLM3Config of transformers"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.ROTATE})

    every: int = choice(2, 3, 4, default=4, help="the last of every so many layers has no positions")
    base: float = base_field()

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        return Rotary(base=self.base).build(dims, heads)

    def at_layer(self, layer: int) -> AbstractPosition:
        return NoPosition() if (layer + 1) % self.every == 0 else Rotary(base=self.base)

    def canonical(self, dims: Dims) -> AbstractPosition:
        if self.every == 1:
            return NoPosition()
        return Rotary(base=self.base) if self.every > dims.layers else self

    def check(self, dims: Dims, heads: HeadShape) -> None:
        require_even(self.kind, heads)
