"""A learned vector per position, resized where a sequence is longer than the table."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from blocks.families import AbstractPosition, Dims, HeadShape, Hook, InfeasibleArchitecture, PositionModule, Role, mark
from blocks.positions.learned import Learned
from blocks.registry import register


def resized(table: Float[Tensor, "N D"], length: int) -> Float[Tensor, "T D"]:
    """The table stretched linearly to so many rows, its first and last row kept; unchanged where it is long enough."""
    rows = table.shape[0]
    if length <= rows:
        return table[:length]
    wide = torch.promote_types(table.dtype, torch.float32)
    place = torch.arange(length, device=table.device, dtype=wide) * ((rows - 1) / (length - 1))
    below = place.long().clamp_max(max(rows - 2, 0))
    share = (place - below)[:, None]
    following = (below + 1).clamp_max(rows - 1)
    return torch.lerp(table[below].to(wide), table[following].to(wide), share).to(table.dtype)


class LearnedInterpModule(PositionModule):
    """Adds row p of the resized table at position p. Past its length each row depends on the sequence's length."""

    def __init__(self, rows: int, d_model: int) -> None:
        super().__init__()
        self.table = mark(nn.Parameter(torch.zeros(rows, d_model)), Role.POSITION, fan_in=rows, fan_out=d_model)

    def embed(
        self, x: Float[Tensor, "B T D"], start: int = 0, live: Bool[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        rows, end = self.table.shape[0], start + x.shape[1]
        if start > 0 and end > rows:
            raise InfeasibleArchitecture(
                f"model.position.kind='learned_interp' resizes its {rows} rows to the whole sequence, so tokens cannot "
                f"be added one by one past position {rows}, and {end} was asked for; decode up to {rows}, run the "
                f"whole sequence at once, or use another position scheme"
            )
        return x + resized(self.table, end)[start:].to(x.dtype)


@register
@dataclass(frozen=True, kw_only=True)
class LearnedInterp(AbstractPosition):
    """A trained vector per position; longer sequences are evaluated with the table resized, and cannot be decoded."""

    kind: ClassVar[str] = "learned_interp"
    paper: ClassVar[str] = (
        "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale, section 3.2, Dosovitskiy et al. "
        "2020, arXiv:2010.11929"
    )
    proof: ClassVar[str] = "test_resizing_equals_torch_interpolate"
    reference: ClassVar[str] = "torch nn.functional.interpolate"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING})

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        return LearnedInterpModule(dims.train_len, dims.d_model)

    def canonical(self, dims: Dims) -> AbstractPosition:
        return self if dims.max_len > dims.train_len else Learned()
