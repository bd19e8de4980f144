"""Softmax attention over the last tokens only."""

from dataclasses import dataclass
from typing import ClassVar

from blocks.families import (
    BOTH_DIRECTIONS,
    AbstractMixer,
    Dims,
    Direction,
    HeadShape,
    Hook,
    InfeasibleArchitecture,
    MixerModule,
)
from blocks.mixers import attention_options, heads
from blocks.mixers.softmax import Softmax
from blocks.registry import register
from search_space.domains import choice


@register
@dataclass(frozen=True, kw_only=True)
class SlidingWindow(AbstractMixer):
    """Every token attends by softmax to the last `window` tokens, itself included; decoding keeps no more."""

    kind: ClassVar[str] = "sliding_window"
    paper: ClassVar[str] = (
        "Longformer: The Long-Document Transformer, Beltagy et al. 2020, arXiv:2004.05150; Mistral 7B, Jiang et al. "
        "2023, arXiv:2310.06825"
    )
    proof: ClassVar[str] = "test_window_sees_the_keys_mistral_sees"
    reference: ClassVar[str] = "transformers sliding_window_overlay"
    offers: ClassVar[frozenset[Hook]] = frozenset(Hook) - {Hook.PLACE}
    directions: ClassVar[frozenset[Direction]] = BOTH_DIRECTIONS
    packs: ClassVar[bool] = True
    takes_prefix: ClassVar[bool] = True
    value_projection: ClassVar[bool] = True

    kv_heads: int = heads.kv_heads_field()
    queries_per_kv: int = heads.queries_per_kv_field()
    head_dim: int = heads.head_dim_field()
    window: int = choice(
        8, 16, 32, 64, 128, 256, 512, default=32, help="keys each query sees, itself included; L layers reach L(W-1)+1"
    )
    qk_norm: str = heads.qk_norm_field()
    attention_dropout: float = heads.attention_dropout_field()
    entropy_weight: float = heads.entropy_weight_field()
    gate: str = attention_options.gate_field()
    sink: str = attention_options.sink_field()
    softcap: float = attention_options.softcap_field()
    memory: int = attention_options.memory_field()

    def reach(self) -> int | None:
        return self.window

    def build(self, dims: Dims) -> MixerModule:
        return heads.AttentionModule(
            d_model=dims.d_model,
            shape=self.head_shape(),
            window=self.window,
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
        keys = heads.mean_visible(length, self.window) if causal else float(min(self.window, length))
        shape = self.head_shape()
        added = self._options().flops_per_token(dims.d_model, shape)
        return heads.projection_flops(dims.d_model, shape) + heads.score_flops(shape, keys) + added

    def canonical(self, dims: Dims) -> AbstractMixer:
        if self.window < dims.max_len:
            return self
        return Softmax(
            kv_heads=self.kv_heads,
            queries_per_kv=self.queries_per_kv,
            head_dim=self.head_dim,
            qk_norm=self.qk_norm,
            attention_dropout=self.attention_dropout,
            entropy_weight=self.entropy_weight,
            gate=self.gate,
            sink=self.sink,
            softcap=self.softcap,
            memory=self.memory,
        )

    def check(self, dims: Dims) -> None:
        if self.window < 1:
            raise InfeasibleArchitecture(
                f"model.mixer.sliding_window.window must be at least 1, the token itself; got {self.window}; raise it"
            )
