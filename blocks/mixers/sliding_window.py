"""Softmax attention over the last tokens only."""

import dataclasses
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

    def unlimited(self) -> Softmax:
        """The same attention without a window."""
        return Softmax(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Softmax)})

    def build(self, dims: Dims) -> MixerModule:
        return self.unlimited().attention(dims, self.window)

    def head_shape(self) -> HeadShape:
        return self.unlimited().head_shape()

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        keys = heads.mean_visible(length, self.window) if causal else float(min(self.window, length))
        return self.unlimited().attention_flops(dims, keys)

    def canonical(self, dims: Dims) -> AbstractMixer:
        return self if self.window < dims.max_len else self.unlimited()

    def check(self, dims: Dims) -> None:
        if self.window < 1:
            raise InfeasibleArchitecture(
                f"model.mixer.sliding_window.window must be at least 1, the token itself; got {self.window}; raise it"
            )
