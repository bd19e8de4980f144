"""The module of every scheme that rotates by frequencies of its own."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from blocks.families import PositionModule
from blocks.ops.turning import turned
from blocks.positions.rotary import BASE
from search_space.domains import choice

Frequencies = Callable[[torch.device, torch.dtype], Tensor]
"""The angle per position of each pair, made where and in the precision it is used."""


def base_field() -> Any:
    """The base that frequencies are powers of, as `rotary` has it."""
    return choice(
        1000.0,
        10000.0,
        100000.0,
        500000.0,
        default=BASE,
        opt_in=True,
        help="ratio of the slowest to the fastest wavelength, nearly; larger suits longer sequences",
    )


class TurningModule(PositionModule):
    """Turns the first channels of queries and keys; other frequencies may hold in evaluation than in training."""

    def __init__(self, training: Frequencies, evaluation: Frequencies, evaluation_factor: float = 1.0) -> None:
        super().__init__()
        self.by_training = {True: (training, 1.0), False: (evaluation, evaluation_factor)}

    def rotate(
        self, q: Float[Tensor, "B T H K"], k: Float[Tensor, "B S G K"], start: int = 0
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B S G K"]]:
        frequencies, factor = self.by_training[self.training]
        values = frequencies(q.device, torch.promote_types(q.dtype, torch.float32))
        return turned(q, start, values, factor), turned(k, 0, values, factor)
