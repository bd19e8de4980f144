"""The gated delta rule: one function in a dense, a chunked (WY) and a recurrent form.

S_t = (I - beta_t k_t k_t^T) exp(g_t) * S_{t-1} + beta_t k_t v_t^T and y_t = S_t^T q_t: what the decayed state holds
under k_t is moved by beta_t towards v_t. Keys are taken as they come; with unit keys and beta in (0, 2) no direction of
the state ever grows. Log decays g <= 0 are one number per head (their last axis is 1) or one per key channel; zero is
the plain delta rule. All is computed in float32 or wider, whatever the input.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from blocks.ops.backends import Backend, Chosen, choose
from blocks.ops.gated_scan import decayed_products, decays_since_start, empty_state, into_chunks, pair_decays, widened
from blocks.ops.precision import full_precision

CHUNK = 32
"""Tokens a chunk holds when a head has one decay; the rounding of the triangular system grows with it."""
CHANNEL_CHUNK = 8
"""Tokens a chunk holds when every channel has its own."""


def dense(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H"],
    log_decay: Float[Tensor, "B T H #K"],
) -> Float[Tensor, "B T H V"]:
    """Decayed scores times the solution of one triangular system over the whole sequence."""
    with full_precision(v.device):
        inputs = widened(q, k, v, beta[..., None], log_decay)
        q, k, values, strength, log_decay = (rearrange(x, "B T H K -> B H T K") for x in inputs)
        decays = pair_decays(log_decay)
        overlap = strength * decayed_products(k, k, decays).tril(-1)
        system = torch.eye(overlap.shape[-1], device=overlap.device, dtype=overlap.dtype) + overlap
        written = torch.linalg.solve(system, strength * values)
        weights = decayed_products(q, k, decays)
        return rearrange(weights @ written, "B H T V -> B T H V").to(v.dtype)


def chunked(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H"],
    log_decay: Float[Tensor, "B T H #K"],
    state: Float[Tensor, "B H K V"],
    chunk: int = 0,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """A triangular system per chunk, states across them (Yang et al. 2024, eq. 10-11; Yang et al. 2025, section 3.3).

    Any length, and the state after the last token. A chunk of 0 tokens stands for the length that suits the decays.
    """
    n_tokens = q.shape[1]
    chunk = min(chunk or (CHUNK if log_decay.shape[-1] == 1 else CHANNEL_CHUNK), n_tokens)
    with full_precision(v.device):
        q, k, values, strength, log_decay = (
            into_chunks(x, chunk) for x in widened(q, k, v, beta[..., None], log_decay)
        )
        decays = pair_decays(log_decay)
        since_start = decays_since_start(log_decay)
        overlap = strength * decayed_products(k, k, decays).tril(-1)
        seen = strength * k * since_start
        # One solve gives the writes for an empty state, and what every earlier state takes away from them.
        solved = _solve(overlap, torch.cat([strength * values, seen], dim=-1))
        fresh, taken = solved.split([values.shape[-1], k.shape[-1]], dim=-1)
        weights = decayed_products(q, k, decays)
        reads, carried = q * since_start, k * decays[..., -1, :, :]
        keep = since_start[..., -1:, :].transpose(-1, -2)
        rows = []
        for index in range(q.shape[1]):
            written = fresh[:, index] - taken[:, index] @ state
            rows.append(reads[:, index] @ state + weights[:, index] @ written)
            state = keep[:, index] * state + carried[:, index].transpose(-1, -2) @ written
        y = rearrange(torch.stack(rows, 1), "B N H C V -> B (N C) H V")[:, :n_tokens]
        return y.to(v.dtype), state


def recurrent(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H"],
    log_decay: Float[Tensor, "B T H #K"],
    state: Float[Tensor, "B H K V"],
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """Token by token, as decoding does it."""
    rows = []
    with full_precision(v.device):
        q, k, values, beta, log_decay = widened(q, k, v, beta, log_decay)
        for t in range(q.shape[1]):
            state = log_decay[:, t].exp()[..., None] * state
            held = einsum(k[:, t], state, "B H K, B H K V -> B H V")
            written = beta[:, t, :, None] * (values[:, t] - held)
            state = state + einsum(k[:, t], written, "B H K, B H V -> B H K V")
            rows.append(einsum(q[:, t], state, "B H K, B H K V -> B H V"))
        return torch.stack(rows, dim=1).to(v.dtype), state


def _solve(overlap: Float[Tensor, "*A C C"], right: Float[Tensor, "*A C W"]) -> Float[Tensor, "*A C W"]:
    """The solution x of (I + overlap) x = right; overlap is strictly lower triangular."""
    return torch.linalg.solve_triangular(overlap, right, upper=False, unitriangular=True)


DeltaOp = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class DeltaNeeds:
    """What a block asks of the delta rule: nothing beyond its output."""


def _chunked_from_nothing(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H"],
    log_decay: Float[Tensor, "B T H #K"],
) -> Float[Tensor, "B T H V"]:
    state = empty_state(q.shape[0], q.shape[2], q.shape[3], v.shape[3], v.device, v.dtype)
    return chunked(q, k, v, beta, log_decay, state)[0]


_BACKENDS: tuple[Backend[DeltaOp, DeltaNeeds], ...] = (
    Backend(name="chunked", run=_chunked_from_nothing, refuses=lambda needs: ""),
    Backend(name="dense", run=dense, refuses=lambda needs: ""),
)


def choose_delta_rule(needs: DeltaNeeds, named: str = "auto") -> Chosen[DeltaOp]:
    """The backend for whole sequences; a named one is used or refused, never replaced."""
    return choose("delta rule", _BACKENDS, needs, named)


def delta_flops(*, heads: int, key_dim: int, value_dim: int, chunk: int, pairs: float) -> float:
    """FLOPs per token: overlaps and scores of so many pairs, the triangular solve, two reads and one write of a state.

    The solve costs what multiplying by a triangle costs: half of a chunk's pairs and itself, for keys and values.
    """
    products = 2.0 * pairs * (2 * key_dim + value_dim)
    solve = (chunk - 1.0) * (key_dim + value_dim)
    return heads * (products + solve + 6.0 * key_dim * value_dim)
