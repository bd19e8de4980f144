"""Rotary positions without the lowest frequencies."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from blocks.families import AbstractPosition, Dims, HeadShape, Hook, InfeasibleArchitecture, PositionModule
from blocks.ops.turning import highest_frequencies
from blocks.positions.none import NoPosition
from blocks.positions.rotary import BASE, Rotary, require_even
from blocks.positions.turning import TurningModule
from blocks.registry import register
from search_space.domains import choice


@register
@dataclass(frozen=True, kw_only=True)
class PRope(AbstractPosition):
    """Rotary positions whose slowest channels stand still, and so compare content undisturbed at any distance."""

    kind: ClassVar[str] = "p_rope"
    paper: ClassVar[str] = (
        "Round and Round We Go! What Makes Rotary Positional Encodings Useful?, section 6, Barbero et al. 2024, "
        "arXiv:2410.06205"
    )
    proof: ClassVar[str] = "test_p_rope_turns_the_highest_frequencies_and_no_other"
    reference: ClassVar[str] = "rotary on the channels that turn, the identity on the rest"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.ROTATE})

    kept: float = choice(0.25, 0.5, 0.75, default=0.75, help="share of the frequencies that stays, the highest ones")

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        frequencies = partial(highest_frequencies, heads.head_dim, BASE, int(self.kept * heads.head_dim / 2))
        return TurningModule(frequencies, frequencies)

    def canonical(self, dims: Dims) -> AbstractPosition:
        if self.kept == 0:
            return NoPosition()
        return Rotary() if self.kept == 1 else self

    def check(self, dims: Dims, heads: HeadShape) -> None:
        require_even(self.kind, heads)
        pairs = self.kept * heads.head_dim / 2
        if not 0 <= self.kept <= 1 or pairs % 1:
            raise InfeasibleArchitecture(
                f"model.position.p_rope.kept must give a whole number of the head's pairs, none to all; {self.kept} of "
                f"{heads.head_dim // 2} pairs is {pairs:g}; choose another share or head_dim"
            )
