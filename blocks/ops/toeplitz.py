"""Biases that depend on distance alone: one value per distance, laid out over pairs."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def every_distance(n_query: int, n_key: int, start: int, device: torch.device) -> Int[Tensor, "N"]:
    """Each distance that occurs between queries start.. and keys 0.., ascending; negative where the key lies after."""
    return torch.arange(start - n_key + 1, start + n_query, device=device)


def over_pairs(values: Float[Tensor, "H N"], n_key: int) -> Float[Tensor, "H T S"]:
    """The value of each pair's distance, given one for each of `every_distance`."""
    return values.unfold(-1, n_key, 1).flip(-1)
