"""Mixture of block attention: each query picks the blocks of keys it attends to, by their mean key."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import reduce
from jaxtyping import Bool, Float
from torch import Tensor

from blocks.families import AbstractMixer, Dims, HeadShape, Hook, MixerModule
from blocks.mixers import heads as attention
from blocks.mixers.projections import Scene, Weigh, WeighedAttention
from blocks.mixers.softmax import Softmax
from blocks.ops.attention import visible_keys
from blocks.ops.scores import masked_softmax, scaled_logits
from blocks.registry import register
from search_space.domains import choice


def mean_keys(k: Float[Tensor, "B S G K"], live: Bool[Tensor, "B S"] | None, block: int) -> Float[Tensor, "B N G K"]:
    """The mean of the live keys of each block of tokens; the last block may be short."""
    wide = k.to(torch.promote_types(k.dtype, torch.float32))
    alive = torch.ones_like(wide[:, :, 0, 0]) if live is None else live.to(wide.dtype)
    missing = -k.shape[1] % block
    padded = F.pad(wide * alive[:, :, None, None], (0, 0, 0, 0, 0, missing))
    total = reduce(padded, "B (N C) G K -> B N G K", "sum", C=block)
    count = reduce(F.pad(alive, (0, missing)), "B (N C) -> B N", "sum", C=block)
    return total / count.clamp_min(1)[:, :, None, None]


def chosen_blocks(
    q: Float[Tensor, "B T H K"], means: Float[Tensor, "B N G K"], first: int, block: int, blocks: int
) -> Bool[Tensor, "B H T N"]:
    """The block of the query itself and the `blocks` - 1 earlier ones whose mean key it matches best.

    The first query stands at place `first` of its sequence.
    """
    affinity = scaled_logits(q, means, 1.0).detach()
    own = torch.arange(first, first + q.shape[1], device=q.device)[:, None] // block
    place = torch.arange(means.shape[1], device=q.device)[None, :]
    affinity = affinity.masked_fill(place > own, -float("inf")).masked_fill(place == own, float("inf"))
    best = affinity.topk(min(blocks, means.shape[1]), dim=-1).indices
    return torch.zeros_like(affinity, dtype=torch.bool).scatter(-1, best, True) & (place <= own)


def moba_rule(block: int, blocks: int) -> Weigh:
    """Softmax over the tokens of the chosen blocks; the choice passes no gradient (Lu et al. 2025, section 2.2)."""

    def weigh(scene: Scene) -> Float[Tensor, "B H T S"]:
        n_query, n_key = scene.q.shape[1], scene.k.shape[1]
        chosen = chosen_blocks(scene.q, mean_keys(scene.k, scene.live, block), n_key - n_query, block, blocks)
        tokens = chosen.repeat_interleave(block, dim=-1)[..., :n_key]
        seen = visible_keys(n_query, n_key, None, scene.live, scene.q.device)
        return masked_softmax(scaled_logits(scene.q, scene.k, scene.scale, scene.bias), seen & tokens)

    return weigh


@register
@dataclass(frozen=True, kw_only=True)
class Moba(AbstractMixer):
    """Each query attends to its own block of tokens and to the few earlier blocks whose mean key suits it best."""

    kind: ClassVar[str] = "moba"
    paper: ClassVar[str] = "MoBA: Mixture of Block Attention for Long-Context LLMs, Lu et al. 2025, arXiv:2502.13189"
    proof: ClassVar[str] = "test_moba_chooses_the_best_blocks_and_its_own"
    reference: ClassVar[str] = "a dense mask over blocks ranked one by one"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING, Hook.ROTATE, Hook.SCALE, Hook.SCORE_BIAS})
    """The choice of blocks goes by rotated keys and not by biases."""
    value_projection: ClassVar[bool] = True

    kv_heads: int = attention.kv_heads_field()
    queries_per_kv: int = attention.queries_per_kv_field()
    head_dim: int = attention.head_dim_field()
    block: int = choice(4, 8, 16, 32, 64, default=8, help="tokens per block")
    blocks: int = choice(2, 3, 4, 8, default=3, help="blocks each query sees, its own included")

    def build(self, dims: Dims) -> MixerModule:
        return WeighedAttention(
            d_model=dims.d_model,
            shape=self.head_shape(),
            weigh=moba_rule(self.block, self.blocks),
            reason="each query chooses its blocks",
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.kv_heads * self.queries_per_kv, kv_heads=self.kv_heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        """Scores of the chosen blocks, and of every block's mean; `causal` counts visible tokens and blocks only."""
        shape = self.head_shape()
        places = range(length) if causal else range(length - 1, length)
        full = (self.blocks - 1) * self.block
        keys = sum(t % self.block + 1 + min(t - t % self.block, full) for t in places) / len(places)
        means = sum(t // self.block + 1 for t in places) / len(places)
        choosing = 2.0 * shape.heads * shape.head_dim * means
        return attention.projection_flops(dims.d_model, shape) + attention.score_flops(shape, keys) + choosing

    def canonical(self, dims: Dims) -> AbstractMixer:
        if self.block * self.blocks < dims.max_len:
            return self
        return Softmax(kv_heads=self.kv_heads, queries_per_kv=self.queries_per_kv, head_dim=self.head_dim)
