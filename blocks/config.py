"""ModelConfig says which model, and refuses what cannot be built."""

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

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
    AbstractResidual,
    AbstractStack,
    Dims,
    Direction,
    Hook,
    InfeasibleArchitecture,
)
from blocks.init import initialise
from blocks.legality import check_factors, check_reach, check_relations, check_start, check_traits
from search_space.canon import seed_from
from search_space.domains import choice, family, float_range, int_range

Block = TypeVar("Block")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A language model: its sizes and the variant of every family; a decoder unless `stack` says otherwise."""

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
    stack: AbstractStack = family(
        AbstractStack,
        default="decoder",
        opt_in=True,
        neutral="decoder",
        factory=lambda: registry.lookup(AbstractStack, "decoder")(),
        help="what is built of the layers, and which way they look",
    )
    residual: AbstractResidual = family(
        AbstractResidual,
        default="plain",
        opt_in=True,
        neutral="plain",
        factory=lambda: registry.lookup(AbstractResidual, "plain")(),
        help="how the residual stream passes from layer to layer",
    )
    init: AbstractInit = family(AbstractInit, default="scaled_normal", help="the rule that draws the weights")
    embed_scale: str = choice(
        "one",
        "sqrt_d",
        default="one",
        opt_in=True,
        neutral="one",
        help="factor on token embeddings: sqrt_d brings rows of unit norm to unit root mean square",
    )
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
        for mixer in dict.fromkeys(self.layer_mixers()):
            self._check_hooks(mixer)
            self._check_directions(self._path_of(mixer), AbstractMixer, mixer)
            for direction in sorted(self.stack.directions):
                mixer.check(self.dims(direction))
                self.position.check(self.dims(direction), mixer.head_shape())
        self._check_directions("model.premixer", AbstractPremixer, self.premixer)
        self._check_directions("model.position", AbstractPosition, self.position)
        self._check_directions("model.ffn", AbstractFFN, self.ffn)
        check_reach(self.placement, self.ffn, self.layer_mixers(), self._path_of)
        check_factors(self.placement, self.norm, self.layer_mixers(), self._path_of)
        check_traits(self.init, self.placement)
        check_start(self.init, self.placement)
        check_relations(self.init, self.layer_mixers(), self._path_of)
        for direction in sorted(self.stack.directions):
            self.ffn.check(self.dims(direction))
        self.placement.check(self)
        self.residual.check(self)
        self.stack.check(self)

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

    def _check_directions(self, path: str, abstract: type, block: Any) -> None:
        missing = self.stack.directions - block.directions
        if not missing:
            return
        capable = [
            kind for kind, other in registry.variants(abstract).items() if self.stack.directions <= other.directions
        ]
        raise InfeasibleArchitecture(
            f"model.stack.kind={self.stack.kind!r} has {', '.join(sorted(missing))} layers, which "
            f"{path}.kind={block.kind!r} cannot serve; {path}.kind could be: {', '.join(capable) or 'none'}"
        )

    def _path_of(self, mixer: AbstractMixer) -> str:
        if mixer == self.mixer:
            return "model.mixer"
        pattern = registry.encode(self.pattern)
        name = next((name for name in pattern if getattr(self.pattern, name) == mixer), "mixers")
        return f"model.pattern.{self.pattern.kind}.{name}"

    def dims(self, direction: Direction | None = None) -> Dims:
        """The sizes every block is built with; those of the stack's own direction where none is named."""
        return Dims(
            d_model=self.d_model,
            d_ff=self._live_d_ff(),
            layers=self.layers,
            train_len=self.train_len,
            max_len=self.max_len,
            direction=self.stack.direction if direction is None else direction,
            partner_layers=self.stack.partner_layers(),
        )

    def layer_mixers(self) -> tuple[AbstractMixer, ...]:
        """The mixer config of each layer, first layer first."""
        return self.pattern.mixers(self.mixer, self.layers)

    def canonical(self) -> "ModelConfig":
        """The simplest config that computes the same function; two configs of one function share it.

        Built from one seed, a config and its canonical form have the same parameters, by name.
        """
        sides = list(self.stack.sides(self).values()) or [self.dims()]
        mixer = _agreed(self.mixer, [self.mixer.canonical(dims) for dims in sides])
        placement = _agreed(self.placement, [self.placement.canonical(dims) for dims in sides])
        config = dataclasses.replace(
            self,
            mixer=mixer,
            pattern=_agreed(self.pattern, [self.pattern.canonical(mixer, dims) for dims in sides]),
            position=_agreed(self.position, [self.position.canonical(dims) for dims in sides]),
            ffn=_agreed(self.ffn, [self.ffn.canonical(dims) for dims in sides]),
            d_ff=self._live_d_ff(),
            placement=placement if self.ffn.grows else placement.without_ffn(),
            init=_agreed(self.init, [self.init.canonical(dims) for dims in sides]),
            norm=self.norm if self.placement.uses_norm else registry.lookup(AbstractNorm, "rmsnorm")(),
        )
        residuals = [self.residual.canonical(dataclasses.replace(config, layers=dims.layers)) for dims in sides]
        return dataclasses.replace(config, residual=_agreed(self.residual, residuals))

    def _live_d_ff(self) -> int:
        """d_ff, or 1 where the FFN has no such width: no block is told a number that counts for nothing."""
        return self.d_ff if self.ffn.grows else 1

    def build(self, seed: int, device: str = "cpu") -> Any:
        """The stack's model with its weights drawn from the seed, equal on every device; on 'meta' nothing is drawn.

        That of the default stack is a DecoderLM; each stack documents its own.
        """
        if device == "meta":
            with torch.device("meta"):
                return self.stack.model(self)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed_from(seed, "construction"))
            model = self.stack.model(self)
        sides = {prefix: (self.init.for_side(at), at.layers) for prefix, at in self.stack.sides(self).items()}
        initialise(model, self.init, self.layers, seed, sides)
        with torch.no_grad():
            self.placement.settle(model, self.d_model)
        return model.to(device)


def _agreed(block: Block, forms: list[Block]) -> Block:
    """The form that is the simplest on every side of the model; the block itself where sides differ."""
    return forms[0] if all(form == forms[0] for form in forms) else block


def _offers(mixer: type) -> frozenset[Hook]:
    assert issubclass(mixer, AbstractMixer)
    return mixer.offers | {Hook.EMBEDDING}
