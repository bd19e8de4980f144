"""The encoder-decoder: a source read in both directions, and a target written one token at a time."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from blocks import registry
from blocks.cross_attention import CrossAttention, cross_flops
from blocks.decoding import prefixed, under
from blocks.families import (
    BOTH_DIRECTIONS,
    AbstractMixer,
    AbstractPlacement,
    AbstractStack,
    Context,
    Dims,
    Direction,
    InfeasibleArchitecture,
    Role,
    RoutedFFN,
    State,
    linear,
    mark,
)
from blocks.ffn.none import NoFFN
from blocks.init import role_of
from blocks.model import AbstractLayers, ModelConfig, build_blocks, build_branch_end, build_final_norm, build_slot
from blocks.multipliers import multiply_outputs
from blocks.pointer import PointerHead, coverage_loss
from blocks.registry import register
from blocks.stacks import Encoder
from search_space.domains import choice, int_range

COVERAGE = 1.0
"""Weight of the coverage loss (See et al. 2017, eq. 13)."""


class CrossLayer(nn.Module):
    """Self-attention, attention to the memory, and an FFN, each under the placement."""

    def __init__(self, config: ModelConfig, mixer: AbstractMixer, layer: int) -> None:
        super().__init__()
        dims = config.dims()
        ffn = config.ffn.build(dims)
        self.routed = isinstance(ffn, RoutedFFN)
        shape = mixer.head_shape()
        cross = CrossAttention(config.d_model, shape)
        multiply_outputs(cross, Role.QUERY, config.init.query_multiplier(shape.head_dim))
        branches: list[nn.Module] = [build_slot(config, mixer, layer), cross]
        branches += [] if isinstance(ffn, NoFFN) else [ffn]
        self.sublayers = nn.ModuleList()
        for branch in branches:
            placed = config.placement.sublayer(dims, layer, config.norm, branch, build_branch_end(config))
            assert placed is not None, "EncoderDecoder.check refuses placements that place no single sublayers"
            self.sublayers.append(placed)

    def forward(self, x: Float[Tensor, "B T D"], position: nn.Module, run: Any) -> Float[Tensor, "B T D"]:
        mixing, crossing, *feeding = self.sublayers
        x = crossing(mixing(x, position, run), position, run)
        for sublayer in feeding:
            x = sublayer(x, run) if self.routed else sublayer(x)
        return x


class Side(AbstractLayers):
    """The layers of one side and the norm after them."""

    def __init__(self, config: ModelConfig, **build: Any) -> None:
        super().__init__(config, **build)
        self.final_norm = build_final_norm(config)


class EncoderDecoderLM(nn.Module):
    """Predicts a target from a source. One embedding serves the source, the target and, where tied, the head.

    Training: `logits, auxiliary = model(source, shift_right(labels, start), source_live)`, then cross-entropy of the
    logits with the labels. With the pointer-copy head the logits are log probabilities over the vocabulary and `extra`
    words of the source outside it, whose ids in `copied` follow the vocabulary. `coverage` weighs, among the auxiliary
    losses, how much of the source the pointer looks at again.
    """

    def __init__(self, config: ModelConfig, encoder: ModelConfig, pointer: bool, coverage: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        mark(self.embedding, Role.EMBEDDING, fan_in=config.vocab_size, fan_out=config.d_model)
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        self.encoder = Side(encoder)
        self.decoder = Side(config, build=CrossLayer)
        self.head = nn.Identity() if config.tied else linear(config.d_model, config.vocab_size, Role.HEAD)
        self.pointer = PointerHead(config.d_model) if pointer else None
        self.coverage = coverage
        self.roles = {name: role_of(name, parameter) for name, parameter in self.named_parameters()}
        """The role of every parameter by name."""

    def forward(
        self,
        source: Int[Tensor, "B M"],
        target: Int[Tensor, "B T"],
        source_live: Bool[Tensor, "B M"] | None = None,
        target_live: Bool[Tensor, "B T"] | None = None,
        checkpointing: bool = False,
        copied: Int[Tensor, "B M"] | None = None,
        extra: int = 0,
    ) -> tuple[Float[Tensor, "B T W"], Float[Tensor, ""]]:
        """Logits of the token that follows each target token, and the sum of the auxiliary losses."""
        memory, source_loss = self.encode(source, source_live, checkpointing)
        embedded = F.embedding(target, self.embedding)

        def context() -> Context:
            return Context(live=target_live, memory=memory, memory_live=source_live)

        x = self.embedding_dropout(self.decoder.embedded(embedded, 0, target_live))
        x, target_loss = self.decoder.through_layers(x, context, checkpointing)
        ids = source if copied is None else copied
        logits, attention = self._read_out(x, embedded, memory, source_live, ids, extra)
        auxiliary = source_loss + target_loss
        if attention is not None and self.coverage:
            auxiliary = auxiliary + self.coverage * coverage_loss(attention, target_live).to(auxiliary.dtype)
        return logits, auxiliary

    def encode(
        self, source: Int[Tensor, "B M"], source_live: Bool[Tensor, "B M"] | None = None, checkpointing: bool = False
    ) -> tuple[Float[Tensor, "B M D"], Float[Tensor, ""]]:
        """The memory of a source, and the sum of the encoder's auxiliary losses."""
        x = self.encoder.embedded(F.embedding(source, self.embedding), 0, source_live)
        x, loss = self.encoder.through_layers(
            self.embedding_dropout(x), lambda: Context(live=source_live), checkpointing
        )
        return self.encoder.final_norm(x), loss

    def state_of(
        self,
        source: Int[Tensor, "B M"],
        source_live: Bool[Tensor, "B M"] | None = None,
        copied: Int[Tensor, "B M"] | None = None,
    ) -> State:
        """The decoding state before the first target token, the source read."""
        memory, _ = self.encode(source, source_live)
        state = self.decoder.empty_layers(source.shape[0], memory.device, memory.dtype)
        for index, block in enumerate(self.decoder.layer_block):
            layer = self.decoder.layers[block]
            (cross,) = (module for module in layer.modules() if isinstance(module, CrossAttention))
            state |= prefixed(cross.state(memory, source_live), f"layers.{index}.")
        if self.pointer is None:
            return state
        everywhere = torch.ones_like(source, dtype=torch.bool)
        live = everywhere if source_live is None else source_live
        ids = source if copied is None else copied
        return state | {"pointer.memory": memory, "pointer.live": live, "pointer.copied": ids}

    def step(
        self, tokens: Int[Tensor, "B T"], state: State, start: int, extra: int = 0
    ) -> tuple[Float[Tensor, "B T W"], State]:
        """Logits of T further target tokens, the first at position `start`, and the state after them."""
        embedded = F.embedding(tokens, self.embedding)
        x, placed = self.decoder.embedded_step(embedded, state, start)
        x, following = self.decoder.step_layers(self.embedding_dropout(x), state, start)
        kept = under(state, "pointer.")
        logits, _ = self._read_out(x, embedded, kept.get("memory"), kept.get("live"), kept.get("copied"), extra)
        return logits, following | placed | prefixed(kept, "pointer.")

    def _read_out(
        self,
        x: Float[Tensor, "B T D"],
        embedded: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B M D"] | None,
        live: Bool[Tensor, "B M"] | None,
        copied: Int[Tensor, "B M"] | None,
        extra: int,
    ) -> tuple[Float[Tensor, "B T W"], Float[Tensor, "B T M"] | None]:
        """Logits, and the pointer's attention where there is one."""
        x = self.decoder.final_norm(x)
        logits = F.linear(x, self.embedding) if self.config.tied else self.head(x)
        logits = logits * self.decoder.logit_multiplier
        if self.pointer is None:
            return logits, None
        assert memory is not None, "a pointer-copy head needs the source"
        assert copied is not None, "a pointer-copy head needs the ids of the source"
        return self.pointer(logits, x, embedded, memory, live, copied, extra)


def shift_right(labels: Int[Tensor, "B T"], start: int) -> Int[Tensor, "B T"]:
    """What a decoder reads to predict the labels: the start token, then every label but the last."""
    return torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)


@dataclass(frozen=True, kw_only=True)
class EncoderSide(Encoder):
    """The encoder of an encoder-decoder; no stack by itself."""

    decoder_layers: int
    """Layers of the decoder that reads what it makes."""

    def partner_layers(self) -> int:
        return self.decoder_layers


@register
@dataclass(frozen=True, kw_only=True)
class EncoderDecoder(AbstractStack):
    """An encoder reads a source in both directions and a decoder writes a target, looking at the source in every layer.

    The model's layers are the decoder's; the encoder has as many of the same kind as encoder_layers says.
    """

    kind: ClassVar[str] = "encoder_decoder"
    paper: ClassVar[str] = (
        "Attention Is All You Need, Vaswani et al. 2017, arXiv:1706.03762; Get To The Point: Summarization with "
        "Pointer-Generator Networks, See et al. 2017, arXiv:1704.04368"
    )
    proof: ClassVar[str] = "test_a_layer_of_the_decoder_equals_torch"
    reference: ClassVar[str] = "torch nn.TransformerDecoderLayer"
    direction: ClassVar[Direction] = Direction.CAUSAL
    directions: ClassVar[frozenset[Direction]] = BOTH_DIRECTIONS
    position_direction: ClassVar[Direction] = Direction.CAUSAL

    encoder_layers: int = int_range(1, 64, default=4, help="number of layers that read the source")
    head: str = choice(
        "vocabulary",
        "pointer_copy",
        "pointer_coverage",
        default="vocabulary",
        help="whether tokens of the source can be copied as well; pointer_coverage adds a loss on looking again at "
        "what was looked at before, and leaves the scores as they are",
    )

    def model(self, config: ModelConfig) -> nn.Module:
        return EncoderDecoderLM(
            config, self.encoder(config), self._points(), COVERAGE if self.head == "pointer_coverage" else 0.0
        )

    def _points(self) -> bool:
        return self.head != "vocabulary"

    def encoder(self, config: ModelConfig) -> ModelConfig:
        """The config of the encoder's side."""
        return dataclasses.replace(config, layers=self.encoder_layers, stack=EncoderSide(decoder_layers=config.layers))

    def partner_layers(self) -> int:
        return self.encoder_layers

    def sides(self, config: ModelConfig) -> Mapping[str, Dims]:
        return {"encoder.": self.encoder(config).dims(), "": config.dims()}

    def parts(self, config: ModelConfig) -> list[nn.Module]:
        crossing = [CrossLayer(config, mixer, layer).sublayers[1] for mixer, layer in build_blocks(config)]
        pointer = [PointerHead(config.d_model)] if self._points() else []
        return [Side(self.encoder(config)), *crossing, *pointer]

    def flops_per_token(self, config: ModelConfig, length: int, causal: bool) -> float:
        """For a source as long as the target."""
        encoder = self.encoder(config)
        dims = encoder.dims()
        ffn = config.ffn.flops_per_token(dims) + config.premixer.flops_per_token(dims)
        reading = sum(mixer.flops_per_token(dims, length, False) + ffn for mixer in encoder.layer_mixers())
        looking = sum(cross_flops(config.d_model, mixer.head_shape(), length) for mixer in config.layer_mixers())
        pointing = (4.0 * config.d_model + 4.0 * length + 6.0) * config.d_model if self._points() else 0.0
        return reading + encoder.residual.flops_per_token(dims) + looking + pointing

    def check(self, config: ModelConfig) -> None:
        probe = config.placement.sublayer(config.dims(), 0, config.norm, nn.Identity(), nn.Identity())
        if probe is None:
            able = [
                kind
                for kind, other in registry.variants(AbstractPlacement).items()
                if other().sublayer(config.dims(), 0, config.norm, nn.Identity(), nn.Identity()) is not None
            ]
            raise InfeasibleArchitecture(
                f"model.stack.kind='encoder_decoder' has three sublayers in a layer, which "
                f"model.placement.kind={config.placement.kind!r} cannot place; placements that can: {', '.join(able)}"
            )
        self.encoder(config)
