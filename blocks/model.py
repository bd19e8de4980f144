"""Layers and the models made of them: the wiring, and nothing but wiring."""

import functools
import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from blocks import registry
from blocks.config import ModelConfig
from blocks.decoding import Decoding, MixerSlot, prefixed, under
from blocks.families import (
    AbstractMixer,
    AbstractPosition,
    Context,
    Dims,
    HeadShape,
    Hook,
    InfeasibleArchitecture,
    PositionModule,
    Role,
    State,
    Values,
    linear,
    mark,
)
from blocks.init import role_of
from blocks.multipliers import Multiply, multiply_outputs
from blocks.packing import runs

__all__ = ["AbstractLayers", "AbstractTokenModel", "DecoderLM", "LayerBuilder", "ModelConfig"]

LayerBuilder = Callable[[ModelConfig, AbstractMixer, int], nn.Module]


def build_slot(config: ModelConfig, mixer: AbstractMixer, layer: int = 0) -> MixerSlot:
    """The mixer sublayer of one layer, counted from 0."""
    dims = config.dims()
    shape = mixer.head_shape()
    slot = MixerSlot(config.premixer.build(dims), mixer.build_at(dims, layer), shape)
    multiply_outputs(slot, Role.QUERY, config.init.query_multiplier(shape.head_dim))
    return slot


def build_layer(config: ModelConfig, mixer: AbstractMixer, layer: int = 0) -> nn.Module:
    """One layer: mixer and FFN under the config's placement. Called as layer(x, position, context or decoding)."""
    dims = config.dims()
    dropout = build_branch_end(config)
    slot = build_slot(config, mixer, layer)
    return config.placement.build(dims, layer, config.norm, slot, config.ffn.build(dims), dropout)


def build_positions(config: ModelConfig, dims: Dims) -> list[PositionModule]:
    """The position module of each layer; layers whose scheme and head shape are the same share one.

    A scheme that touches the embedding alone has one for all shapes.
    """
    built: dict[tuple[AbstractPosition, HeadShape], PositionModule] = {}
    modules = []
    for layer, mixer in enumerate(config.layer_mixers()):
        scheme = config.position.at_layer(layer)
        shape = config.mixer.head_shape() if scheme.needs <= {Hook.EMBEDDING} else mixer.head_shape()
        if (scheme, shape) not in built:
            built[scheme, shape] = scheme.build(dims, shape)
        modules.append(built[scheme, shape])
    return modules


def build_blocks(config: ModelConfig) -> list[tuple[AbstractMixer, int]]:
    """The mixer of every block with parameters of its own, and the first layer that uses it."""
    blocks: dict[int, tuple[AbstractMixer, int]] = {}
    for layer, mixer in enumerate(config.layer_mixers()):
        blocks.setdefault(config.residual.block_of(layer, config.layers), (mixer, layer))
    return [blocks[index] for index in range(len(blocks))]


def build_branch_end(config: ModelConfig) -> nn.Module:
    """What the output of every branch passes through before it is added: dropout, and the init rule's multiplier."""
    dropout = nn.Dropout(config.residual_dropout)
    multiplier = config.init.branch_multiplier(config.layers)
    return dropout if multiplier == 1 else nn.Sequential(dropout, Multiply(multiplier))


def build_embedding_norm(config: ModelConfig) -> nn.Module:
    """What stands between the embedding and the first layer."""
    return config.norm.build(config.d_model) if config.placement.embedding_norm else nn.Identity()


def build_final_norm(config: ModelConfig) -> nn.Module:
    """What stands between the last layer and the head."""
    return config.norm.build(config.d_model) if config.placement.final_norm else nn.Identity()


class AbstractLayers(nn.Module):
    """Layers, the positions they share, and the residual form that runs them."""

    def __init__(self, config: ModelConfig, build: LayerBuilder = build_layer) -> None:
        super().__init__()
        self.config = config
        positions = build_positions(config, config.dims(config.stack.position_direction))
        distinct = list(dict.fromkeys(positions))
        self.positions = nn.ModuleList(distinct)
        self.layer_position = [distinct.index(module) for module in positions]
        self.layers = nn.ModuleList(build(config, mixer, layer) for mixer, layer in build_blocks(config))
        self.layer_block = [config.residual.block_of(layer, config.layers) for layer in range(config.layers)]
        self.slots = [_slot_of(self.layers[block]) for block in self.layer_block]
        self.residual = config.residual.build(config.dims())
        self.embedding_norm = build_embedding_norm(config)
        self.embedding_scale = math.sqrt(config.d_model) if config.embed_scale == "sqrt_d" else 1.0
        self.logit_multiplier = config.init.logit_multiplier(config.d_model)

    def through_layers(
        self, x: Float[Tensor, "B T D"], make: Callable[[], Context], checkpointing: bool
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, ""]]:
        """The residual stream after all layers and the sum of their auxiliary losses; each layer has a context."""
        losses = [x.new_zeros(())]

        def call(block: nn.Module, position: nn.Module, x: Tensor, values: Values | None) -> Tensor:
            given = (block, x, position, make, values)
            if checkpointing:
                y, loss, own = checkpoint(_run_layer, *given, use_reentrant=False)
            else:
                y, loss, own = _run_layer(*given)
            if values is not None:
                values.own = own
            losses.append(loss)
            return y

        x = self.residual(x, [functools.partial(call, *parts) for parts in self._running()])
        return x, torch.stack(losses).sum()

    def step_layers(
        self, x: Float[Tensor, "B T D"], state: State, start: int, both_ways: bool = False
    ) -> tuple[Float[Tensor, "B T D"], State]:
        """The residual stream of T further tokens after all layers, and the state after them."""
        following: State = {}

        def call(layer: int, x: Tensor, values: Values | None) -> Tensor:
            block, position = self._running()[layer]
            decoding = Decoding(under(state, f"layers.{layer}."), start, values=values, both_ways=both_ways)
            y = block(x, position, decoding)
            following.update(prefixed(decoding.following, f"layers.{layer}."))
            return y

        return self.residual(x, [functools.partial(call, layer) for layer in range(len(self.slots))]), following

    def empty_layers(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        """The decoding state of all layers before the first token."""
        state: State = {}
        for index, slot in enumerate(self.slots):
            state.update(prefixed(slot.empty_state(batch, device, dtype), f"layers.{index}."))
        return state | prefixed(self._first_position().empty_state(batch, device, dtype), "position.")

    def embedded(
        self, x: Float[Tensor, "B T D"], start: int, live: Bool[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """The residual stream before the first layer: embeddings scaled, with positions added, normed."""
        return self.embedding_norm(self._first_position().embed(self._scaled(x), start, live))

    def _scaled(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return x if self.embedding_scale == 1 else x * self.embedding_scale

    def embedded_step(
        self, x: Float[Tensor, "B T D"], state: State, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        """The same of T further tokens, and what the positions keep after them."""
        x, following = self._first_position().embed_step(self._scaled(x), under(state, "position."), start)
        return self.embedding_norm(x), prefixed(following, "position.")

    def _first_position(self) -> PositionModule:
        first = self.positions[0]
        assert isinstance(first, PositionModule)
        return first

    def _running(self) -> list[tuple[nn.Module, nn.Module]]:
        """The block and the position module of each layer."""
        pairs = zip(self.layer_block, self.layer_position, strict=True)
        return [(self.layers[block], self.positions[position]) for block, position in pairs]


class AbstractTokenModel(AbstractLayers):
    """Token embedding, layers, norm where the placement wants one, head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        mark(self.embedding, Role.EMBEDDING, fan_in=config.vocab_size, fan_out=config.d_model)
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        self.final_norm = build_final_norm(config)
        self.head = nn.Identity() if config.tied else linear(config.d_model, config.vocab_size, Role.HEAD)
        self.roles = {name: role_of(name, parameter) for name, parameter in self.named_parameters()}
        """The role of every parameter by name."""

    def after_step(self) -> None:
        """What is due between two steps of the optimizer, outside of gradients; the same work whatever the values."""
        with torch.no_grad():
            self.config.placement.settle(self, self.config.d_model)

    def whole(
        self,
        tokens: Int[Tensor, "B T"],
        *,
        live: Bool[Tensor, "B T"] | None,
        segments: Int[Tensor, "B T"] | None,
        prefix: int,
        checkpointing: bool,
    ) -> tuple[Float[Tensor, "B T V"], Float[Tensor, ""]]:
        """Logits of whole sequences and the sum of the auxiliary losses."""
        if segments is not None:
            require_packing(self.config)
            segments = runs(segments)
        x, auxiliary = self.through_layers(
            self._embed(tokens, live), lambda: Context(live=live, segments=segments, prefix=prefix), checkpointing
        )
        return self._logits(x), auxiliary

    def further(
        self, tokens: Int[Tensor, "B T"], state: State, start: int, both_ways: bool = False
    ) -> tuple[Float[Tensor, "B T V"], State]:
        """Logits of T further tokens, and the state after them; `both_ways`: they come first and see each other."""
        x, placed = self.embedded_step(F.embedding(tokens, self.embedding), state, start)
        x, following = self.step_layers(self.embedding_dropout(x), state, start, both_ways)
        return self._logits(x), following | placed

    def _embed(self, tokens: Int[Tensor, "B T"], live: Bool[Tensor, "B T"] | None) -> Float[Tensor, "B T D"]:
        return self.embedding_dropout(self.embedded(F.embedding(tokens, self.embedding), 0, live))

    def _logits(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        x = self.final_norm(x)
        logits = F.linear(x, self.embedding) if self.config.tied else self.head(x)
        return logits if self.logit_multiplier == 1 else logits * self.logit_multiplier


class DecoderLM(AbstractTokenModel):
    """A causal language model: output t depends on tokens 0..t only."""

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        live: Bool[Tensor, "B T"] | None = None,
        checkpointing: bool = False,
        segments: Int[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T V"], Float[Tensor, ""]]:
        """Logits and the sum of the auxiliary losses. `checkpointing` recomputes each layer in the backward pass.

        `segments` numbers the documents packed into a row: each is treated as if it stood alone.
        """
        return self.whole(tokens, live=live, segments=segments, prefix=0, checkpointing=checkpointing)

    def empty_state(self, batch: int) -> State:
        """The decoding state before the first token, for so many rows."""
        return self.empty_layers(batch, self.embedding.device, self.embedding.dtype)

    def step(self, tokens: Int[Tensor, "B T"], state: State, start: int) -> tuple[Float[Tensor, "B T V"], State]:
        """Logits of T further tokens, the first at position `start`, and the state after them; equals the full pass."""
        return self.further(tokens, state, start)


def _run_layer(
    layer: nn.Module,
    x: Float[Tensor, "B T D"],
    position: nn.Module,
    make: Callable[[], Context],
    values: Values | None,
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, ""], Tensor | None]:
    """The layer's output, its auxiliary loss, and the values it made where values are shared."""
    context = make()
    context.values = None if values is None else Values(first=values.first, share=values.share)
    y = layer(x, position, context)
    return y, sum(context.losses, start=x.new_zeros(())), None if context.values is None else context.values.own


def require_packing(config: ModelConfig) -> None:
    """Raise InfeasibleArchitecture unless every block of the model keeps packed documents apart."""
    for mixer in dict.fromkeys(config.layer_mixers()):
        if not mixer.packs:
            able = [kind for kind, other in registry.variants(AbstractMixer).items() if other.packs]
            raise InfeasibleArchitecture(
                f"model.mixer.kind={mixer.kind!r} cannot keep packed documents apart: what it carries over time would "
                f"pass from one to the next; give each document a row of its own, or use {', '.join(able)}"
            )
    if not config.premixer.packs:
        raise InfeasibleArchitecture(
            f"model.premixer.kind={config.premixer.kind!r} cannot keep packed documents apart; give each document a "
            f"row of its own, or set model.premixer to 'none'"
        )
    if Hook.EMBEDDING in config.position.needs or not config.position.relative:
        raise InfeasibleArchitecture(
            f"model.position.kind={config.position.kind!r} counts positions from the start of the row, and packed "
            f"documents start elsewhere; give each document a row of its own, or use a relative scheme such as rotary"
        )


def _slot_of(layer: nn.Module) -> MixerSlot:
    (slot,) = (module for module in layer.modules() if isinstance(module, MixerSlot))
    return slot
