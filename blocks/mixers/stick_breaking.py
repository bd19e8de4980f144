"""Stick-breaking attention: from the nearest key back, each key takes a share of the weight that is left."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from blocks.families import AbstractMixer, Dims, HeadShape, Hook, MixerModule
from blocks.mixers import heads as attention
from blocks.mixers.projections import Scene, Weigh, WeighedAttention
from blocks.ops.attention import visible_keys
from blocks.ops.running_sum import running_sum
from blocks.ops.scores import scaled_logits
from blocks.registry import register
from search_space.domains import choice


def sum_of_later(x: Float[Tensor, "B H T S"]) -> Float[Tensor, "B H T S"]:
    """For every key the sum over the keys after it, free of a difference of long sums."""
    reversed_rows = F.pad(x.flip(-1)[..., :-1], (1, 0)).flatten(0, 2)
    return running_sum(reversed_rows).reshape(x.shape).flip(-1)


def stick_breaking_rule(itself: bool) -> Weigh:
    """Weights logistic(z_ij) times the product of 1 - logistic(z_il) over the visible keys l after j (eq. 5)."""

    def weigh(scene: Scene) -> Float[Tensor, "B H T S"]:
        logits = scaled_logits(scene.q, scene.k, scene.scale, scene.bias)
        n_query, n_key = logits.shape[2:]
        seen = visible_keys(n_query, n_key, None, scene.live, logits.device, segments=scene.segments)
        if not itself:
            own = torch.eye(n_query, dtype=torch.bool, device=logits.device)
            seen = seen & ~F.pad(own, (n_key - n_query, 0))
        left = sum_of_later(F.logsigmoid(-logits).masked_fill(~seen, 0.0))
        return torch.exp(F.logsigmoid(logits) + left).masked_fill(~seen, 0.0)

    return weigh


@register
@dataclass(frozen=True, kw_only=True)
class StickBreaking(AbstractMixer):
    """Each key, nearest first, takes a share of the weight left to it: recent tokens win, and order needs no positions.

    Weights of a row sum to at most one, and the first token of a text sees nothing unless tokens see themselves.
    """

    kind: ClassVar[str] = "stick_breaking"
    paper: ClassVar[str] = "Scaling Stick-Breaking Attention, Tan et al. 2024, arXiv:2410.17980"
    proof: ClassVar[str] = "test_stick_breaking_equals_flash_linear_attention"
    reference: ClassVar[str] = "flash-linear-attention naive_stickbreaking_attn"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING, Hook.ROTATE, Hook.SCALE, Hook.SCORE_BIAS})
    packs: ClassVar[bool] = True
    value_projection: ClassVar[bool] = True

    kv_heads: int = attention.kv_heads_field()
    queries_per_kv: int = attention.queries_per_kv_field()
    head_dim: int = attention.head_dim_field()
    itself: bool = choice(
        False, True, default=False, help="whether a token takes a share for itself first; as published it does not"
    )

    def build(self, dims: Dims) -> MixerModule:
        return WeighedAttention(
            d_model=dims.d_model,
            shape=self.head_shape(),
            weigh=stick_breaking_rule(self.itself),
            reason="its weights are not a softmax",
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.kv_heads * self.queries_per_kv, kv_heads=self.kv_heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        """Without itself a token sees one key less, which is still scored."""
        keys = attention.mean_visible(length, length) if causal else float(length)
        shape = self.head_shape()
        return attention.projection_flops(dims.d_model, shape) + attention.score_flops(shape, keys)
