"""ModelConfig says which model and refuses what cannot be built; DecoderLM is the wiring, and nothing but wiring."""

import dataclasses
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from blocks import registry
from blocks.families import (
    AbstractFFN,
    AbstractInit,
    AbstractMixer,
    AbstractNorm,
    AbstractPattern,
    AbstractPlacement,
    AbstractPosition,
    AbstractPremixer,
    Context,
    Dims,
    HeadShape,
    Hook,
    InfeasibleArchitecture,
    MixerModule,
    PositionModule,
    Role,
    State,
    linear,
    mark,
)
from blocks.init import initialise, role_of
from search_space.canon import seed_from
from search_space.domains import choice, family, float_range, int_range


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only language model."""

    vocab_size: int
    """Distinct tokens; given by the task."""
    train_len: int
    """Sequence length in training; given by the task."""
    max_len: int
    """Longest sequence the model is ever run on; given by the task."""
    d_ff: int
    """Inner width of the FFN; found by blocks.size."""
    d_model: int = int_range(16, 4096, step=16, default=128, help="width of the residual stream")
    layers: int = int_range(1, 64, default=4, help="number of layers")
    tied: bool = choice(True, False, default=True, help="whether the head reuses the token embedding")
    mixer: AbstractMixer = family(AbstractMixer, default="softmax", help="how tokens exchange information")
    premixer: AbstractPremixer = family(
        AbstractPremixer, default="none", opt_in=True, help="what each mixer's input passes through first"
    )
    pattern: AbstractPattern = family(
        AbstractPattern, default="uniform", opt_in=True, help="how mixers alternate over the layers"
    )
    position: AbstractPosition = family(
        AbstractPosition, default="rotary", help="how the model knows the order of tokens"
    )
    ffn: AbstractFFN = family(AbstractFFN, default="swiglu", help="the position-wise feed-forward network")
    norm: AbstractNorm = family(AbstractNorm, default="rmsnorm", help="normalisation over the model width")
    placement: AbstractPlacement = family(AbstractPlacement, default="pre", help="where norms stand in a layer")
    init: AbstractInit = family(AbstractInit, default="scaled_normal", help="the rule that draws the weights")
    residual_dropout: float = float_range(
        0.0, 0.5, default=0.0, opt_in=True, help="share of each sublayer's output dropped in training"
    )
    embedding_dropout: float = float_range(
        0.0, 0.5, default=0.0, opt_in=True, help="share of the embedded input dropped in training"
    )

    def __post_init__(self) -> None:
        for name in ("vocab_size", "train_len", "d_model", "d_ff", "layers"):
            if getattr(self, name) < 1:
                raise InfeasibleArchitecture(f"model.{name} must be at least 1; got {getattr(self, name)}; raise it")
        if self.max_len < self.train_len:
            raise InfeasibleArchitecture(
                f"model.max_len must be at least model.train_len; got {self.max_len} < {self.train_len}; "
                f"raise max_len to {self.train_len}"
            )
        dims = self.dims()
        for mixer in dict.fromkeys(self.layer_mixers()):
            self._check_hooks(mixer)
            mixer.check(dims)
            self.position.check(dims, mixer.head_shape())

    def _check_hooks(self, mixer: AbstractMixer) -> None:
        missing = self.position.needs - mixer.offers - {Hook.EMBEDDING}
        if not missing:
            return
        capable = [
            kind for kind, other in registry.variants(AbstractMixer).items() if self.position.needs <= _offers(other)
        ]
        hooks = f"hook{'s' if len(missing) > 1 else ''} {', '.join(repr(str(hook)) for hook in sorted(missing))}"
        raise InfeasibleArchitecture(
            f"model.position.kind={self.position.kind!r} needs the {hooks}, "
            f"which {self._path_of(mixer)}.kind={mixer.kind!r} does not offer; "
            f"mixers that do: {', '.join(capable) or 'none'}"
        )

    def _path_of(self, mixer: AbstractMixer) -> str:
        if mixer == self.mixer:
            return "model.mixer"
        pattern = registry.encode(self.pattern)
        name = next((name for name in pattern if getattr(self.pattern, name) == mixer), "mixers")
        return f"model.pattern.{self.pattern.kind}.{name}"

    def dims(self) -> Dims:
        """The sizes every block is built with."""
        return Dims(
            d_model=self.d_model, d_ff=self.d_ff, layers=self.layers, train_len=self.train_len, max_len=self.max_len
        )

    def layer_mixers(self) -> tuple[AbstractMixer, ...]:
        """The mixer config of each layer, first layer first."""
        return self.pattern.mixers(self.mixer, self.layers)

    def canonical(self) -> "ModelConfig":
        """The simplest config that computes the same function; two configs of one function share it."""
        dims = self.dims()
        mixer = self.mixer.canonical(dims)
        return dataclasses.replace(
            self,
            mixer=mixer,
            pattern=self.pattern.canonical(mixer, dims),
            position=self.position.canonical(dims),
        )

    def build(self, seed: int, device: str = "cpu") -> "DecoderLM":
        """The model with its weights drawn from the seed, equal on every device; on 'meta' nothing is drawn."""
        if device == "meta":
            with torch.device("meta"):
                return DecoderLM(self)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed_from(seed, "construction"))
            model = DecoderLM(self)
        initialise(model, self.init, self.layers, seed)
        return model.to(device)


def _offers(mixer: type) -> frozenset[Hook]:
    assert issubclass(mixer, AbstractMixer)
    return mixer.offers | {Hook.EMBEDDING}


@dataclass
class Decoding:
    """What one decoding call hands to a layer's mixer, and takes back from it."""

    state: State
    start: int
    following: State = dataclasses.field(default_factory=dict)


class MixerSlot(nn.Module):
    """A premixer and the mixer behind it, as one sublayer; their states live under separate prefixes."""

    def __init__(self, premixer: MixerModule, mixer: MixerModule) -> None:
        super().__init__()
        self.premixer = premixer
        self.mixer = mixer

    def forward(
        self, x: Float[Tensor, "B T D"], position: PositionModule, run: Context | Decoding
    ) -> Float[Tensor, "B T D"]:
        if isinstance(run, Context):
            return self.mixer(self.premixer(x, position, run), position, run)
        for prefix, part in self._parts():
            x, following = part.step(x, _under(run.state, prefix), position, run.start)
            run.following.update(_prefixed(following, prefix))
        return x

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        """The states of both before the first token."""
        state: State = {}
        for prefix, part in self._parts():
            state.update(_prefixed(part.empty_state(batch, device, dtype), prefix))
        return state

    def _parts(self) -> tuple[tuple[str, MixerModule], ...]:
        return (("premixer.", self.premixer), ("mixer.", self.mixer))


def _prefixed(state: State, prefix: str) -> State:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def _under(state: State, prefix: str) -> State:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def build_slot(config: ModelConfig, mixer: AbstractMixer) -> MixerSlot:
    """The mixer sublayer of one layer."""
    dims = config.dims()
    return MixerSlot(config.premixer.build(dims), mixer.build(dims))


def build_layer(config: ModelConfig, mixer: AbstractMixer) -> nn.Module:
    """One layer: mixer and FFN under the config's placement. Called as layer(x, position, context or decoding)."""
    dims = config.dims()
    dropout = nn.Dropout(config.residual_dropout)
    return config.placement.build(dims, config.norm, build_slot(config, mixer), config.ffn.build(dims), dropout)


def build_positions(config: ModelConfig) -> dict[HeadShape, PositionModule]:
    """One position module per distinct head shape; a scheme that touches the embedding alone has one for all shapes."""
    shapes = tuple(dict.fromkeys(mixer.head_shape() for mixer in config.layer_mixers()))
    dims = config.dims()
    if config.position.needs <= {Hook.EMBEDDING}:
        return dict.fromkeys(shapes, config.position.build(dims, shapes[0]))
    return {shape: config.position.build(dims, shape) for shape in shapes}


def build_final_norm(config: ModelConfig) -> nn.Module:
    """What stands between the last layer and the head."""
    return config.norm.build(config.d_model) if config.placement.final_norm else nn.Identity()


class DecoderLM(nn.Module):
    """Token embedding, layers, norm where the placement wants one, head. Output t depends on tokens 0..t only."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        mixers = config.layer_mixers()
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        mark(self.embedding, Role.EMBEDDING, fan_in=config.vocab_size, fan_out=config.d_model)
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        positions = build_positions(config)
        distinct = list(dict.fromkeys(positions.values()))
        self.positions = nn.ModuleList(distinct)
        self.layer_position = [distinct.index(positions[mixer.head_shape()]) for mixer in mixers]
        self.layers = nn.ModuleList(build_layer(config, mixer) for mixer in mixers)
        self.slots = [_slot_of(layer) for layer in self.layers]
        self.final_norm = build_final_norm(config)
        self.head = nn.Identity() if config.tied else linear(config.d_model, config.vocab_size, Role.HEAD)
        self.roles = {name: role_of(name, parameter) for name, parameter in self.named_parameters()}
        """The role of every parameter by name."""

    def forward(
        self, tokens: Int[Tensor, "B T"], live: Bool[Tensor, "B T"] | None = None, checkpointing: bool = False
    ) -> tuple[Float[Tensor, "B T V"], Float[Tensor, ""]]:
        """Logits and the sum of the auxiliary losses. `checkpointing` recomputes each layer in the backward pass."""
        x = self._embed(tokens, 0)
        auxiliary = x.new_zeros(())
        for layer, position in zip(self.layers, self._layer_positions(), strict=True):
            if checkpointing:
                x, loss = checkpoint(_run_layer, layer, x, position, live, use_reentrant=False)
            else:
                x, loss = _run_layer(layer, x, position, live)
            auxiliary = auxiliary + loss
        return self._logits(x), auxiliary

    def empty_state(self, batch: int) -> State:
        """The decoding state before the first token, for so many rows."""
        state: State = {}
        for index, slot in enumerate(self.slots):
            empty = slot.empty_state(batch, self.embedding.device, self.embedding.dtype)
            state.update(_prefixed(empty, f"layers.{index}."))
        return state

    def step(self, tokens: Int[Tensor, "B T"], state: State, start: int) -> tuple[Float[Tensor, "B T V"], State]:
        """Logits of T further tokens, the first at position `start`, and the state after them; equals the full pass."""
        x = self._embed(tokens, start)
        following: State = {}
        for index, (layer, position) in enumerate(zip(self.layers, self._layer_positions(), strict=True)):
            decoding = Decoding(state=_under(state, f"layers.{index}."), start=start)
            x = layer(x, position, decoding)
            following.update(_prefixed(decoding.following, f"layers.{index}."))
        return self._logits(x), following

    def _layer_positions(self) -> list[nn.Module]:
        return [self.positions[index] for index in self.layer_position]

    def _embed(self, tokens: Int[Tensor, "B T"], start: int) -> Float[Tensor, "B T D"]:
        first = self.positions[0]
        assert isinstance(first, PositionModule)
        return self.embedding_dropout(first.embed(F.embedding(tokens, self.embedding), start))

    def _logits(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        x = self.final_norm(x)
        return F.linear(x, self.embedding) if self.config.tied else self.head(x)


def _run_layer(
    layer: nn.Module, x: Float[Tensor, "B T D"], position: nn.Module, live: Bool[Tensor, "B T"] | None
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, ""]]:
    context = Context(live=live)
    y = layer(x, position, context)
    return y, sum(context.losses, start=x.new_zeros(()))


def _slot_of(layer: nn.Module) -> MixerSlot:
    (slot,) = (module for module in layer.modules() if isinstance(module, MixerSlot))
    return slot
