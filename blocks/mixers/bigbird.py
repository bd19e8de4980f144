"""Block-sparse attention: neighbouring blocks, a few first blocks, and a few random ones."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import BOTH_DIRECTIONS, AbstractMixer, Dims, Direction, HeadShape, Hook, MixerModule
from blocks.mixers import heads as attention
from blocks.mixers.projections import Scene, WeighedAttention
from blocks.mixers.softmax import Softmax
from blocks.ops.attention import visible_keys
from blocks.ops.patterns import blocks_in_view, random_blocks
from blocks.ops.scores import masked_softmax, scaled_logits
from blocks.registry import register
from search_space.domains import choice


class BigBirdRule(nn.Module):
    """Softmax over the blocks in view of each query; the random ones are drawn per head, once and for all."""

    def __init__(self, *, n_blocks: int, block: int, drawn: int, n_global: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.block, self.n_global, self.causal = block, n_global, causal
        table = torch.tensor(random_blocks(n_blocks, drawn, heads, n_global, causal))
        self.register_buffer("table", table, persistent=False)

    def forward(self, scene: Scene) -> Float[Tensor, "B H T S"]:
        n_query, n_key = scene.q.shape[1], scene.k.shape[1]
        table = self.get_buffer("table")
        in_view = blocks_in_view(table, n_query, n_key, self.block, self.n_global, self.causal)
        seen = visible_keys(n_query, n_key, None, scene.live, scene.q.device, causal=self.causal)
        return masked_softmax(scaled_logits(scene.q, scene.k, scene.scale, scene.bias), seen & in_view)


@register
@dataclass(frozen=True, kw_only=True)
class BigBird(AbstractMixer):
    """Blocks of tokens attend to their neighbours, to the first blocks, and to a few blocks drawn at random per head.

    In a decoder nothing after the query is seen; there the first blocks are seen by all, and see what lies before.
    """

    kind: ClassVar[str] = "bigbird"
    paper: ClassVar[str] = "Big Bird: Transformers for Longer Sequences, Zaheer et al. 2020, arXiv:2007.14062"
    proof: ClassVar[str] = "test_bigbird_equals_transformers_under_their_draw"
    reference: ClassVar[str] = "transformers BigBirdBlockSparseAttention"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING, Hook.ROTATE, Hook.SCALE, Hook.SCORE_BIAS})
    directions: ClassVar[frozenset[Direction]] = BOTH_DIRECTIONS
    value_projection: ClassVar[bool] = True

    kv_heads: int = attention.kv_heads_field()
    queries_per_kv: int = attention.queries_per_kv_field()
    head_dim: int = attention.head_dim_field()
    block: int = choice(4, 8, 16, 32, 64, default=8, help="tokens per block")
    first: int = choice(1, 2, default=1, help="blocks at the start of the text that every token sees")
    drawn: int = choice(1, 2, 3, default=1, help="random blocks each block sees beside its neighbours, per head")

    def build(self, dims: Dims) -> MixerModule:
        rule = BigBirdRule(
            n_blocks=self._blocks(dims.max_len),
            block=self.block,
            drawn=self.drawn,
            n_global=self.first,
            heads=self.kv_heads * self.queries_per_kv,
            causal=dims.direction == Direction.CAUSAL,
        )
        return WeighedAttention(
            d_model=dims.d_model, shape=self.head_shape(), weigh=rule, reason="heads differ in what they see"
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.kv_heads * self.queries_per_kv, kv_heads=self.kv_heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        """Scores of the blocks in view; `causal` counts visible tokens only."""
        shape = self.head_shape()
        keys = sum(self._visible(t) for t in range(length)) / length
        if not causal:
            near = 2 if dims.direction == Direction.CAUSAL else 3
            keys = float(min(length, (near + self.first + self.drawn) * self.block))
        return attention.projection_flops(dims.d_model, shape) + attention.score_flops(shape, keys)

    def canonical(self, dims: Dims) -> AbstractMixer:
        """Where no block is left out this is plain attention."""
        if self._blocks(dims.max_len) - 2 - self.first > self.drawn:
            return self
        return Softmax(kv_heads=self.kv_heads, queries_per_kv=self.queries_per_kv, head_dim=self.head_dim)

    def _blocks(self, length: int) -> int:
        return -(-length // self.block)

    def _visible(self, place: int) -> int:
        """Keys that a causal query at this place sees."""
        own = place // self.block
        before = min(own, 1) + min(self.first, max(own - 1, 0)) + min(self.drawn, max(own - 1 - self.first, 0))
        return place % self.block + 1 + before * self.block
