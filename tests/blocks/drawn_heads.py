"""Queries, keys and values to try ops on, and the gradients to compare."""

from collections.abc import Callable

import torch
from torch import Tensor

BATCH, KEY_DIM = 2, 8


def heads(
    length: int, n_query: int = 4, n_kv: int = 4, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(BATCH, length, n, KEY_DIM, generator=generator, dtype=torch.float64) for n in (n_query, n_kv, n_kv)
    )
    return q.to(dtype), k.to(dtype), v.to(dtype)


def with_gradients(run: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The output, and the gradient of a fixed weighting of it for every input."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = run(*leaves)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(y)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), leaves)]
