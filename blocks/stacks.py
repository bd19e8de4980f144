"""Stacks of one kind of layer: decoder, encoder and prefix decoder."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from blocks import registry
from blocks.families import (
    BOTH_DIRECTIONS,
    CAUSAL_ONLY,
    AbstractMixer,
    AbstractPosition,
    AbstractStack,
    Direction,
    InfeasibleArchitecture,
    State,
)
from blocks.model import AbstractTokenModel, DecoderLM, ModelConfig
from blocks.registry import register


class EncoderLM(AbstractTokenModel):
    """Every output depends on every token: train it to name tokens that were masked in its input, never the next one.

    Training: `logits, auxiliary = model(masked, live)`, then cross-entropy with the original tokens where masked.
    """

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        live: Bool[Tensor, "B T"] | None = None,
        checkpointing: bool = False,
        segments: Int[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T V"], Float[Tensor, ""]]:
        """Logits of the token at each place, and the sum of the auxiliary losses."""
        return self.whole(tokens, live=live, segments=segments, prefix=0, checkpointing=checkpointing)


class PrefixLM(AbstractTokenModel):
    """Of a prefix every token sees every other; after it, each sees the prefix and what lies before.

    Training: `logits, auxiliary = model(tokens, prefix=n)`, then cross-entropy of logits n - 1.. with tokens n..:
    inside the prefix a logit would be asked for a token that the model has seen.
    """

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        live: Bool[Tensor, "B T"] | None = None,
        checkpointing: bool = False,
        prefix: int = 0,
    ) -> tuple[Float[Tensor, "B T V"], Float[Tensor, ""]]:
        """Logits of the token after each, and the sum of the auxiliary losses."""
        return self.whole(tokens, live=live, segments=None, prefix=prefix, checkpointing=checkpointing)

    def empty_state(self, batch: int) -> State:
        """The decoding state before the first token, for so many rows."""
        return self.empty_layers(batch, self.embedding.device, self.embedding.dtype)

    def begin(self, prefix: Int[Tensor, "B T"], state: State) -> tuple[Float[Tensor, "B T V"], State]:
        """Logits of a whole prefix, which is seen in both directions, and the state after it; from the empty state."""
        return self.further(prefix, state, 0, both_ways=True)

    def step(self, tokens: Int[Tensor, "B T"], state: State, start: int) -> tuple[Float[Tensor, "B T V"], State]:
        """Logits of T tokens after the prefix, the first at position `start`, and the state after them."""
        return self.further(tokens, state, start)


@register
@dataclass(frozen=True, kw_only=True)
class Decoder(AbstractStack):
    """A causal language model: every token is predicted from those before it."""

    kind: ClassVar[str] = "decoder"
    paper: ClassVar[str] = "Language Models are Unsupervised Multitask Learners, Radford et al. 2019, section 2.3"
    proof: ClassVar[str] = "test_future_tokens_do_not_change_the_past"
    reference: ClassVar[str] = "the same tokens with later ones changed"
    direction: ClassVar[Direction] = Direction.CAUSAL
    directions: ClassVar[frozenset[Direction]] = CAUSAL_ONLY
    position_direction: ClassVar[Direction] = Direction.CAUSAL
    predicts_next: ClassVar[bool] = True

    def model(self, config: ModelConfig) -> nn.Module:
        return DecoderLM(config)


@register
@dataclass(frozen=True, kw_only=True)
class Encoder(AbstractStack):
    """Every token sees every other: for filling in masked tokens; cannot generate."""

    kind: ClassVar[str] = "encoder"
    paper: ClassVar[str] = (
        "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding, Devlin et al. 2018, "
        "arXiv:1810.04805"
    )
    proof: ClassVar[str] = "test_an_encoder_layer_equals_torch"
    reference: ClassVar[str] = "torch nn.MultiheadAttention"
    direction: ClassVar[Direction] = Direction.BIDIRECTIONAL
    directions: ClassVar[frozenset[Direction]] = frozenset({Direction.BIDIRECTIONAL})
    position_direction: ClassVar[Direction] = Direction.BIDIRECTIONAL

    def model(self, config: ModelConfig) -> nn.Module:
        return EncoderLM(config)


@register
@dataclass(frozen=True, kw_only=True)
class PrefixDecoder(AbstractStack):
    """The first tokens of a row see each other in both directions, the rest what lies before: for given beginnings."""

    kind: ClassVar[str] = "prefix_lm"
    paper: ClassVar[str] = (
        "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, Raffel et al. 2020, "
        "section 3.2.1, arXiv:1910.10683"
    )
    proof: ClassVar[str] = "test_a_prefix_of_nothing_is_the_decoder_and_of_everything_the_encoder"
    reference: ClassVar[str] = "the decoder and the encoder"
    direction: ClassVar[Direction] = Direction.CAUSAL
    directions: ClassVar[frozenset[Direction]] = BOTH_DIRECTIONS
    position_direction: ClassVar[Direction] = Direction.BIDIRECTIONAL

    def model(self, config: ModelConfig) -> nn.Module:
        return PrefixLM(config)

    def check(self, config: ModelConfig) -> None:
        if config.position.mixes_tokens:
            able = [kind for kind, other in registry.variants(AbstractPosition).items() if _fits_prefix(other)]
            raise InfeasibleArchitecture(
                f"model.position.kind={config.position.kind!r} mixes neighbouring tokens before the first layer, and "
                f"in model.stack.kind='prefix_lm' those after the prefix must not be seen; schemes that would do: "
                f"{', '.join(able)}"
            )
        for mixer in dict.fromkeys(config.layer_mixers()):
            if not mixer.takes_prefix:
                able = [kind for kind, other in registry.variants(AbstractMixer).items() if other.takes_prefix]
                raise InfeasibleArchitecture(
                    f"model.stack.kind='prefix_lm' lets the tokens of a prefix see each other, which "
                    f"model.mixer.kind={mixer.kind!r} cannot; mixers that can: {', '.join(able)}"
                )


def _fits_prefix(position: type) -> bool:
    assert issubclass(position, AbstractPosition)
    return Direction.BIDIRECTIONAL in position.directions and not position.mixes_tokens
