"""Causal linear attention: one function in a quadratic, a chunked and a recurrent form.

With features q, k (rotated, where positions rotate) and plain features a, b (never rotated), all of width K:
y_t = (q_t . sum_{j<=t} k_j v_j^T) / (a_t . sum_{j<=t} b_j). A denominator that is empty, at most EMPTY of the product
of the sizes |a_t|_1 sum_{j<=t} |b_j|_1, gives zero: a common factor on all queries or all keys changes nothing.
Where tokens have no order, in `over_all`, both sums are those of the whole sequence. All is computed in float32 or
wider, whatever the input.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from blocks.ops.backends import Backend, Chosen, choose
from blocks.ops.precision import full_precision
from blocks.ops.running_sum import running_sum

EMPTY = 1e-12
CHUNK = 64

Sums = tuple[Float[Tensor, "B H K V"], Float[Tensor, "B H K"]]
"""Everything decoding keeps: the sums of k v^T and of b."""


def empty_sums(batch: int, heads: int, key_dim: int, value_dim: int, device: torch.device, dtype: torch.dtype) -> Sums:
    """The sums before the first token."""
    wide = torch.promote_types(dtype, torch.float32)
    return (
        torch.zeros(batch, heads, key_dim, value_dim, device=device, dtype=wide),
        torch.zeros(batch, heads, key_dim, device=device, dtype=wide),
    )


def quadratic(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    plain_q: Float[Tensor, "B T H K"],
    plain_k: Float[Tensor, "B T H K"],
) -> Float[Tensor, "B T H V"]:
    """The definition: every visible pair is formed."""
    with full_precision(v.device):
        q, k, values, plain_q, plain_k = _wide(q, k, v, plain_q, plain_k)
        products = einsum(q, k, "B T H K, B S H K -> B H T S").tril()
        weights = einsum(plain_q, plain_k, "B T H K, B S H K -> B H T S").tril()
        total = einsum(products, values, "B H T S, B S H V -> B T H V")
        size = _size(plain_q) * running_sum(_size(plain_k))
        return _divide(total, rearrange(weights.sum(-1), "B H T -> B T H"), size).to(v.dtype)


def chunked(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    plain_q: Float[Tensor, "B T H K"],
    plain_k: Float[Tensor, "B T H K"],
    sums: Sums,
    chunk: int = CHUNK,
) -> tuple[Float[Tensor, "B T H V"], Sums]:
    """Pairs within chunks, sums across them; any length, and the sums after the last token."""
    n_tokens = q.shape[1]
    chunk = min(chunk, n_tokens)
    with full_precision(v.device):
        q, k, values, plain_q, plain_k = _wide(q, k, v, plain_q, plain_k)
        size = _size(plain_q) * (running_sum(_size(plain_k)) + _size(sums[1])[:, None])
        missing = -n_tokens % chunk
        q, k, values, plain_q, plain_k = (
            rearrange(F.pad(x, (0, 0, 0, 0, 0, missing)), "B (N C) H K -> B N H C K", C=chunk)
            for x in (q, k, values, plain_q, plain_k)
        )
        before, after = _across_chunks(einsum(k, values, "B N H C K, B N H C V -> B N H K V"), sums[0])
        before_b, after_b = _across_chunks(plain_k.sum(-2), sums[1])
        within = einsum(q, k, "B N H C K, B N H S K -> B N H C S").tril()
        total = einsum(within, values, "B N H C S, B N H S V -> B N H C V")
        total = total + einsum(q, before, "B N H C K, B N H K V -> B N H C V")
        weight = einsum(plain_q, plain_k, "B N H C K, B N H S K -> B N H C S").tril().sum(-1)
        weight = weight + einsum(plain_q, before_b, "B N H C K, B N H K -> B N H C")
        total = rearrange(total, "B N H C V -> B (N C) H V")[:, :n_tokens]
        weight = rearrange(weight, "B N H C -> B (N C) H")[:, :n_tokens]
        return _divide(total, weight, size).to(v.dtype), (after, after_b)


def _across_chunks(
    added: Float[Tensor, "B N H *A"], start: Float[Tensor, "B H *A"]
) -> tuple[Float[Tensor, "B N H *A"], Float[Tensor, "B H *A"]]:
    """The sums before each chunk, and after the last, from what each chunk adds."""
    after = running_sum(added) + start[:, None]
    return torch.cat([start[:, None], after[:, :-1]], dim=1), after[:, -1]


def packed(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    plain_q: Float[Tensor, "B T H K"],
    plain_k: Float[Tensor, "B T H K"],
    segments: Int[Tensor, "B T"],
    chunk: int = CHUNK,
) -> Float[Tensor, "B T H V"]:
    """The same for documents side by side, each an unbroken run of one number in `segments`: sums start anew in each.

    Sums carried into a chunk are those of the document that the chunk before ended in.
    """
    n_tokens = q.shape[1]
    chunk = min(chunk, n_tokens)
    with full_precision(v.device):
        q, k, values, plain_q, plain_k = _wide(q, k, v, plain_q, plain_k)
        missing = -n_tokens % chunk
        q, k, values, plain_q, plain_k = (
            rearrange(F.pad(x, (0, 0, 0, 0, 0, missing)), "B (N C) H K -> N B H C K", C=chunk)
            for x in (q, k, values, plain_q, plain_k)
        )
        # Filled-up places hold keys of zero, whichever document they count as.
        document = rearrange(F.pad(segments, (0, missing), value=-1), "B (N C) -> N B 1 C", C=chunk)
        sum_kv, sum_b = (
            q.new_zeros(*q.shape[1:3], q.shape[-1], values.shape[-1]),
            q.new_zeros(*q.shape[1:3], q.shape[-1]),
        )
        ended_in = document[0, :, :, -1:]
        rows = []
        for index in range(q.shape[0]):
            here = document[index]
            same = (here[..., :, None] == here[..., None, :]).tril()
            carried = (here == ended_in).to(q.dtype)[..., None]
            within = einsum(q[index], k[index], "B H C K, B H S K -> B H C S") * same
            weights = einsum(plain_q[index], plain_k[index], "B H C K, B H S K -> B H C S") * same
            total = within @ values[index] + carried * (q[index] @ sum_kv)
            weight = weights.sum(-1) + carried[..., 0] * einsum(plain_q[index], sum_b, "B H C K, B H K -> B H C")
            seen = (same * _size(plain_k[index])[..., None, :]).sum(-1) + carried[..., 0] * _size(sum_b)[..., None]
            rows.append(_divide(total, weight, _size(plain_q[index]) * seen))
            last = here[..., -1:]
            added = (here == last).to(q.dtype)[..., None]
            goes_on = (last == ended_in).to(q.dtype)
            sum_kv = goes_on[..., None] * sum_kv + (added * k[index]).transpose(-1, -2) @ values[index]
            sum_b = goes_on * sum_b + (added * plain_k[index]).sum(-2)
            ended_in = last
        return rearrange(torch.stack(rows), "N B H C V -> B (N C) H V")[:, :n_tokens].to(v.dtype)


def recurrent(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    plain_q: Float[Tensor, "B T H K"],
    plain_k: Float[Tensor, "B T H K"],
    sums: Sums,
) -> tuple[Float[Tensor, "B T H V"], Sums]:
    """Token by token, as decoding does it.

    A token's own pair is no part of the sums it reads: its weight is then the same above and below the line, however
    much of it cancels.
    """
    rows = []
    with full_precision(v.device):
        q, k, values, plain_q, plain_k = _wide(q, k, v, plain_q, plain_k)
        own = einsum(q, k, "B T H K, B T H K -> B T H")
        own_weight = einsum(plain_q, plain_k, "B T H K, B T H K -> B T H")
        sum_kv, sum_b = sums
        for t in range(q.shape[1]):
            total = einsum(q[:, t], sum_kv, "B H K, B H K V -> B H V") + own[:, t, :, None] * values[:, t]
            weight = einsum(plain_q[:, t], sum_b, "B H K, B H K -> B H") + own_weight[:, t]
            rows.append(_divide(total, weight, _size(plain_q[:, t]) * (_size(sum_b) + _size(plain_k[:, t]))))
            sum_kv = sum_kv + einsum(k[:, t], values[:, t], "B H K, B H V -> B H K V")
            sum_b = sum_b + plain_k[:, t]
        return torch.stack(rows, dim=1).to(v.dtype), (sum_kv, sum_b)


def over_all(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    plain_q: Float[Tensor, "B T H K"],
    plain_k: Float[Tensor, "B T H K"],
    segments: Int[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T H V"]:
    """Every token reads the sums of the whole sequence; with `segments` those of its document, pair by pair."""
    with full_precision(v.device):
        q, k, values, plain_q, plain_k = _wide(q, k, v, plain_q, plain_k)
        if segments is not None:
            same = (segments[:, None, :, None] == segments[:, None, None, :]).to(q.dtype)
            products = einsum(q, k, "B T H K, B S H K -> B H T S") * same
            weights = einsum(plain_q, plain_k, "B T H K, B S H K -> B H T S") * same
            total = einsum(products, values, "B H T S, B S H V -> B T H V")
            seen = (same[:, 0, :, :, None] * _size(plain_k)[:, None]).sum(2)
            weight = rearrange(weights.sum(-1), "B H T -> B T H")
            return _divide(total, weight, _size(plain_q) * seen).to(v.dtype)
        total = einsum(q, einsum(k, values, "B S H K, B S H V -> B H K V"), "B T H K, B H K V -> B T H V")
        weight = einsum(plain_q, plain_k.sum(1), "B T H K, B H K -> B T H")
        return _divide(total, weight, _size(plain_q) * _size(plain_k).sum(1, keepdim=True)).to(v.dtype)


def over_all_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """FLOPs per token of `over_all` without segments: its sums, and what each token reads of them."""
    return 2.0 * heads * key_dim * (2 * value_dim + 1)


def _size(features: Float[Tensor, "*A K"]) -> Float[Tensor, "*A"]:
    """What features amount to; it bounds no gradient."""
    return features.detach().abs().sum(-1)


def _divide(
    total: Float[Tensor, "*A V"], weight: Float[Tensor, "*A"], size: Float[Tensor, "*A"]
) -> Float[Tensor, "*A V"]:
    filled = weight > EMPTY * size
    return torch.where(filled[..., None], total / torch.where(filled, weight, 1.0)[..., None], 0.0)


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)


LinearOp = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class LinearNeeds:
    """What a block asks of linear attention: nothing beyond its output."""


def _chunked_from_nothing(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    plain_q: Float[Tensor, "B T H K"],
    plain_k: Float[Tensor, "B T H K"],
) -> Float[Tensor, "B T H V"]:
    sums = empty_sums(q.shape[0], q.shape[2], q.shape[3], v.shape[3], v.device, v.dtype)
    return chunked(q, k, v, plain_q, plain_k, sums)[0]


_BACKENDS: tuple[Backend[LinearOp, LinearNeeds], ...] = (
    Backend(name="chunked", run=_chunked_from_nothing, refuses=lambda needs: ""),
    Backend(name="quadratic", run=quadratic, refuses=lambda needs: ""),
)


def choose_linear_attention(needs: LinearNeeds, named: str = "auto") -> Chosen[LinearOp]:
    """The backend for whole sequences; a named one is used or refused, never replaced."""
    return choose("linear attention", _BACKENDS, needs, named)
