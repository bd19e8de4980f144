"""Attention inside a window without a dense mask: queries in blocks, each beside the keys its window can reach.

Time and memory grow with length x window. Conventions are those of blocks.ops.attention.
"""

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


def pays(n_query: int, n_key: int, window: int) -> bool:
    """Whether blocks of the window's size cost less than a dense mask; only where every key has its query."""
    return n_query == n_key and n_key >= 4 * window


def banded_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    *,
    scale: float,
    window: int,
    live: Bool[Tensor, "B T"] | None = None,
    causal: bool = True,
    segments: Int[Tensor, "B T"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B T H V"]:
    """Attention of each token to the `window` tokens up to itself, and without `causal` to as many after it."""
    batch, length, heads = q.shape[:3]
    block, sides = window, 1 if causal else 2
    missing = -length % block
    count = (length + missing) // block
    q, k, v = (F.pad(x.to(v.dtype), (0, 0, 0, 0, 0, missing)) for x in (q, k, v))
    q = rearrange(q, "B (N C) H K -> (B N) H C K", C=block)
    k, v = (repeat(_beside(x, block, causal), "B N P G K -> (B N) (G R) P K", R=heads // x.shape[2]) for x in (k, v))
    seen = _seen(length, count, block, causal, q.device)[None]
    if live is not None:
        live = F.pad(live, (0, missing))
        seen = seen & _beside(live, block, causal)[:, :, None, :] & rearrange(live, "B (N C) -> B N C 1", C=block)
    if segments is not None:
        # Segments past the end need no number of their own: `seen` hides them already.
        segments = F.pad(segments, (0, missing))
        seen = seen & (
            _beside(segments, block, causal)[:, :, None, :] == rearrange(segments, "B (N C) -> B N C 1", C=block)
        )
    # Every query sees itself: a kernel must never meet a row without any key.
    itself = F.pad(torch.eye(block, dtype=torch.bool, device=q.device), (block, (sides - 1) * block))
    mask = (seen | itself).expand(batch, *(-1,) * 3).flatten(0, 1)[:, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    out = rearrange(out, "(B N) H C V -> B (N C) H V", B=batch)
    if live is not None:
        out = out * live[:, :, None, None]
    return out[:, :length]


def _beside(x: Shaped[Tensor, "B M *A"], block: int, causal: bool) -> Shaped[Tensor, "B N P *A"]:
    """Each block behind the one before it, and without `causal` before the one after it; zeros past the ends."""
    blocks = x.unflatten(1, (-1, block))
    nothing = torch.zeros_like(blocks[:, :1])
    parts = [torch.cat([nothing, blocks[:, :-1]], dim=1), blocks]
    if not causal:
        parts.append(torch.cat([blocks[:, 1:], nothing], dim=1))
    return torch.cat(parts, dim=2)


def _seen(length: int, count: int, block: int, causal: bool, device: torch.device) -> Bool[Tensor, "N C P"]:
    """Where each query of each block may look, going by places alone."""
    query = torch.arange(block, device=device)[:, None]
    key = torch.arange(-block, block if causal else 2 * block, device=device)[None, :]
    near = (key > query - block) & ((key <= query) if causal else (key < query + block))
    place = key + block * torch.arange(count, device=device)[:, None]
    return near[None] & ((place >= 0) & (place < length))[:, None, :]
