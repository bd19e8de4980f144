"""Rows that start at their first live token, for mixers whose blocks count from the start of a sequence."""

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor


def first_live(live: Bool[Tensor, "B T"]) -> Int[Tensor, "B"]:
    """The index of each row's first live token; 0 where there is none."""
    return live.to(torch.int64).argmax(1)


def rolled(x: Shaped[Tensor, "B T *A"], shift: Int[Tensor, "B"]) -> Shaped[Tensor, "B T *A"]:
    """Row b with its first shift[b] entries moved to the end; a negative shift undoes it."""
    length = x.shape[1]
    index = (torch.arange(length, device=x.device) + shift[:, None]) % length
    return x[torch.arange(x.shape[0], device=x.device)[:, None], index]
