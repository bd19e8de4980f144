"""Stacks: what is built of the layers, and which way they look."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from blocks.families import CAUSAL_ONLY, AbstractStack, Direction
from blocks.model import DecoderLM, ModelConfig
from blocks.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Decoder(AbstractStack):
    """A causal language model: every token is predicted from those before it."""

    kind: ClassVar[str] = "decoder"
    paper: ClassVar[str] = "Language Models are Unsupervised Multitask Learners, Radford et al. 2019, section 2.3"
    direction: ClassVar[Direction] = Direction.CAUSAL
    directions: ClassVar[frozenset[Direction]] = CAUSAL_ONLY
    position_direction: ClassVar[Direction] = Direction.CAUSAL
    predicts_next: ClassVar[bool] = True

    def model(self, config: ModelConfig) -> nn.Module:
        return DecoderLM(config)
