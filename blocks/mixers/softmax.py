"""Softmax attention over all earlier tokens, with grouped key/value heads."""

from dataclasses import dataclass
from typing import ClassVar

from blocks.families import BOTH_DIRECTIONS, AbstractMixer, Dims, Direction, HeadShape, Hook, MixerModule
from blocks.mixers import attention_options, heads
from blocks.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Softmax(AbstractMixer):
    """Every token attends to all earlier ones by softmax; kv_heads below the query heads shrink the decode cache."""

    kind: ClassVar[str] = "softmax"
    paper: ClassVar[str] = (
        "Attention Is All You Need, Vaswani et al. 2017, arXiv:1706.03762; GQA: Training Generalized Multi-Query "
        "Transformer Models from Multi-Head Checkpoints, Ainslie et al. 2023, arXiv:2305.13245; Query-Key "
        "Normalization for Transformers, Henry et al. 2020, arXiv:2010.04245"
    )
    proof: ClassVar[str] = "test_softmax_equals_torch_multihead_attention"
    reference: ClassVar[str] = "torch nn.MultiheadAttention"
    offers: ClassVar[frozenset[Hook]] = frozenset(Hook)
    directions: ClassVar[frozenset[Direction]] = BOTH_DIRECTIONS
    packs: ClassVar[bool] = True
    takes_prefix: ClassVar[bool] = True
    value_projection: ClassVar[bool] = True

    kv_heads: int = heads.kv_heads_field()
    queries_per_kv: int = heads.queries_per_kv_field()
    head_dim: int = heads.head_dim_field()
    qk_norm: str = heads.qk_norm_field()
    attention_dropout: float = heads.attention_dropout_field()
    entropy_weight: float = heads.entropy_weight_field()
    gate: str = attention_options.gate_field()
    sink: str = attention_options.sink_field()
    softcap: float = attention_options.softcap_field()
    memory: int = attention_options.memory_field()

    def build(self, dims: Dims) -> MixerModule:
        return self.attention(dims, None)

    def attention(self, dims: Dims, window: int | None) -> heads.AttentionModule:
        """Attention with these fields over so many keys; None: all that the direction allows."""
        return heads.AttentionModule(
            d_model=dims.d_model,
            shape=self.head_shape(),
            window=window,
            qk_norm=self.qk_norm,
            train_len=dims.train_len,
            attention_dropout=self.attention_dropout,
            entropy_weight=self.entropy_weight,
            direction=dims.direction,
            options=self._options(),
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.kv_heads * self.queries_per_kv, kv_heads=self.kv_heads, head_dim=self.head_dim)

    def _options(self) -> attention_options.AttentionOptions:
        return attention_options.AttentionOptions(
            gate=self.gate, sink=self.sink, softcap=self.softcap, memory=self.memory
        )

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        return self.attention_flops(dims, heads.mean_visible(length, length) if causal else float(length))

    def attention_flops(self, dims: Dims, keys: float) -> float:
        """Forward FLOPs per token where a query sees so many keys."""
        shape = self.head_shape()
        added = self._options().flops_per_token(dims.d_model, shape)
        return heads.projection_flops(dims.d_model, shape) + heads.score_flops(shape, keys) + added
