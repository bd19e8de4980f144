"""Softmax attention: a plain reference, and PyTorch's scaled_dot_product_attention.

Everywhere the queries are the last T of S keys, so that query t stands at key S - T + t. `window` is how many keys a
query sees, itself included; None: all before it. Without `causal` it also sees the keys after it, `window - 1` on each
side. Tokens of a `prefix` all see each other. With `segments` only tokens of one segment see each other. `live` is
False at padding: padding is never attended to, and the output at padding is zero. Query head h is served by key/value
head floor(h * G / H).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from blocks.ops import banded
from blocks.ops.backends import Backend, Chosen, choose
from blocks.ops.precision import full_precision


def visible_keys(
    n_query: int,
    n_key: int,
    window: int | None,
    live: Bool[Tensor, "B S"] | None,
    device: torch.device,
    *,
    causal: bool = True,
    segments: Int[Tensor, "B S"] | None = None,
    prefix: int = 0,
) -> Bool[Tensor, "#B 1 T S"]:
    """True where a query may look: at itself and before, inside the window, and from a live token to a live token."""
    query = torch.arange(n_key - n_query, n_key, device=device)[:, None]
    key = torch.arange(n_key, device=device)[None, :]
    seen = key <= query if causal else torch.ones(n_query, n_key, dtype=torch.bool, device=device)
    if window is not None:
        seen = seen & (key > query - window)
        seen = seen if causal else seen & (key < query + window)
    if prefix:
        seen = seen | ((key < prefix) & (query < prefix))
    seen = seen[None, None]
    if segments is not None:
        seen = seen & (segments[:, None, None, :] == segments[:, None, n_key - n_query :, None])
    if live is None:
        return seen
    return seen & live[:, None, None, :] & live[:, None, n_key - n_query :, None]


def attention_weights(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S G K"],
    *,
    scale: float,
    window: int | None = None,
    bias: Float[Tensor, "*#B H T S"] | None = None,
    live: Bool[Tensor, "B S"] | None = None,
    causal: bool = True,
    segments: Int[Tensor, "B S"] | None = None,
    prefix: int = 0,
) -> Float[Tensor, "B H T S"]:
    """Softmax weights, computed in float32 or wider; rows sum to one, or are all zero where nothing is visible."""
    wide = torch.promote_types(q.dtype, torch.float32)
    with full_precision(q.device):
        k = repeat(k, "B S G K -> B S (G R) K", R=q.shape[2] // k.shape[2])
        logits = einsum(q.to(wide), k.to(wide), "B T H K, B S H K -> B H T S") * scale
        if bias is not None:
            logits = logits + bias.to(wide)
        hidden = ~visible_keys(
            q.shape[1], k.shape[1], window, live, q.device, causal=causal, segments=segments, prefix=prefix
        )
        weights = torch.softmax(logits.masked_fill(hidden, torch.finfo(wide).min), dim=-1)
        return weights.masked_fill(hidden, 0.0)


def weighted_values(
    weights: Float[Tensor, "B H T S"], v: Float[Tensor, "B S G V"], dropout: float = 0.0
) -> Float[Tensor, "B T H V"]:
    """Values averaged by the weights, each weight dropped with probability `dropout`, in the dtype of the values."""
    with full_precision(v.device):
        dropped = F.dropout(weights, dropout) if dropout else weights
        values = repeat(v, "B S G V -> B S (G R) V", R=weights.shape[1] // v.shape[2])
        return einsum(dropped, values.to(weights.dtype), "B H T S, B S H V -> B T H V").to(v.dtype)


def entropy(weights: Float[Tensor, "B H T S"]) -> Float[Tensor, "B H T"]:
    """Entropy of each row in nats; weights of exactly zero add nothing and get no gradient."""
    return -torch.special.xlogy(weights, torch.where(weights > 0, weights, 1.0)).sum(-1)


def reference_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S G K"],
    v: Float[Tensor, "B S G V"],
    *,
    scale: float,
    window: int | None = None,
    bias: Float[Tensor, "*#B H T S"] | None = None,
    live: Bool[Tensor, "B S"] | None = None,
    causal: bool = True,
    segments: Int[Tensor, "B S"] | None = None,
    prefix: int = 0,
    dropout: float = 0.0,
) -> Float[Tensor, "B T H V"]:
    """Attention by its definition, weights and all."""
    weights = attention_weights(
        q, k, scale=scale, window=window, bias=bias, live=live, causal=causal, segments=segments, prefix=prefix
    )
    return weighted_values(weights, v, dropout)


def sdpa_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S G K"],
    v: Float[Tensor, "B S G V"],
    *,
    scale: float,
    window: int | None = None,
    bias: Float[Tensor, "*#B H T S"] | None = None,
    live: Bool[Tensor, "B S"] | None = None,
    causal: bool = True,
    segments: Int[Tensor, "B S"] | None = None,
    prefix: int = 0,
    dropout: float = 0.0,
) -> Float[Tensor, "B T H V"]:
    """Attention by PyTorch's fused kernels; a bias, padding or a window wide beside the text costs a dense mask."""
    n_query, n_key = q.shape[1], k.shape[1]
    # Blocks were proved and timed on a CPU; on a GPU the dense mask is what was measured.
    plain = bias is None and not prefix and q.device.type == "cpu"
    if window is not None and plain and banded.pays(n_query, n_key, window):
        return banded.banded_attention(
            q, k, v, scale=scale, window=window, live=live, causal=causal, segments=segments, dropout=dropout
        )
    unlimited = window is None or window >= n_key
    q, k, v = (rearrange(x.to(v.dtype), "B T H K -> B H T K") for x in (q, k, v))
    mask = None
    partial = causal and (1 < n_query < n_key or prefix > 0)
    if bias is not None or live is not None or segments is not None or not unlimited or partial:
        mask = visible_keys(n_query, n_key, window, live, q.device, causal=causal, segments=segments, prefix=prefix)
        # Every query sees itself: a kernel must never meet a row without any key.
        itself = torch.eye(n_query, dtype=torch.bool, device=q.device)
        mask = mask | F.pad(itself, (n_key - n_query, 0))
        # A mask makes the fused CUDA kernels refuse grouped heads, so the groups are spelled out.
        k, v = (repeat(x, "B G S K -> B (G R) S K", R=q.shape[1] // x.shape[1]) for x in (k, v))
        if bias is not None:
            mask = bias.to(q.dtype).masked_fill(~mask, -torch.inf)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal and mask is None and n_query > 1,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    out = rearrange(out, "B H T V -> B T H V")
    return out if live is None else out * live[:, n_key - n_query :, None, None]


AttentionOp = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class AttentionNeeds:
    """What a block asks of attention beyond its output."""

    weights: bool = False
    """Whether the weights themselves are used."""
    shaped: bool = False
    """Whether logits are capped, or rows have entries beside the keys."""


def _fused_refuses(needs: AttentionNeeds) -> str:
    if needs.weights:
        return "fused kernels return no attention weights"
    return "fused kernels take no cap, sink or memory" if needs.shaped else ""


_BACKENDS: tuple[Backend[AttentionOp, AttentionNeeds], ...] = (
    Backend(
        name="sdpa",
        run=sdpa_attention,
        refuses=_fused_refuses,
    ),
    Backend(name="reference", run=reference_attention, refuses=lambda needs: ""),
)


def choose_attention(needs: AttentionNeeds, named: str = "auto") -> Chosen[AttentionOp]:
    """The backend for a block with these needs; a named one is used or refused, never replaced."""
    return choose("attention", _BACKENDS, needs, named)
