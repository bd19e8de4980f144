"""No positional scheme."""

from dataclasses import dataclass
from typing import ClassVar

from blocks.families import CAUSAL_ONLY, AbstractPosition, Dims, Direction, HeadShape, Hook, PositionModule
from blocks.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class NoPosition(AbstractPosition):
    """Nothing tells the order of tokens but the causal mask."""

    kind: ClassVar[str] = "none"
    paper: ClassVar[str] = (
        "Transformer Language Models without Positional Encodings Still Learn Positional Information, Haviv et al. "
        "2022, arXiv:2203.16634; The Impact of Positional Encoding on Length Generalization in Transformers, "
        "Kazemnejad et al. 2023, arXiv:2305.19466"
    )
    proof: ClassVar[str] = "test_without_positions_a_causal_layer_sees_a_set_and_two_layers_do_not"
    reference: ClassVar[str] = "the same tokens in another order"
    needs: ClassVar[frozenset[Hook]] = frozenset()
    directions: ClassVar[frozenset[Direction]] = CAUSAL_ONLY

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        return PositionModule()
