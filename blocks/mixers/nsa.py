"""Native sparse attention: a gated sum of attention to block means, to the best blocks, and to a window."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange, reduce
from jaxtyping import Bool, Float
from torch import Tensor

from blocks.families import (
    AbstractMixer,
    Context,
    Dims,
    HeadShape,
    Hook,
    InfeasibleArchitecture,
    MixerModule,
    PositionModule,
    Role,
    State,
    linear,
)
from blocks.mixers import heads as attention
from blocks.mixers.moba import mean_keys
from blocks.mixers.projections import appended, join_heads, projections
from blocks.ops.alignment import first_live, rolled
from blocks.ops.attention import visible_keys, weighted_values
from blocks.ops.scores import masked_softmax, scaled_logits
from blocks.registry import register
from search_space.domains import choice

BRANCHES = 3
FORCED = 3
"""Blocks that every query sees: the first, its own, and the one before it."""
TIE = 64
"""Logarithms of importance so many roundings apart count as equal."""


def complete_blocks(n_query: int, n_key: int, n_blocks: int, block: int, device: torch.device) -> Bool[Tensor, "T N"]:
    """True where a block ends at the query or before; queries are the last T of S keys."""
    last = torch.arange(1, n_blocks + 1, device=device) * block - 1
    return last[None, :] <= torch.arange(n_key - n_query, n_key, device=device)[:, None]


def best_blocks(
    logits: Float[Tensor, "B H T N"], complete: Bool[Tensor, "#B 1 T N"], first: int, block: int, groups: int, kept: int
) -> Bool[Tensor, "B G T N"]:
    """The `kept` blocks that matter most to the query heads of each group: FORCED ones, then by their summed weights.

    Importance is the softmax of logits over complete blocks (Yuan et al. 2025, eq. 8 and 10), compared as logarithms;
    blocks at a tie are all kept. The first query stands at place `first`. No gradient passes.
    """
    hidden = logits.detach().masked_fill(~complete, torch.finfo(logits.dtype).min)
    shares = torch.log_softmax(hidden, dim=-1).masked_fill(~complete, -torch.inf)
    importance = rearrange(shares, "B (G R) T N -> B G R T N", G=groups).logsumexp(2)
    own = torch.arange(first, first + logits.shape[2], device=logits.device)[:, None] // block
    place = torch.arange(logits.shape[3], device=logits.device)[None, :]
    forced = (place == 0) | (place == own) | (place == own - 1)
    importance = importance.masked_fill(forced, torch.inf).masked_fill(place > own, -torch.inf)
    least = importance.topk(min(kept, logits.shape[3]), dim=-1).values[..., -1:]
    slack = TIE * torch.finfo(logits.dtype).eps * (1 + least.abs().nan_to_num(posinf=0.0))
    return (importance >= least - slack) & (place <= own)


class NativeSparseModule(MixerModule):
    """Each head sums what three softmaxes read, each under a gate: block means, chosen blocks, the last tokens.

    A block is compressed to the mean of its keys and of its values, stands at its last token, and is seen once it is
    complete. With `own_kv` each branch has keys and values of its own.
    """

    def __init__(self, *, d_model: int, shape: HeadShape, block: int, kept: int, window: int, own_kv: bool) -> None:
        super().__init__()
        self.shape, self.block, self.kept, self.window = shape, block, kept, window
        self.parts = BRANCHES if own_kv else 1
        wide = dataclasses.replace(shape, kv_heads=self.parts * shape.kv_heads)
        self.query, self.key, self.value, self.out = projections(d_model, wide)
        self.gate = linear(d_model, BRANCHES * shape.heads, Role.QUERY, bias=True)
        self.backends = {"attention": "reference (not sdpa: each query chooses its blocks)"}

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        if context.live is None:
            return self._mix(x, self._rows(self.key, x), self._rows(self.value, x), position, 0, None)
        shift = first_live(context.live)
        x = rolled(x, shift)
        rows = self._rows(self.key, x), self._rows(self.value, x)
        return rolled(self._mix(x, *rows, position, 0, rolled(context.live, shift)), -shift)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        shape = (batch, 0, self.parts * self.shape.kv_heads, self.shape.head_dim)
        return {name: torch.zeros(shape, device=device, dtype=dtype) for name in ("k", "v")}

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        new = {"k": self._rows(self.key, x), "v": self._rows(self.value, x)}
        kept = {name: appended(state[name], rows) for name, rows in new.items()}
        k, v = (kept[name].to(rows.dtype) for name, rows in new.items())
        return self._mix(x, k, v, position, start, None), kept

    def _rows(self, project: torch.nn.Module, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T N K"]:
        return rearrange(project(x), "B T (N K) -> B T N K", K=self.shape.head_dim)

    def _mix(
        self,
        x: Float[Tensor, "B T D"],
        k: Float[Tensor, "B S N K"],
        v: Float[Tensor, "B S N K"],
        position: PositionModule,
        start: int,
        live: Bool[Tensor, "B S"] | None,
    ) -> Float[Tensor, "B T D"]:
        q = self._rows(self.query, x)
        coarse, chosen = self._compressed(q, k, v, position, start, live)
        seen = visible_keys(q.shape[1], k.shape[1], None, live, q.device)
        near = visible_keys(q.shape[1], k.shape[1], self.window, live, q.device)
        picked = self._attended(q, k, v, position, start, seen & chosen, branch=1)
        recent = self._attended(q, k, v, position, start, near, branch=2)
        gates = torch.sigmoid(rearrange(self.gate(x), "B T (P H) -> P B T H 1", P=BRANCHES))
        return join_heads(self, gates[0] * coarse + gates[1] * picked + gates[2] * recent)

    def _compressed(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B S N K"],
        v: Float[Tensor, "B S N K"],
        position: PositionModule,
        start: int,
        live: Bool[Tensor, "B S"] | None,
    ) -> tuple[Float[Tensor, "B T H K"], Bool[Tensor, "B H T S"]]:
        """What block means give to each query, and the tokens of the blocks that matter most to it."""
        n_query, n_key, block = q.shape[1], k.shape[1], self.block
        means_k, means_v = (mean_keys(self._branch(rows, 0), live, block).to(rows.dtype) for rows in (k, v))
        n_blocks = means_k.shape[1]
        ends = (torch.arange(1, n_blocks + 1, device=q.device) * block - 1).clamp_max(n_key - 1)
        # A scheme rotates keys of all places in a row, so means are spread over it and gathered again.
        spread = means_k.repeat_interleave(block, dim=1)[:, :n_key]
        rotated_q, rotated_k = position.rotate(q, spread, start)
        bias = position.score_bias(n_query, n_key, start)
        scale = self.shape.head_dim**-0.5
        logits = scaled_logits(rotated_q, rotated_k[:, ends], scale, None if bias is None else bias[:, :, ends])
        complete = complete_blocks(n_query, n_key, n_blocks, block, q.device)[None, None]
        if live is not None:
            padded = torch.nn.functional.pad(live, (0, -n_key % block))
            complete = complete & reduce(padded, "B (N C) -> B N", "max", C=block)[:, None, None, :]
            complete = complete & live[:, None, start : start + n_query, None]
        chosen = best_blocks(logits, complete, start, block, self.shape.kv_heads, self.kept)
        tokens = chosen.repeat_interleave(block, dim=-1)[..., :n_key]
        per_head = tokens.repeat_interleave(self.shape.heads // self.shape.kv_heads, dim=1)
        return weighted_values(masked_softmax(logits, complete), means_v), per_head

    def _attended(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B S N K"],
        v: Float[Tensor, "B S N K"],
        position: PositionModule,
        start: int,
        seen: Bool[Tensor, "#B #H T S"],
        branch: int,
    ) -> Float[Tensor, "B T H K"]:
        rotated_q, rotated_k = position.rotate(q, self._branch(k, branch), start)
        bias = position.score_bias(q.shape[1], k.shape[1], start)
        logits = scaled_logits(rotated_q, rotated_k, self.shape.head_dim**-0.5, bias)
        return weighted_values(masked_softmax(logits, seen), self._branch(v, branch))

    def _branch(self, rows: Float[Tensor, "B S N K"], branch: int) -> Float[Tensor, "B S G K"]:
        return rows.chunk(self.parts, dim=2)[branch % self.parts]


@register
@dataclass(frozen=True, kw_only=True)
class NativeSparse(AbstractMixer):
    """Each query reads a summary of every block, the tokens of the few blocks that matter most, and the last tokens.

    Blocks are summarised by their mean and do not overlap, as in the plain form of flash-linear-attention.
    """

    kind: ClassVar[str] = "nsa"
    paper: ClassVar[str] = (
        "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention, Yuan et al. 2025, "
        "arXiv:2502.11089"
    )
    proof: ClassVar[str] = "test_branches_equal_flash_linear_attention"
    reference: ClassVar[str] = "flash-linear-attention naive_nsa_compression, naive_nsa_topk and naive_nsa_selection"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING, Hook.ROTATE, Hook.SCALE, Hook.SCORE_BIAS})
    value_projection: ClassVar[bool] = True

    kv_heads: int = attention.kv_heads_field()
    queries_per_kv: int = attention.queries_per_kv_field()
    head_dim: int = attention.head_dim_field()
    block: int = choice(4, 8, 16, 32, default=8, help="tokens per block")
    kept: int = choice(
        3,
        4,
        6,
        8,
        16,
        default=4,
        help="blocks each query reads token by token: the first, its own, the one before it, "
        "and those whose summaries it weighs most",
    )
    window: int = choice(8, 16, 32, 64, 128, default=16, help="last tokens each query reads, itself included")
    own_kv: bool = choice(
        True,
        False,
        default=True,
        help="whether each of the three branches has keys and values of its own, as published",
    )

    def build(self, dims: Dims) -> MixerModule:
        return NativeSparseModule(
            d_model=dims.d_model,
            shape=self.head_shape(),
            block=self.block,
            kept=self.kept,
            window=self.window,
            own_kv=self.own_kv,
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.kv_heads * self.queries_per_kv, kv_heads=self.kv_heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        """Scores of block means, of the chosen blocks and of the window; `causal` counts visible ones only."""
        shape = self.head_shape()
        parts = BRANCHES if self.own_kv else 1
        projected = attention.projection_flops(dims.d_model, dataclasses.replace(shape, kv_heads=parts * self.kv_heads))
        gates = 2.0 * dims.d_model * BRANCHES * shape.heads
        keys = sum(self._visible(t) for t in range(length)) / length
        if not causal:
            keys = -(-length // self.block) + min(length, self.kept * self.block) + min(length, self.window)
        return projected + gates + attention.score_flops(shape, keys)

    def canonical(self, dims: Dims) -> AbstractMixer:
        """What reaches beyond the longest text is cut there."""
        blocks = max(-(-dims.max_len // self.block), FORCED)
        return dataclasses.replace(self, kept=min(self.kept, blocks), window=min(self.window, dims.max_len))

    def check(self, dims: Dims) -> None:
        if self.block > dims.train_len:
            raise InfeasibleArchitecture(
                f"model.mixer.nsa.block must be at most the training length {dims.train_len}, or no block is ever "
                f"complete; got {self.block}; choose a smaller one"
            )
        if self.kept < FORCED or self.window < 1:
            raise InfeasibleArchitecture(
                f"model.mixer.nsa.kept must be at least {FORCED} (the first block, the query's own, and the one before "
                f"it) and its window at least 1; got {self.kept} and {self.window}; raise them"
            )

    def _visible(self, place: int) -> int:
        """Entries that a query at this place reads in all three branches."""
        own = place // self.block
        chosen = place % self.block + 1 + min(own, self.kept - 1) * self.block
        return (place + 1) // self.block + chosen + min(place + 1, self.window)
