"""A running sum that repeats its numbers on every device."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def running_sum(x: Float[Tensor, "B N *A"]) -> Float[Tensor, "B N *A"]:
    """Sums over entries 0..n of axis 1, for each n: each round adds the sums that end twice as far back.

    On CUDA, cumsum adds in no fixed order and is refused in deterministic mode.
    """
    reach = 1
    while reach < x.shape[1]:
        x = x + F.pad(x[:, :-reach], (0, 0) * (x.ndim - 2) + (reach, 0))
        reach *= 2
    return x
