"""Masks of attention that is mostly local, with a few tokens or blocks that everyone sees."""

import random

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def window_and_global(
    n_query: int, n_key: int, window: int, n_global: int, causal: bool, device: torch.device
) -> Bool[Tensor, "T S"]:
    """Keys of a window around each query, and the first `n_global` keys; queries are the last T of S.

    Causal: the `window` keys up to the query. Otherwise `window` - 1 on either side, and the first queries see all.
    """
    query = torch.arange(n_key - n_query, n_key, device=device)[:, None]
    key = torch.arange(n_key, device=device)[None, :]
    seen = ((query - key).abs() < window) | (key < n_global) | (query < n_global)
    return seen & (key <= query) if causal else seen


def random_blocks(n_blocks: int, drawn: int, heads: int, n_global: int, causal: bool) -> list[list[list[int]]]:
    """For each head and block, `drawn` further blocks of those that are neither near nor seen by all.

    Blocks that run out of others repeat themselves. The draw is a part of the architecture: the same in every run.
    """
    table = []
    for head in range(heads):
        rows = []
        for block in range(n_blocks):
            end = block - 1 if causal else n_blocks
            free = [other for other in range(n_global, end) if abs(other - block) > 1]
            chosen = random.Random(f"{head}/{block}").sample(free, min(drawn, len(free)))
            rows.append(chosen + [block] * (drawn - len(chosen)))
        table.append(rows)
    return table


def blocks_in_view(
    table: Int[Tensor, "H N R"], n_query: int, n_key: int, block: int, n_global: int, causal: bool
) -> Bool[Tensor, "H T S"]:
    """Own block and its neighbours, the first `n_global` blocks, and those of the table; the first blocks see all.

    Queries are the last T of S. Causal: nothing after the query.
    """
    own = torch.arange(table.shape[1], device=table.device)
    near = (own[:, None] - own[None, :]).abs() <= 1
    everywhere = own < n_global
    seen = (near | everywhere[:, None] | everywhere[None, :]).expand(table.shape[0], -1, -1)
    by_block = seen | torch.zeros_like(seen).scatter(2, table, True)
    query = torch.arange(n_key - n_query, n_key, device=table.device)
    key = torch.arange(n_key, device=table.device)
    tokens = by_block[:, query[:, None] // block, key[None, :] // block]
    return tokens & (key[None, :] <= query[:, None]) if causal else tokens
