"""Attention within blocks of tokens: each sees itself and the blocks before it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from blocks.families import AbstractMixer, Context, Dims, HeadShape, Hook, MixerModule, PositionModule, State
from blocks.mixers import heads as attention
from blocks.mixers.projections import join_heads, projections, split_heads
from blocks.mixers.softmax import Softmax
from blocks.ops.alignment import first_live, rolled
from blocks.ops.attention import AttentionNeeds, choose_attention, visible_keys, weighted_values
from blocks.ops.scores import masked_softmax, scaled_logits
from blocks.registry import register
from search_space.domains import choice


def with_earlier_blocks(x: Shaped[Tensor, "B N C *A"], earlier: int) -> Shaped[Tensor, "B N P *A"]:
    """Each block behind the `earlier` ones before it; zeros where the sequence has not begun."""
    shifted = [
        torch.cat([torch.zeros_like(x[:, :back]), x[:, : x.shape[1] - back]], dim=1) for back in range(earlier, 0, -1)
    ]
    return torch.cat([*shifted, x], dim=2)


class BlockLocalModule(MixerModule):
    """Causal softmax attention of each block over itself and `earlier` blocks before it."""

    def __init__(self, *, d_model: int, shape: HeadShape, block: int, earlier: int) -> None:
        super().__init__()
        self.shape, self.block, self.earlier = shape, block, earlier
        self.query, self.key, self.value, self.out = projections(d_model, shape)
        self.scale = shape.head_dim**-0.5
        chosen = choose_attention(AttentionNeeds())
        self.attend = chosen.run
        self.backends = {"attention": chosen.record}

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        if context.live is None:
            return self._blockwise(x, position, None)
        shift = first_live(context.live)
        return rolled(self._blockwise(rolled(x, shift), position, rolled(context.live, shift)), -shift)

    def _blockwise(
        self, x: Float[Tensor, "B T D"], position: PositionModule, live: Bool[Tensor, "B T"] | None
    ) -> Float[Tensor, "B T D"]:
        batch, length = x.shape[:2]
        block, earlier = self.block, min(self.earlier, (length - 1) // self.block)
        missing = -length % block
        alive = torch.ones(batch, length, dtype=torch.bool, device=x.device) if live is None else live
        alive = rearrange(F.pad(alive, (0, missing)), "B (N C) -> B N C", C=block)
        q, k, v = split_heads(self, x, self.shape)
        q, k = position.rotate(q, k)
        q, k, v = (
            rearrange(F.pad(y, (0, 0, 0, 0, 0, missing)), "B (N C) H K -> B N C H K", C=block) for y in (q, k, v)
        )
        k, v, seen = (with_earlier_blocks(y, earlier).flatten(0, 1) for y in (k, v, alive))
        # Positions bias by distance, so that one bias serves every block.
        bias = position.score_bias(block, (earlier + 1) * block, earlier * block)
        mixed = self.attend(q.flatten(0, 1), k, v, scale=self.scale, bias=bias, live=seen)
        return join_heads(self, rearrange(mixed, "(B N) C H V -> B (N C) H V", B=batch)[:, :length])

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        shape = (batch, self._kept(), self.shape.kv_heads, self.shape.head_dim)
        return {name: torch.zeros(shape, device=device, dtype=dtype) for name in ("k", "v")}

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        q, k, v = split_heads(self, x, self.shape)
        joined = {name: torch.cat([state[name], new.to(state[name].dtype)], 1) for name, new in (("k", k), ("v", v))}
        unused = max(self._kept() - start, 0)
        keys, values = joined["k"][:, unused:].to(k.dtype), joined["v"][:, unused:].to(v.dtype)
        n_query, n_key = x.shape[1], keys.shape[1]
        first = start + n_query - n_key
        rotated_q, rotated_k = position.rotate(q, keys, n_key - n_query)
        logits = scaled_logits(rotated_q, rotated_k, self.scale, position.score_bias(n_query, n_key, n_key - n_query))
        key_block = torch.arange(first, first + n_key, device=x.device) // self.block
        near = key_block >= key_block[n_key - n_query :, None] - self.earlier
        weights = masked_softmax(logits, visible_keys(n_query, n_key, None, None, x.device) & near)
        kept = {name: rows[:, rows.shape[1] - self._kept() :] for name, rows in joined.items()}
        return join_heads(self, weighted_values(weights, values)), kept

    def _kept(self) -> int:
        """Tokens before it that the last token of a block sees."""
        return (self.earlier + 1) * self.block - 1


@register
@dataclass(frozen=True, kw_only=True)
class BlockLocal(AbstractMixer):
    """Text is cut into blocks; each token attends within its block and the blocks just before: linear in length."""

    kind: ClassVar[str] = "block_local"
    paper: ClassVar[str] = "Image Transformer, Parmar et al. 2018, section 3.3, arXiv:1802.05751"
    proof: ClassVar[str] = "test_blocks_equal_attention_under_a_dense_mask"
    reference: ClassVar[str] = "softmax attention under a dense mask"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING, Hook.ROTATE, Hook.SCALE, Hook.SCORE_BIAS})
    value_projection: ClassVar[bool] = True

    kv_heads: int = attention.kv_heads_field()
    queries_per_kv: int = attention.queries_per_kv_field()
    head_dim: int = attention.head_dim_field()
    block: int = choice(8, 16, 32, 64, 128, default=16, help="tokens per block")
    earlier: int = choice(0, 1, 2, default=1, help="blocks before its own that a token sees; 0 keeps blocks apart")

    def reach(self) -> int | None:
        return (self.earlier + 1) * self.block

    def build(self, dims: Dims) -> MixerModule:
        return BlockLocalModule(d_model=dims.d_model, shape=self.head_shape(), block=self.block, earlier=self.earlier)

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.kv_heads * self.queries_per_kv, kv_heads=self.kv_heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        """Scores within the blocks in view; `causal` counts visible tokens only."""
        shape = self.head_shape()
        reach = (self.earlier + 1) * self.block
        earlier = self.earlier * self.block
        visible = sum(t % self.block + 1 + min(t - t % self.block, earlier) for t in range(length)) / length
        keys = visible if causal else float(min(reach, length))
        return attention.projection_flops(dims.d_model, shape) + attention.score_flops(shape, keys)

    def canonical(self, dims: Dims) -> AbstractMixer:
        if (self.earlier + 1) * self.block < dims.max_len:
            return self
        return Softmax(kv_heads=self.kv_heads, queries_per_kv=self.queries_per_kv, head_dim=self.head_dim)
