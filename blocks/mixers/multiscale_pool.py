"""Attention over pooled keys: heads see the past at several resolutions, each block only once it is complete."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, reduce
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
    State,
)
from blocks.mixers import heads as attention
from blocks.mixers.projections import appended, join_heads, projections, split_heads
from blocks.ops.alignment import first_live, rolled
from blocks.ops.precision import full_precision
from blocks.ops.scores import masked_softmax, scaled_logits
from blocks.registry import register
from search_space.domains import choice


def block_means(x: Float[Tensor, "B T H K"], alive: Float[Tensor, "B T"], scale: int) -> Float[Tensor, "B N H K"]:
    """The mean over the live tokens of every complete block of `scale` tokens."""
    n_blocks = x.shape[1] // scale
    wide = x[:, : n_blocks * scale].to(alive.dtype) * alive[:, : n_blocks * scale, None, None]
    total = reduce(wide, "B (N C) H K -> B N H K", "sum", C=scale)
    count = reduce(alive[:, : n_blocks * scale], "B (N C) -> B N", "sum", C=scale)
    return (total / count.clamp_min(1)[:, :, None, None]).to(x.dtype)


def with_means(x: Float[Tensor, "B T H K"], means: Float[Tensor, "B N H K"], scale: int) -> Float[Tensor, "B T H K"]:
    """x with the last token of every complete block replaced by the block's mean.

    A token whose block is complete is seen through its mean alone, and the last token of a block never otherwise: one
    row holds both, at the position that the block stands at.
    """
    marked = x.clone()
    marked[:, scale - 1 :: scale] = means
    return marked


def pooled_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H K"],
    alive: Bool[Tensor, "B T"],
    position: PositionModule,
    heads: slice,
    scale: int,
) -> Float[Tensor, "B T H K"]:
    """One group of heads over complete blocks and over the tokens of the unfinished one."""
    batch, length, _, head_dim = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    weight = alive.to(wide)
    mean_v = block_means(v, weight, scale)
    q, k = position.rotate(q, with_means(k, block_means(k, weight, scale), scale))
    bias = position.score_bias(length, length)
    coarse = scaled_logits(
        q, k[:, scale - 1 :: scale], head_dim**-0.5, None if bias is None else bias[heads, :, scale - 1 :: scale]
    )
    complete = torch.arange(1, length + 1, device=q.device)[:, None] // scale
    n_blocks = length // scale
    block_alive = reduce(alive[:, : n_blocks * scale], "B (N C) -> B N", "max", C=scale)
    coarse_seen = (torch.arange(n_blocks, device=q.device) < complete) & block_alive[:, None, None]

    missing = -length % scale
    blocks_q, blocks_k, blocks_v = (
        rearrange(F.pad(x, (0, 0, 0, 0, 0, missing)), "B (N C) H K -> (B N) C H K", C=scale) for x in (q, k, v)
    )
    # The last token of a block is never seen alone.
    blocks_k, blocks_v = blocks_k[:, : scale - 1], blocks_v[:, : scale - 1]
    near = position.score_bias(scale, scale)
    fine = scaled_logits(blocks_q, blocks_k, head_dim**-0.5, None if near is None else near[heads, :, : scale - 1])
    place = torch.arange(scale, device=q.device)
    unfinished = (place[: scale - 1] <= place[:, None]) & (place[:, None] < scale - 1)
    fine_alive = rearrange(F.pad(alive, (0, missing)), "B (N C) -> (B N) C", C=scale)[:, : scale - 1]
    fine_seen = unfinished & fine_alive[:, None, None, :]
    fine, fine_seen = (rearrange(x, "(B N) H C S -> B H (N C) S", B=batch)[:, :, :length] for x in (fine, fine_seen))
    seen = torch.cat([coarse_seen, fine_seen], dim=-1) & alive[:, None, :, None]
    weights = masked_softmax(torch.cat([coarse, fine], dim=-1), seen)
    on_blocks, on_tokens = weights.split([n_blocks, scale - 1], dim=-1)
    on_tokens = rearrange(F.pad(on_tokens, (0, 0, 0, missing)), "B H (N C) S -> (B N) H C S", C=scale)
    with full_precision(q.device):
        mixed = einsum(on_blocks, mean_v.to(wide), "B H T N, B N H V -> B T H V")
        tail = einsum(on_tokens, blocks_v.to(wide), "B H C S, B S H V -> B C H V")
        return (mixed + rearrange(tail, "(B N) C H V -> B (N C) H V", B=batch)[:, :length]).to(v.dtype)


def continued_attention(
    q: Float[Tensor, "B T H K"],
    means: tuple[Float[Tensor, "B N H K"], Float[Tensor, "B N H K"]],
    recent: tuple[Float[Tensor, "B P H K"], Float[Tensor, "B P H K"]],
    position: PositionModule,
    heads: slice,
    scale: int,
    start: int,
) -> tuple[Float[Tensor, "B T H K"], tuple[Tensor, Tensor]]:
    """The same for queries from place `start` on, given the means of the blocks complete before them, and all tokens
    after those blocks. Also the means of the blocks that these tokens complete.
    """
    n_query, n_key = q.shape[1], start + q.shape[1]
    alive = torch.ones(recent[0].shape[:2], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    added = block_means(recent[0], alive, scale), block_means(recent[1], alive, scale)
    first = n_key - recent[0].shape[1]
    complete = torch.arange(1, first // scale + 1, device=q.device) * scale - 1
    places = torch.cat([complete, torch.arange(first, n_key, device=q.device)])
    columns_k, columns_v = (
        torch.cat([old, with_means(new, mean, scale)], dim=1)
        for old, new, mean in zip(means, recent, added, strict=True)
    )
    # A scheme rotates keys of all places in a row, so the columns are spread over it and gathered again.
    spread = torch.zeros(q.shape[0], n_key, *q.shape[2:], dtype=q.dtype, device=q.device)
    rotated_q, rotated_k = position.rotate(q, spread.index_copy(1, places, columns_k), start)
    bias = position.score_bias(n_query, n_key, start)
    chosen_bias = None if bias is None else bias[heads][:, :, places]
    logits = scaled_logits(rotated_q, rotated_k[:, places], q.shape[3] ** -0.5, chosen_bias)
    query = torch.arange(start, n_key, device=q.device)[:, None]
    in_view = (places % scale == scale - 1) | (places >= (query + 1) // scale * scale)
    weights = masked_softmax(logits, (places <= query) & in_view)
    with full_precision(q.device):
        mixed = einsum(weights, columns_v.to(weights.dtype), "B H T S, B S H V -> B T H V")
    return mixed.to(q.dtype), added


class MultiscalePoolModule(MixerModule):
    """Group g of heads reads keys and values averaged over blocks of ratio^g tokens."""

    def __init__(self, *, d_model: int, shape: HeadShape, scales: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.scales = shape, scales
        self.group = shape.heads // len(scales)
        self.query, self.key, self.value, self.out = projections(d_model, shape)
        self.backends = {"attention": "reference (not sdpa: keys are pooled by block)"}

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        if context.live is None:
            return self._whole(x, position, torch.ones(x.shape[:2], dtype=torch.bool, device=x.device))
        shift = first_live(context.live)
        return rolled(self._whole(rolled(x, shift), position, rolled(context.live, shift)), -shift)

    def _whole(
        self, x: Float[Tensor, "B T D"], position: PositionModule, alive: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T D"]:
        q, k, v = split_heads(self, x, self.shape)
        mixed = [
            pooled_attention(q[:, :, heads], k[:, :, heads], v[:, :, heads], alive, position, heads, scale)
            for heads, scale in self._groups()
        ]
        return join_heads(self, torch.cat(mixed, dim=2))

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        state: State = {}
        for scale in self.scales:
            for name in ("k", "v"):
                for part, rows in (("means", 0), ("recent", scale - 1)):
                    shape = (batch, rows, self.group, self.shape.head_dim)
                    state[f"{scale}.{part}_{name}"] = torch.zeros(shape, device=device, dtype=dtype)
        return state

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        q, k, v = split_heads(self, x, self.shape)
        mixed, following = [], State()
        for heads, scale in self._groups():
            unused = scale - 1 - start % scale
            old = {name: state[f"{scale}.{name}"].to(k.dtype) for name in ("means_k", "means_v")}
            recent = [
                torch.cat([state[f"{scale}.recent_{name}"].to(new.dtype), new[:, :, heads]], dim=1)
                for name, new in (("k", k), ("v", v))
            ]
            visible = recent[0][:, unused:], recent[1][:, unused:]
            y, added = continued_attention(
                q[:, :, heads], (old["means_k"], old["means_v"]), visible, position, heads, scale, start
            )
            mixed.append(y)
            for name, rows, mean in zip(("k", "v"), recent, added, strict=True):
                kept = state[f"{scale}.recent_{name}"]
                following[f"{scale}.recent_{name}"] = rows[:, rows.shape[1] - (scale - 1) :].to(kept.dtype)
                following[f"{scale}.means_{name}"] = appended(state[f"{scale}.means_{name}"], mean)
        return join_heads(self, torch.cat(mixed, dim=2)), following

    def _groups(self) -> list[tuple[slice, int]]:
        return [(slice(g * self.group, (g + 1) * self.group), scale) for g, scale in enumerate(self.scales)]


@register
@dataclass(frozen=True, kw_only=True)
class MultiscalePool(AbstractMixer):
    """Some heads see every token, others averages of blocks: the far past in outline, at a fraction of the cache."""

    kind: ClassVar[str] = "multiscale_pool"
    paper: ClassVar[str] = (
        "Funnel-Transformer: Filtering out Sequential Redundancy for Efficient Language Processing, Dai et al. 2020, "
        "arXiv:2006.03236"
    )
    proof: ClassVar[str] = "test_pooled_attention_equals_its_definition"
    reference: ClassVar[str] = "its definition, token by token in the test"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING, Hook.ROTATE, Hook.SCALE, Hook.SCORE_BIAS})
    """A block stands at the position of its last token; its keys are averaged before they are rotated."""
    value_projection: ClassVar[bool] = True

    heads: int = choice(4, 8, default=4, help="heads, divided evenly over the resolutions")
    head_dim: int = attention.head_dim_field()
    levels: int = choice(2, 4, default=2, help="resolutions; level g averages over ratio^g tokens")
    ratio: int = choice(2, 4, 8, default=4, help="tokens averaged at the second level, and the factor between levels")

    def build(self, dims: Dims) -> MixerModule:
        scales = tuple(self.ratio**level for level in range(self.levels))
        return MultiscalePoolModule(d_model=dims.d_model, shape=self.head_shape(), scales=scales)

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.heads, kv_heads=self.heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        """Scores of complete blocks and of the unfinished one; `causal` counts visible ones only."""
        keys = 0.0
        for scale in (self.ratio**level for level in range(self.levels)):
            visible = sum((t + 1) // scale + (t + 1) % scale for t in range(length)) / length
            keys += (visible if causal else float(length // scale + scale - 1)) / self.levels
        shape = self.head_shape()
        return attention.projection_flops(dims.d_model, shape) + attention.score_flops(shape, keys)

    def check(self, dims: Dims) -> None:
        if self.heads % self.levels:
            raise InfeasibleArchitecture(
                f"model.mixer.multiscale_pool.heads must be a multiple of its levels; got {self.heads} heads and "
                f"{self.levels} levels; choose {self.levels * (self.heads // self.levels + 1)} heads"
            )
