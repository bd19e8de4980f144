"""Multi-head latent attention: keys and values of all heads are read from one small vector per token."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import (
    AbstractMixer,
    Context,
    Dims,
    HeadShape,
    Hook,
    MixerModule,
    PositionModule,
    Role,
    State,
    linear,
    mark,
)
from blocks.mixers import heads as attention
from blocks.mixers.projections import appended
from blocks.ops.attention import AttentionNeeds, choose_attention, visible_keys
from blocks.ops.precision import full_precision
from blocks.ops.scores import masked_softmax
from blocks.registry import register
from search_space.domains import choice


class MlaModule(MixerModule):
    """Latent attention (DeepSeek-V2, eqs. 9-19, queries uncompressed): expanded in training, absorbed in decoding.

    Positions act on `rope_dim` further channels of queries and of one key that all heads share. The latent is
    normalised, as in the published models.
    """

    def __init__(self, *, d_model: int, n_heads: int, head_dim: int, latent: int, rope_dim: int) -> None:
        super().__init__()
        self.n_heads, self.head_dim, self.rope_dim = n_heads, head_dim, rope_dim
        self.query = linear(d_model, n_heads * head_dim, Role.QUERY)
        self.rotated_query = linear(d_model, n_heads * rope_dim, Role.QUERY)
        self.rotated_key = linear(d_model, rope_dim, Role.KEY)
        self.latent = linear(d_model, latent, Role.VALUE)
        self.latent_norm = nn.RMSNorm(latent, eps=1e-6)
        mark(self.latent_norm.weight, Role.GAIN)
        self.key = linear(latent, n_heads * head_dim, Role.KEY)
        self.value = linear(latent, n_heads * head_dim, Role.VALUE)
        self.out = linear(n_heads * head_dim, d_model, Role.MIXER_OUT)
        self.scale = (head_dim + rope_dim) ** -0.5
        chosen = choose_attention(AttentionNeeds())
        self.attend = chosen.run
        self.backends = {"attention": chosen.record}

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        q, rotated_q = self._queries(x)
        latent, shared_k = self._compressed(x)
        rotated_q, rotated_k = position.rotate(rotated_q, shared_k)
        k, v = (rearrange(expand(latent), "B T (H K) -> B T H K", K=self.head_dim) for expand in (self.key, self.value))
        keys = torch.cat([k, repeat(rotated_k, "B T 1 K -> B T H K", H=self.n_heads).to(k.dtype)], dim=-1)
        mixed = self.attend(
            torch.cat([q, rotated_q.to(q.dtype)], dim=-1),
            keys,
            v,
            scale=self.scale,
            bias=position.score_bias(x.shape[1], x.shape[1]),
            live=context.live,
        )
        return self.out(rearrange(mixed, "B T H V -> B T (H V)"))

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        return {
            "latent": torch.zeros(batch, 0, self.latent.out_features, device=device, dtype=dtype),
            "shared_k": torch.zeros(batch, 0, 1, self.rope_dim, device=device, dtype=dtype),
        }

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        q, rotated_q = self._queries(x)
        latent, shared_k = self._compressed(x)
        kept = {"latent": appended(state["latent"], latent), "shared_k": appended(state["shared_k"], shared_k)}
        rotated_q, rotated_k = position.rotate(rotated_q, kept["shared_k"].to(q.dtype), start)
        bias = position.score_bias(x.shape[1], start + x.shape[1], start)
        return self._absorbed(q, rotated_q, kept["latent"], rotated_k, bias).to(x.dtype), kept

    def _absorbed(
        self,
        q: Float[Tensor, "B T H K"],
        rotated_q: Float[Tensor, "B T H P"],
        latent: Float[Tensor, "B S C"],
        rotated_k: Float[Tensor, "B S 1 P"],
        bias: Float[Tensor, "H T S"] | None,
    ) -> Float[Tensor, "B T D"]:
        """Attention over the latents themselves: W_UK moves into the query, W_UV behind the weighted sum."""
        wide = torch.promote_types(q.dtype, torch.float32)
        up_k, up_v = (
            rearrange(weight.to(wide), "(H K) C -> H K C", K=self.head_dim)
            for weight in (self.key.weight, self.value.weight)
        )
        with full_precision(q.device):
            latent = latent.to(wide)
            inward = einsum(q.to(wide), up_k, "B T H K, H K C -> B T H C")
            logits = einsum(inward, latent, "B T H C, B S C -> B H T S")
            logits = logits + einsum(rotated_q.to(wide), rotated_k[:, :, 0].to(wide), "B T H P, B S P -> B H T S")
            logits = logits * self.scale if bias is None else logits * self.scale + bias.to(wide)
            weights = masked_softmax(logits, visible_keys(q.shape[1], latent.shape[1], None, None, q.device))
            mixed = einsum(weights, latent, "B H T S, B S C -> B T H C")
            mixed = einsum(mixed, up_v, "B T H C, H V C -> B T H V")
        return self.out(rearrange(mixed, "B T H V -> B T (H V)").to(q.dtype))

    def _queries(self, x: Float[Tensor, "B T D"]) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T H P"]]:
        return (
            rearrange(self.query(x), "B T (H K) -> B T H K", K=self.head_dim),
            rearrange(self.rotated_query(x), "B T (H P) -> B T H P", P=self.rope_dim),
        )

    def _compressed(self, x: Float[Tensor, "B T D"]) -> tuple[Float[Tensor, "B T C"], Float[Tensor, "B T 1 P"]]:
        latent = self.latent(x)
        wide = torch.promote_types(latent.dtype, torch.float32)
        normed = nn.functional.rms_norm(
            latent.to(wide), self.latent_norm.normalized_shape, self.latent_norm.weight.to(wide), self.latent_norm.eps
        )
        return normed.to(latent.dtype), self.rotated_key(x)[:, :, None]


@register
@dataclass(frozen=True, kw_only=True)
class Mla(AbstractMixer):
    """Softmax attention whose decode cache is one small latent and one short rotated key per token, for all heads."""

    kind: ClassVar[str] = "mla"
    paper: ClassVar[str] = (
        "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model, DeepSeek-AI 2024, "
        "section 2.1, arXiv:2405.04434"
    )
    proof: ClassVar[str] = "test_latent_attention_equals_deepseek_v3"
    reference: ClassVar[str] = "transformers DeepseekV3Attention"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING, Hook.ROTATE, Hook.SCALE, Hook.SCORE_BIAS})
    """Rotation and scaling reach the decoupled channels alone: on the latent they would forbid absorption."""
    weighs_values: ClassVar[bool] = True
    absorbs: ClassVar[frozenset[Role]] = frozenset({Role.KEY, Role.VALUE})

    heads: int = choice(1, 2, 4, 8, default=4, help="query heads; the cache does not grow with them")
    head_dim: int = attention.head_dim_field()
    latent: int = choice(
        16, 32, 64, 128, default=64, help="channels of the vector that keys and values of all heads are read from"
    )
    rope_dim: int = choice(
        8, 16, 32, default=16, help="further channels of queries and of one shared key, the only ones that are rotated"
    )

    def build(self, dims: Dims) -> MixerModule:
        return MlaModule(
            d_model=dims.d_model,
            n_heads=self.heads,
            head_dim=self.head_dim,
            latent=self.latent,
            rope_dim=self.rope_dim,
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.heads, kv_heads=1, head_dim=self.rope_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        keys = attention.mean_visible(length, length) if causal else float(length)
        inner = self.heads * self.head_dim
        into = dims.d_model * (inner + self.heads * self.rope_dim + self.latent + self.rope_dim)
        expanded, out = 2 * self.latent * inner, inner * dims.d_model
        scores = self.heads * (2 * self.head_dim + self.rope_dim) * keys
        return 2.0 * (into + expanded + out + scores)
