"""Decayed linear attention: one function in a quadratic, a chunked and a recurrent form.

S_t = exp(g_t) * S_{t-1} + k_t v_t^T and y_t = S_t^T q_t, with log decays g <= 0 that are one number per head (their
last axis is 1) or one per key channel. Retention, gated linear attention, state space duality and HGRN2 are this function.
Decays are only ever multiplied as exp of a sum of logarithms from one position to a later one, which is at most 1: no
form can overflow. All is computed in float32 or wider, whatever the input.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from blocks.ops.backends import Backend, Chosen, choose
from blocks.ops.precision import full_precision

CHUNK = 64
"""Tokens a chunk holds when a head has one decay."""
CHANNEL_CHUNK = 16
"""Tokens a chunk holds when every channel has its own: pairs within a chunk then cost memory for each channel."""


def chunk_for(log_decay: Float[Tensor, "B T H #K"]) -> int:
    """The chunk length that suits these decays."""
    return CHUNK if log_decay.shape[-1] == 1 else CHANNEL_CHUNK


def empty_state(
    batch: int, heads: int, key_dim: int, value_dim: int, device: torch.device, dtype: torch.dtype
) -> Float[Tensor, "B H K V"]:
    """The state before the first token."""
    wide = torch.promote_types(dtype, torch.float32)
    return torch.zeros(batch, heads, key_dim, value_dim, device=device, dtype=wide)


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in float32 or wider."""
    return tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)


def decayed_products(
    left: Float[Tensor, "*A C K"],
    right: Float[Tensor, "*A S K"],
    left_log: Float[Tensor, "*A C #K"],
    right_log: Float[Tensor, "*A S #K"],
    visible: Bool[Tensor, "C S"],
) -> Float[Tensor, "*A C S"]:
    """left_t . (exp(left_log_t - right_log_s) * right_s) for each visible pair, zero for the others."""
    if left_log.shape[-1] == 1:
        gap = (left_log - right_log.transpose(-1, -2)).masked_fill(~visible, -torch.inf)
        return left @ right.transpose(-1, -2) * gap.exp()
    gap = (left_log[..., :, None, :] - right_log[..., None, :, :]).masked_fill(~visible[..., None], -torch.inf)
    return einsum(left[..., :, None, :] * gap.exp(), right, "... C S K, ... S K -> ... C S")


def lower_triangle(size: int, device: torch.device, diagonal: int = 0) -> Bool[Tensor, "C C"]:
    """True where the column is at most the row plus `diagonal`."""
    return torch.ones(size, size, dtype=torch.bool, device=device).tril(diagonal)


def into_chunks(x: Float[Tensor, "B T H K"], chunk: int) -> Float[Tensor, "B N H C K"]:
    """Chunks of equal length, the last one filled up with zeros."""
    missing = -x.shape[1] % chunk
    return rearrange(F.pad(x, (0, 0, 0, 0, 0, missing)), "B (N C) H K -> B N H C K", C=chunk)


def quadratic(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    log_decay: Float[Tensor, "B T H #K"],
) -> Float[Tensor, "B T H V"]:
    """The definition: every visible pair is formed, with the product of the decays between its tokens."""
    with full_precision(v.device):
        q, k, values, total = widened(q, k, v, log_decay.cumsum(1))
        q, k, values, total = (rearrange(x, "B T H K -> B H T K") for x in (q, k, values, total))
        weights = decayed_products(q, k, total, total, lower_triangle(q.shape[2], v.device))
        return rearrange(weights @ values, "B H T V -> B T H V").to(v.dtype)


def chunked(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    log_decay: Float[Tensor, "B T H #K"],
    state: Float[Tensor, "B H K V"],
    chunk: int = 0,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """Pairs within chunks, states across them; any length, and the state after the last token.

    A chunk of 0 tokens stands for the length that suits the decays.
    """
    n_tokens = q.shape[1]
    chunk = min(chunk or chunk_for(log_decay), n_tokens)
    with full_precision(v.device):
        q, k, values, log_decay = (into_chunks(x, chunk) for x in widened(q, k, v, log_decay))
        total = log_decay.cumsum(-2)
        last = total[..., -1:, :]
        added = einsum(k * (last - total).exp(), values, "B N H C K, B N H C V -> B N H K V")
        keep = last.exp().transpose(-1, -2)
        before = []
        for index in range(added.shape[1]):
            before.append(state)
            state = keep[:, index] * state + added[:, index]
        within = decayed_products(q, k, total, total, lower_triangle(chunk, v.device)) @ values
        y = within + einsum(q * total.exp(), torch.stack(before, 1), "B N H C K, B N H K V -> B N H C V")
        return rearrange(y, "B N H C V -> B (N C) H V")[:, :n_tokens].to(v.dtype), state


def recurrent(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    log_decay: Float[Tensor, "B T H #K"],
    state: Float[Tensor, "B H K V"],
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """Token by token, as decoding does it."""
    rows = []
    with full_precision(v.device):
        q, k, values, log_decay = widened(q, k, v, log_decay)
        for t in range(q.shape[1]):
            written = einsum(k[:, t], values[:, t], "B H K, B H V -> B H K V")
            state = log_decay[:, t].exp()[..., None] * state + written
            rows.append(einsum(q[:, t], state, "B H K, B H K V -> B H V"))
        return torch.stack(rows, dim=1).to(v.dtype), state


ScanOp = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class ScanNeeds:
    """What a block asks of a gated scan: nothing beyond its output."""


def _chunked_from_nothing(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    log_decay: Float[Tensor, "B T H #K"],
) -> Float[Tensor, "B T H V"]:
    state = empty_state(q.shape[0], q.shape[2], q.shape[3], v.shape[3], v.device, v.dtype)
    return chunked(q, k, v, log_decay, state)[0]


_BACKENDS: tuple[Backend[ScanOp, ScanNeeds], ...] = (
    Backend(name="chunked", run=_chunked_from_nothing, refuses=lambda needs: ""),
    Backend(name="quadratic", run=quadratic, refuses=lambda needs: ""),
)


def choose_gated_scan(needs: ScanNeeds, named: str = "auto") -> Chosen[ScanOp]:
    """The backend for whole sequences; a named one is used or refused, never replaced."""
    return choose("gated scan", _BACKENDS, needs, named)


def scan_flops(*, heads: int, key_dim: int, value_dim: int, pairs: float) -> float:
    """FLOPs per token: scores and weighted values of so many pairs, and one write to and one read of the state."""
    return 2.0 * heads * ((key_dim + value_dim) * pairs + 2 * key_dim * value_dim)
