"""Rotary positions on the first channels of each head only."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from blocks.families import AbstractPosition, Dims, HeadShape, Hook, InfeasibleArchitecture, PositionModule
from blocks.ops.turning import plain_frequencies
from blocks.positions.none import NoPosition
from blocks.positions.rotary import BASE, Rotary
from blocks.positions.turning import TurningModule
from blocks.registry import register
from search_space.domains import choice


@register
@dataclass(frozen=True, kw_only=True)
class RopePartial(AbstractPosition):
    """The first channels of queries and keys are rotated by position; the rest compare content wherever it stands."""

    kind: ClassVar[str] = "rope_partial"
    paper: ClassVar[str] = (
        "GPT-NeoX-20B: An Open-Source Autoregressive Language Model, section 2.1.1, Black et al. 2022, "
        "arXiv:2204.06745, after GPT-J, Wang and Komatsuzaki 2021"
    )
    proof: ClassVar[str] = "test_partial_rotation_equals_gpt_neox"
    reference: ClassVar[str] = "transformers apply_rotary_pos_emb of GPT-NeoX"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.ROTATE})

    fraction: float = choice(0.25, 0.5, 0.75, default=0.25, help="share of each head's channels that is rotated")

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        if self._width(heads) == 0:
            return PositionModule()
        frequencies = partial(plain_frequencies, self._width(heads), BASE)
        return TurningModule(frequencies, frequencies)

    def canonical(self, dims: Dims) -> AbstractPosition:
        if self.fraction == 0:
            return NoPosition()
        return Rotary() if self.fraction == 1 else self

    def check(self, dims: Dims, heads: HeadShape) -> None:
        width = self.fraction * heads.head_dim
        if not 0 <= self.fraction <= 1 or width % 2:
            raise InfeasibleArchitecture(
                f"model.position.rope_partial.fraction must give an even number of the head's channels, none to all; "
                f"{self.fraction} of head_dim {heads.head_dim} is {width:g}; choose another fraction or head_dim"
            )

    def _width(self, heads: HeadShape) -> int:
        return int(self.fraction * heads.head_dim)
