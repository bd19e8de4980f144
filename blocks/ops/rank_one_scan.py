"""A scan whose transition is diagonal plus rank one: one function in a chunked and a recurrent form.

S_t = exp(g_t) * S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T and y_t = S_t^T q_t, with log decays g <= 0 per key
channel. What is read through a is read before the decay. With a = -k', b = beta k' and g = 0 it is the delta rule. All
is computed in float32 or wider, whatever the input.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from blocks.ops.backends import Backend, Chosen, choose
from blocks.ops.gated_scan import decayed_products, decays_since_start, empty_state, into_chunks, pair_decays, widened
from blocks.ops.precision import full_precision

CHUNK = 8
"""Tokens a chunk holds: pairs within it cost memory for each channel."""


def chunked(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    a: Float[Tensor, "B T H K"],
    b: Float[Tensor, "B T H K"],
    log_decay: Float[Tensor, "B T H K"],
    state: Float[Tensor, "B H K V"],
    chunk: int = CHUNK,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """A triangular system per chunk, states across them; any length, and the state after the last token."""
    n_tokens = q.shape[1]
    chunk = min(chunk, n_tokens)
    with full_precision(v.device):
        q, k, values, a, b, log_decay = (into_chunks(x, chunk) for x in widened(q, k, v, a, b, log_decay))
        decays = pair_decays(log_decay)
        earlier = F.pad(decays[..., :-1, :, :], (0, 0, 0, 0, 1, 0))
        since_start = decays_since_start(log_decay)
        until = a * F.pad(since_start[..., :-1, :], (0, 0, 1, 0), value=1.0)
        read = decayed_products(a, k, earlier) @ values
        # One solve gives what a reads from an empty state, and how it reads every earlier state.
        right = torch.cat([read, until], dim=-1)
        solved = torch.linalg.solve_triangular(-decayed_products(a, b, earlier), right, upper=False, unitriangular=True)
        fresh, through = solved.split([values.shape[-1], q.shape[-1]], dim=-1)
        direct = decayed_products(q, k, decays) @ values
        weights, reads = decayed_products(q, b, decays), q * since_start
        added = (k * decays[..., -1, :, :]).transpose(-1, -2) @ values
        carried = (b * decays[..., -1, :, :]).transpose(-1, -2)
        keep = since_start[..., -1:, :].transpose(-1, -2)
        rows = []
        for index in range(q.shape[1]):
            written = fresh[:, index] + through[:, index] @ state
            rows.append(direct[:, index] + reads[:, index] @ state + weights[:, index] @ written)
            state = keep[:, index] * state + added[:, index] + carried[:, index] @ written
        y = rearrange(torch.stack(rows, 1), "B N H C V -> B (N C) H V")[:, :n_tokens]
        return y.to(v.dtype), state


def recurrent(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    a: Float[Tensor, "B T H K"],
    b: Float[Tensor, "B T H K"],
    log_decay: Float[Tensor, "B T H K"],
    state: Float[Tensor, "B H K V"],
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """The definition, token by token, as decoding does it."""
    rows = []
    with full_precision(v.device):
        q, k, values, a, b, log_decay = widened(q, k, v, a, b, log_decay)
        for t in range(q.shape[1]):
            read = einsum(a[:, t], state, "B H K, B H K V -> B H V")
            state = log_decay[:, t].exp()[..., None] * state
            state = state + einsum(b[:, t], read, "B H K, B H V -> B H K V")
            state = state + einsum(k[:, t], values[:, t], "B H K, B H V -> B H K V")
            rows.append(einsum(q[:, t], state, "B H K, B H K V -> B H V"))
        return torch.stack(rows, dim=1).to(v.dtype), state


RankOneOp = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class RankOneNeeds:
    """What a block asks of the scan: nothing beyond its output."""


def _from_nothing(run: Callable[..., tuple[Tensor, Tensor]]) -> RankOneOp:
    def whole(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, log_decay: Tensor) -> Tensor:
        state = empty_state(q.shape[0], q.shape[2], q.shape[3], v.shape[3], v.device, v.dtype)
        return run(q, k, v, a, b, log_decay, state)[0]

    return whole


_BACKENDS: tuple[Backend[RankOneOp, RankOneNeeds], ...] = (
    Backend(name="chunked", run=_from_nothing(chunked), refuses=lambda needs: ""),
    Backend(name="recurrent", run=_from_nothing(recurrent), refuses=lambda needs: ""),
)


def choose_rank_one_scan(needs: RankOneNeeds, named: str = "auto") -> Chosen[RankOneOp]:
    """The backend for whole sequences; a named one is used or refused, never replaced."""
    return choose("rank-one scan", _BACKENDS, needs, named)


def rank_one_flops(*, heads: int, key_dim: int, value_dim: int, chunk: int, pairs: float) -> float:
    """FLOPs per token: four products and three weighted sums over so many pairs, the solve, two reads, two writes."""
    products = 2.0 * pairs * (4 * key_dim + 3 * value_dim)
    solve = (chunk - 1.0) * (key_dim + value_dim)
    return heads * (products + solve + 8.0 * key_dim * value_dim)
