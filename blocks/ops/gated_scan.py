"""Decayed linear attention: one function in a quadratic, a chunked and a recurrent form.

S_t = exp(g_t) * S_{t-1} + k_t v_t^T and y_t = S_t^T q_t, with log decays g <= 0 that are one number per head (their
last axis is 1) or one per key channel. Retention, gated linear attention, Mamba2 and HGRN2 are this function.
Decays are only ever multiplied as exp of a sum of logarithms from one position to a later one, which is at most 1: no
form can overflow. All is computed in float32 or wider, whatever the input.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from blocks.ops.backends import Backend, Chosen, choose
from blocks.ops.precision import full_precision
from blocks.ops.running_sum import running_sum

CHUNK = 64
"""Tokens a chunk holds when a head has one decay."""
CHANNEL_CHUNK = 8
"""Tokens a chunk holds when every channel has its own: pairs within a chunk then cost memory for each channel."""


def empty_state(
    batch: int, heads: int, key_dim: int, value_dim: int, device: torch.device, dtype: torch.dtype
) -> Float[Tensor, "B H K V"]:
    """The state before the first token."""
    wide = torch.promote_types(dtype, torch.float32)
    return torch.zeros(batch, heads, key_dim, value_dim, device=device, dtype=wide)


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in float32 or wider."""
    return tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)


def decays_since_start(log_decay: Float[Tensor, "*A C #K"]) -> Float[Tensor, "*A C #K"]:
    """The product of the decays up to each token, itself included."""
    return running_sum(log_decay.flatten(0, -3)).reshape(log_decay.shape).exp()


def pair_decays(log_decay: Float[Tensor, "*A C #K"]) -> Float[Tensor, "*A C S #K"]:
    """The product of the decays after token s up to token t, for each s <= t; zero for the others.

    Each sum of logarithms is formed by itself: the difference of two running sums would lose the digits of its terms.
    """
    size = log_decay.shape[-2]
    visible = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril()
    after = visible.tril(-1)[..., None]
    terms = torch.where(after, log_decay[..., :, None, :], 0.0)
    sums = running_sum(terms.flatten(0, -4)).reshape(terms.shape)
    return sums.masked_fill(~visible[..., None], -torch.inf).exp()


def decayed_products(
    left: Float[Tensor, "*A C K"], right: Float[Tensor, "*A S K"], decays: Float[Tensor, "*A C S #K"]
) -> Float[Tensor, "*A C S"]:
    """left_t . (decays_ts * right_s) for each pair."""
    if decays.shape[-1] == 1:
        return left @ right.transpose(-1, -2) * decays[..., 0]
    return einsum(left[..., :, None, :] * decays, right, "... C S K, ... S K -> ... C S")


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
        q, k, values, log_decay = (rearrange(x, "B T H K -> B H T K") for x in widened(q, k, v, log_decay))
        weights = decayed_products(q, k, pair_decays(log_decay))
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
    chunk = min(chunk or (CHUNK if log_decay.shape[-1] == 1 else CHANNEL_CHUNK), n_tokens)
    with full_precision(v.device):
        q, k, values, log_decay = (into_chunks(x, chunk) for x in widened(q, k, v, log_decay))
        decays = pair_decays(log_decay)
        since_start = decays_since_start(log_decay)
        added = einsum(k * decays[..., -1, :, :], values, "B N H C K, B N H C V -> B N H K V")
        keep = since_start[..., -1:, :].transpose(-1, -2)
        before = []
        for index in range(added.shape[1]):
            before.append(state)
            state = keep[:, index] * state + added[:, index]
        within = decayed_products(q, k, decays) @ values
        y = within + einsum(q * since_start, torch.stack(before, 1), "B N H C K, B N H K V -> B N H C V")
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
