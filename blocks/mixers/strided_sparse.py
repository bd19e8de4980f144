"""Sparse attention in two patterns: half of the heads see what is near, the others every so many tokens."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from blocks.families import AbstractMixer, Dims, HeadShape, Hook, MixerModule
from blocks.mixers import heads as attention
from blocks.mixers.projections import Scene, Weigh, WeighedAttention
from blocks.ops.attention import visible_keys
from blocks.ops.scores import masked_softmax, scaled_logits
from blocks.registry import register
from search_space.domains import choice


def sparse_pattern(n_query: int, n_key: int, stride: int, form: str, device: torch.device) -> Bool[Tensor, "2 T S"]:
    """What the near heads and the far heads see among the keys before and at each query, which always sees itself.

    strided (Child et al. 2019, section 4.3): the last `stride` tokens; every `stride`-th token counted back.
    fixed: the query's own block of `stride` tokens; the last token of every block.
    """
    query = torch.arange(n_key - n_query, n_key, device=device)[:, None]
    key = torch.arange(n_key, device=device)[None, :]
    if form == "strided":
        near, far = key > query - stride, (query - key) % stride == 0
    else:
        near, far = key // stride == query // stride, ((key + 1) % stride == 0) | (key == query)
    return torch.stack([near & (key <= query), far & (key <= query)])


def sparse_rule(stride: int, form: str) -> Weigh:
    """Softmax over one pattern in the even heads, over the other in the odd ones."""

    def weigh(scene: Scene) -> Float[Tensor, "B H T S"]:
        logits = scaled_logits(scene.q, scene.k, scene.scale, scene.bias)
        n_heads, n_query, n_key = logits.shape[1:]
        pattern = sparse_pattern(n_query, n_key, stride, form, logits.device).repeat(n_heads // 2, 1, 1)
        return masked_softmax(logits, visible_keys(n_query, n_key, None, scene.live, logits.device) & pattern)

    return weigh


@register
@dataclass(frozen=True, kw_only=True)
class StridedSparse(AbstractMixer):
    """Even heads see the near tokens, odd heads one in every `stride`: two layers reach every earlier token."""

    kind: ClassVar[str] = "strided_sparse"
    paper: ClassVar[str] = "Generating Long Sequences with Sparse Transformers, Child et al. 2019, arXiv:1904.10509"
    proof: ClassVar[str] = "test_sparse_attention_is_softmax_under_its_pattern"
    reference: ClassVar[str] = "softmax attention under a dense mask"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING, Hook.ROTATE, Hook.SCALE, Hook.SCORE_BIAS})
    value_projection: ClassVar[bool] = True

    kv_heads: int = choice(2, 4, 8, default=4, help="key/value heads; an even number, half of them for each pattern")
    queries_per_kv: int = attention.queries_per_kv_field()
    head_dim: int = attention.head_dim_field()
    stride: int = choice(4, 8, 16, 32, default=8, help="distance of the far tokens; the root of the length is cheapest")
    form: str = choice(
        "strided",
        "fixed",
        default="strided",
        help="far tokens: strided counts back from the query; fixed takes the last token of every block",
    )

    def build(self, dims: Dims) -> MixerModule:
        return WeighedAttention(
            d_model=dims.d_model,
            shape=self.head_shape(),
            weigh=sparse_rule(self.stride, self.form),
            reason="heads differ in what they see",
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.kv_heads * self.queries_per_kv, kv_heads=self.kv_heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        """Scores of the pattern alone; `causal` averages over the sequence, otherwise its last token counts."""
        shape = self.head_shape()
        places = range(length) if causal else range(length - 1, length)
        near = sum(min(t + 1, self.stride) if self.form == "strided" else t % self.stride + 1 for t in places)
        far = sum(t // self.stride + 1 for t in places)
        if self.form == "fixed":
            far = sum((t + 1) // self.stride + (0 if (t + 1) % self.stride == 0 else 1) for t in places)
        keys = (near + far) / 2 / len(places)
        return attention.projection_flops(dims.d_model, shape) + attention.score_flops(shape, keys)

    def canonical(self, dims: Dims) -> AbstractMixer:
        """From the longest length on, the near heads see all and the far heads themselves, whatever the form."""
        if self.stride < dims.max_len:
            return self
        return dataclasses.replace(self, stride=dims.max_len, form="strided")
