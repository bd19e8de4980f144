"""Distances between queries and keys."""

import torch
from jaxtyping import Int
from torch import Tensor


def distances(n_query: int, n_key: int, start: int, device: torch.device) -> Int[Tensor, "T S"]:
    """How far key j lies before the query at position start + i; negative where it lies after."""
    query = torch.arange(start, start + n_query, device=device)
    return query[:, None] - torch.arange(n_key, device=device)[None, :]
