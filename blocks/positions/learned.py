"""A learned vector per position, added to the embedding."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from blocks.families import (
    AbstractPosition,
    Dims,
    HeadShape,
    Hook,
    InfeasibleArchitecture,
    PositionModule,
    Role,
    mark,
)
from blocks.registry import register
from search_space.domains import choice


class LearnedModule(PositionModule):
    """Adds row p of the table at position p; positions count from the first column, padding included."""

    def __init__(self, rows: int, d_model: int, beyond: str) -> None:
        super().__init__()
        self.table = mark(nn.Parameter(torch.zeros(rows, d_model)), Role.POSITION, fan_in=rows, fan_out=d_model)
        self.clamped = beyond == "clamp"

    def embed(
        self, x: Float[Tensor, "B T D"], start: int = 0, live: Bool[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        rows, end = self.table.shape[0], start + x.shape[1]
        if end > rows and (self.training or not self.clamped):
            raise InfeasibleArchitecture(
                f"model.position.kind='learned' has {rows} rows and was run on {end} positions; run it on at most "
                f"{rows}, or set model.position.learned.beyond to 'clamp', which repeats the last row in evaluation"
            )
        position = torch.arange(start, end, device=x.device).clamp_max(rows - 1)
        return x + nn.functional.embedding(position, self.table).to(x.dtype)


@register
@dataclass(frozen=True, kw_only=True)
class Learned(AbstractPosition):
    """A trained vector per position, added to the token embedding; knows no position past the training length."""

    kind: ClassVar[str] = "learned"
    paper: ClassVar[str] = "Convolutional Sequence to Sequence Learning, Gehring et al. 2017, arXiv:1705.03122"
    proof: ClassVar[str] = "test_learned_rows_are_the_rows_of_the_table"
    reference: ClassVar[str] = "the rows of its table"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING})

    beyond: str = choice(
        "refuse",
        "clamp",
        default="refuse",
        opt_in=True,
        help="past the training length: refuse such a model, or repeat the last row there, in evaluation only",
    )

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        return LearnedModule(dims.train_len, dims.d_model, self.beyond)

    def canonical(self, dims: Dims) -> AbstractPosition:
        return self if dims.max_len > dims.train_len else dataclasses.replace(self, beyond="refuse")

    def check(self, dims: Dims, heads: HeadShape) -> None:
        if self.beyond == "refuse" and dims.max_len > dims.train_len:
            raise InfeasibleArchitecture(
                f"model.position.kind='learned' has a row for each of the {dims.train_len} training positions, and the "
                f"model is to run on {dims.max_len}; evaluate at {dims.train_len} or less, set "
                f"model.position.learned.beyond to 'clamp', or choose another position scheme"
            )
