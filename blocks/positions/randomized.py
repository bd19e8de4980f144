"""Positions drawn from a longer range in training, so that the far ones are known in evaluation."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from blocks.families import AbstractPosition, Dims, HeadShape, Hook, PositionModule, Role, mark
from blocks.positions.sinusoidal import Sinusoidal, sinusoids
from blocks.registry import register
from search_space.domains import choice


def ordered_sample(count: int, total: int, device: torch.device) -> Int[Tensor, "T"]:
    """So many different numbers below `total`, ascending, every subset as likely; from the generator of dropout."""
    return torch.rand(total, device=device).topk(count).indices.sort().values


class RandomizedModule(PositionModule):
    """In training one ordered sample of the range places all rows of a batch; in evaluation tokens count from 0."""

    def __init__(self, positions: int, d_model: int, inside: str) -> None:
        super().__init__()
        self.positions = positions
        self.table: nn.Parameter | None = None
        if inside == "learned":
            empty = torch.zeros(positions, d_model)
            self.table = mark(nn.Parameter(empty), Role.POSITION, fan_in=positions, fan_out=d_model)

    def embed(
        self, x: Float[Tensor, "B T D"], start: int = 0, live: Bool[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        end = start + x.shape[1]
        if self.training:
            place = ordered_sample(end, self.positions, x.device)[start:]
        else:
            place = torch.arange(start, end, device=x.device)
        return x + self._vectors(place, x).to(x.dtype)

    def _vectors(self, place: Int[Tensor, "T"], x: Float[Tensor, "B T D"]) -> Float[Tensor, "T D"]:
        if self.table is not None:
            return nn.functional.embedding(place, self.table)
        wide = torch.promote_types(x.dtype, torch.float32)
        every = sinusoids(0, self.positions, x.shape[2], x.device, wide)
        return Sinusoidal().amplitude * every[place]


@register
@dataclass(frozen=True, kw_only=True)
class Randomized(AbstractPosition):
    """Training spreads positions over a longer range, in order, so that evaluation meets none it does not know."""

    kind: ClassVar[str] = "randomized"
    paper: ClassVar[str] = (
        "Randomized Positional Encodings Boost Length Generalization of Transformers, Ruoss et al. 2023, "
        "arXiv:2305.16843"
    )
    proof: ClassVar[str] = "test_an_ordered_sample_is_ascending_without_repeats_and_uniform"
    reference: ClassVar[str] = "the uniform distribution of ordered samples"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING})

    inside: str = choice("sinusoidal", "learned", default="sinusoidal", help="what a position adds to the embedding")
    stretch: int = choice(2, 4, 8, default=4, help="length of the range over the longest length the model is run on")

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        return RandomizedModule(self.stretch * dims.max_len, dims.d_model, self.inside)
