"""Rotary positions stretched, so that a model trained short can be run long."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from blocks.families import AbstractPosition, Dims, HeadShape, Hook, InfeasibleArchitecture, PositionModule
from blocks.ops.turning import (
    interpolated_frequencies,
    llama3_frequencies,
    ntk_frequencies,
    plain_frequencies,
    yarn_factor,
    yarn_frequencies,
)
from blocks.positions.rotary import Rotary, require_even
from blocks.positions.turning import Frequencies, TurningModule, base_field
from blocks.registry import register
from search_space.domains import choice


@register
@dataclass(frozen=True, kw_only=True)
class RopeScaled(AbstractPosition):
    """Rotary positions that evaluation stretches by the longest length over the training length, at every length.

    One stretch for all lengths keeps decoding equal to the full pass; it costs a little loss at the training length.
    """

    kind: ClassVar[str] = "rope_scaled"
    paper: ClassVar[str] = (
        "Extending Context Window of Large Language Models via Positional Interpolation, Chen et al. 2023, "
        "arXiv:2306.15595; YaRN: Efficient Context Window Extension of Large Language Models, Peng et al. 2023, "
        "arXiv:2309.00071; The Llama 3 Herd of Models, 2024, arXiv:2407.21783"
    )
    proof: ClassVar[str] = "test_scaled_frequencies_equal_transformers"
    reference: ClassVar[str] = "transformers ROPE_INIT_FUNCTIONS"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.ROTATE, Hook.SCALE})

    method: str = choice(
        "interpolate",
        "ntk",
        "yarn",
        "llama3",
        default="yarn",
        help="interpolate slows all pairs alike; ntk raises the base; yarn and llama3 slow only pairs that do not turn "
        "fully within the training length, and yarn sharpens attention",
    )
    base: float = base_field()

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        width, base, scale = heads.head_dim, self.base, self._scale(dims)
        stretched: dict[str, Frequencies] = {
            "interpolate": partial(interpolated_frequencies, width, base, scale),
            "ntk": partial(ntk_frequencies, width, base, scale),
            "yarn": partial(yarn_frequencies, width, base, scale, dims.train_len),
            "llama3": partial(llama3_frequencies, width, base, scale, dims.train_len),
        }
        factor = yarn_factor(scale) if self.method == "yarn" else 1.0
        return TurningModule(partial(plain_frequencies, width, base), stretched[self.method], factor)

    def canonical(self, dims: Dims) -> AbstractPosition:
        return Rotary(base=self.base) if self._scale(dims) == 1 else self

    def check(self, dims: Dims, heads: HeadShape) -> None:
        require_even(self.kind, heads)
        if self.method == "ntk" and heads.head_dim < 4:
            raise InfeasibleArchitecture(
                f"model.position.rope_scaled.method='ntk' spreads a stretch over pairs and needs head_dim at least 4; "
                f"the mixer has {heads.head_dim}; raise it or choose 'interpolate'"
            )

    def _scale(self, dims: Dims) -> float:
        return dims.max_len / dims.train_len
