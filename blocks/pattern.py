"""Patterns: which mixer each layer uses."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from blocks.families import AbstractMixer, AbstractPattern, Dims
from blocks.registry import register
from search_space.domains import family, int_range


@register
@dataclass(frozen=True, kw_only=True)
class Uniform(AbstractPattern):
    """Every layer uses the main mixer."""

    kind: ClassVar[str] = "uniform"
    paper: ClassVar[str] = "Attention Is All You Need, Vaswani et al. 2017, section 3.1, arXiv:1706.03762"
    proof: ClassVar[str] = "test_an_untouched_pattern_is_uniform"
    reference: ClassVar[str] = "the main mixer in every layer"

    def mixers(self, main: Any, layers: int) -> tuple[Any, ...]:
        return (main,) * layers


@register
@dataclass(frozen=True, kw_only=True)
class EveryNth(AbstractPattern):
    """Layers n, 2n, 3n, ... (counted from 1) use another mixer, the rest the main one."""

    kind: ClassVar[str] = "every_nth"
    paper: ClassVar[str] = (
        "Jamba: A Hybrid Transformer-Mamba Language Model, Lieber et al. 2024, section 3.1, arXiv:2403.19887"
    )
    proof: ClassVar[str] = "test_every_nth_counts_layers_from_one"
    reference: ClassVar[str] = "the list of layers, written out in the test"

    every: int = int_range(2, 8, default=4, help="period: every n-th layer uses the other mixer")
    mixer: AbstractMixer = family(AbstractMixer, default="softmax", help="the mixer of every n-th layer")

    def mixers(self, main: Any, layers: int) -> tuple[Any, ...]:
        return tuple(self.mixer if layer % self.every == 0 else main for layer in range(1, layers + 1))

    def canonical(self, main: Any, dims: Dims) -> AbstractPattern:
        other = self.mixer.canonical(dims)
        if other == main or dims.layers < self.every:
            return Uniform()
        return dataclasses.replace(self, mixer=other)
