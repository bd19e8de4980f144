"""The abstract families of blocks, the sizes they are built with, and the roles of parameters.

Every family and every type they exchange stand in this one file, which is therefore longer than others.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from search_space.errors import UserError


class InfeasibleArchitecture(UserError):
    """A point that no model can be built from; the message names the paths, the rule and what would do."""


class Direction(StrEnum):
    """Which tokens a layer may look at."""

    CAUSAL = "causal"
    """The token itself and those before it."""
    BIDIRECTIONAL = "bidirectional"
    """Every token of the sequence."""


CAUSAL_ONLY = frozenset({Direction.CAUSAL})
BOTH_DIRECTIONS = frozenset(Direction)


class Hook(StrEnum):
    """Ways in which a position scheme acts on a mixer."""

    EMBEDDING = "embedding"
    """Something is added to the residual stream before the first layer; every mixer offers it."""
    ROTATE = "rotate"
    """Queries and keys are rotated."""
    SCALE = "scale"
    """Queries and keys are scaled by position, reciprocally."""
    SCORE_BIAS = "score_bias"
    """A bias is added to attention logits before the softmax."""
    CONTENT_BIAS = "content_bias"
    """A bias that depends on queries and keys is added to attention logits before the softmax."""
    PLACE = "place"
    """A bias may depend on where in its sequence a query stands; decoding then has to keep every key."""


class Trait(StrEnum):
    """What a placement provides and an init rule may need: constants of one are derived for the other."""

    NO_NORM = "no_norm"
    """Residual branches are added as they are, with no norm anywhere."""
    BRANCH_BIASES = "branch_biases"
    """No norm; a learned multiplier and scalar biases on each branch."""
    SCALED_RESIDUAL = "scaled_residual"
    """DeepNorm's scaled residual stream under a norm."""
    INNER_NORMS = "inner_norms"
    """A norm before the last linear map of each branch, beside the one before the branch."""


class Role(StrEnum):
    """What a parameter does; initialisation, weight decay and learning-rate rules go by it."""

    EMBEDDING = "embedding"
    POSITION = "position"
    HEAD = "head"
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    MIXER_OUT = "mixer_out"
    FFN_IN = "ffn_in"
    FFN_GATE = "ffn_gate"
    FFN_OUT = "ffn_out"
    ROUTER = "router"
    """Scores a token for each expert."""
    CONVOLUTION = "convolution"
    BIAS_TABLE = "bias_table"
    GAIN = "gain"
    BIAS = "bias"
    SCALAR = "scalar"


MATRICES = frozenset(
    {
        Role.HEAD,
        Role.QUERY,
        Role.KEY,
        Role.VALUE,
        Role.MIXER_OUT,
        Role.FFN_IN,
        Role.FFN_GATE,
        Role.FFN_OUT,
        Role.ROUTER,
    }
)
"""Roles an init rule draws by fan-in and fan-out; EMBEDDING and POSITION are drawn too, the rest start as built."""
RESIDUAL_OUTPUTS = frozenset({Role.MIXER_OUT, Role.FFN_OUT})


def mark(
    parameter: nn.Parameter, role: Role, *, fan_in: int = 0, fan_out: int = 0, active_share: float = 1.0
) -> nn.Parameter:
    """Give a parameter its role and fans; every parameter of a model carries a role.

    `active_share` is the part of it that one token passes through, below 1 where tokens are routed.
    """
    parameter.role = role  # type: ignore[attr-defined]
    parameter.fans = (fan_in, fan_out)  # type: ignore[attr-defined]
    parameter.active_share = active_share  # type: ignore[attr-defined]
    return parameter


def active_share(parameter: nn.Parameter) -> float:
    """The part of a parameter that one token passes through."""
    return getattr(parameter, "active_share", 1.0)


def linear(d_in: int, d_out: int, role: Role, *, bias: bool = False) -> nn.Linear:
    """A linear map whose weight carries its role; biases start at zero."""
    layer = nn.Linear(d_in, d_out, bias=bias)
    assert isinstance(layer.weight, nn.Parameter)
    mark(layer.weight, role, fan_in=d_in, fan_out=d_out)
    if bias:
        nn.init.zeros_(layer.bias)
        mark(layer.bias, Role.BIAS)
    return layer


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Sizes that every block of one model shares."""

    d_model: int
    d_ff: int
    """Inner width of the FFN, gates included: each of its matrices is d_model by d_ff."""
    layers: int
    train_len: int
    """Sequence length the model is trained at."""
    max_len: int
    """Longest sequence the model is ever run on; at least train_len."""
    direction: Direction = Direction.CAUSAL
    """Whether the layers built with these sizes may look ahead."""
    partner_layers: int = 0
    """Layers on the other side of an encoder-decoder; 0 where there is no other side."""


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Sizes a position scheme needs to know of a mixer."""

    heads: int
    kv_heads: int
    head_dim: int


State = dict[str, Tensor]
"""What a causal block carries between tokens while decoding; batch first."""


@dataclass
class Values:
    """How the values of one layer and those of the first meet; see blocks.residual."""

    first: Float[Tensor, "B T V"] | None = None
    """The values of the first layer; None in that layer itself."""
    share: Tensor | float = 1.0
    """The share of a layer's own values in what it uses; the rest is that of the first layer's."""
    own: Float[Tensor, "B T V"] | None = None
    """What the layer made, for the caller to keep."""


@dataclass
class Context:
    """What one forward pass hands to every mixer."""

    live: Bool[Tensor, "B S"] | None = None
    """False where a token is padding: it is never attended to. None: every token is live."""
    segments: Int[Tensor, "B S"] | None = None
    """The document of each token where several are packed into a row: tokens of two documents never meet."""
    prefix: int = 0
    """So many first tokens of each row see each other in both directions; 0 in a causal model."""
    losses: list[Tensor] = field(default_factory=list)
    """Auxiliary losses of this pass, already weighted; the training loop adds them."""
    values: Values | None = None
    """Where a residual form mixes values over layers."""
    memory: Float[Tensor, "B M D"] | None = None
    """What an encoder made of the source, for layers that look at it."""
    memory_live: Bool[Tensor, "B M"] | None = None
    """False where the source is padding."""


LayerCall = Callable[[Tensor, Values | None], Tensor]
"""One layer of a running model: maps the residual stream, and fills in what it was given of Values."""


class ResidualModule(nn.Module):
    """Runs the layers of a model, first to last, and decides what each reads and what becomes of its output."""

    def forward(self, x: Float[Tensor, "B T D"], layers: Sequence[LayerCall]) -> Float[Tensor, "B T D"]:
        """The residual stream after the last layer; position-wise but for what the layers do."""
        raise NotImplementedError


class PositionModule(nn.Module):
    """What a position scheme does in a model; every method defaults to doing nothing.

    `start` is the position of the first row given.
    """

    def embed(
        self, x: Float[Tensor, "B T D"], start: int = 0, live: Bool[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """The residual stream with positions added; padding's content changes no live token."""
        return x

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        """What `embed_step` keeps, before the first token; nothing where positions do not depend on content."""
        return {}

    def embed_step(self, x: Float[Tensor, "B T D"], state: State, start: int) -> tuple[Float[Tensor, "B T D"], State]:
        """`embed` of T further tokens, and the state after them."""
        return self.embed(x, start), {}

    def rotate(
        self, q: Float[Tensor, "B T H K"], k: Float[Tensor, "B S G K"], start: int = 0
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B S G K"]]:
        """Queries at positions start.. and keys at positions 0.. rotated (and scaled) by position.

        Queries are the last T of the S keys when both come from one sequence: start = S - T.
        """
        return q, k

    def score_bias(self, n_query: int, n_key: int, start: int = 0) -> Float[Tensor, "H T S"] | None:
        """Bias on the logits of queries start..start + n_query - 1 against keys 0..n_key - 1; None: no bias."""
        return None

    def content_bias(
        self, q: Float[Tensor, "B T H K"], k: Float[Tensor, "B S G K"], start: int = 0
    ) -> Float[Tensor, "B H T S"] | None:
        """Bias on the scaled logits of queries at start.. against keys at 0.., before they are masked; None: no bias.

        Queries and keys come normed and not rotated. Query head h is served by key head floor(h * G / H).
        """
        return None


class MixerModule(nn.Module):
    """A sequence mixer: mixes information over time, in the direction it was built for."""

    backends: Mapping[str, str] = MappingProxyType({})
    """Per op: the backend chosen at build, and why the others were not."""

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        """Output t depends on inputs 0..t only, unless the mixer was built to be bidirectional."""
        raise NotImplementedError

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        """The state before the first token."""
        raise NotImplementedError

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        """Outputs for T further tokens, the first at position `start`, and the state after them.

        From any split this equals the full pass. The returned tensors are all that decoding keeps: their bytes are the
        model's state size.
        """
        raise NotImplementedError

    def begin(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule
    ) -> tuple[Float[Tensor, "B T D"], State]:
        """Outputs for the tokens of a prefix, which all see each other, and the state after them.

        Only mixers that take a prefix can; `state` is that before the first token.
        """
        raise NotImplementedError


class AbstractMixer:
    """How tokens exchange information."""

    kind: ClassVar[str]
    paper: ClassVar[str]
    offers: ClassVar[frozenset[Hook]]
    directions: ClassVar[frozenset[Direction]] = CAUSAL_ONLY
    """Directions it can be built for; one that can do both reads dims.direction."""
    packs: ClassVar[bool] = False
    """Whether it keeps the documents of Context.segments apart."""
    takes_prefix: ClassVar[bool] = False
    """Whether it honours Context.prefix."""
    value_projection: ClassVar[bool] = False
    """Whether its module makes its values, and nothing else, by a linear map called `value`."""
    weighs_values: ClassVar[bool] = False
    """Whether its module weighs what a map called `value` makes of something else than its input."""

    absorbs: ClassVar[frozenset[Role]] = frozenset()
    """Roles of linear maps of which it applies the weights itself, in decoding at least: nothing may stand at them."""

    def scale_free(self) -> frozenset[Role]:
        """Roles of linear maps one common factor on whose outputs changes nothing."""
        return frozenset()

    def reach(self) -> int | None:
        """Tokens that one layer lets a query see at most, itself included; None: every one before it."""
        return None

    @abstractmethod
    def build(self, dims: Dims) -> MixerModule: ...

    def build_at(self, dims: Dims, layer: int) -> MixerModule:
        """The module of a layer, counted from 0, for mixers whose start depends on depth."""
        return self.build(dims)

    @abstractmethod
    def head_shape(self) -> HeadShape: ...

    @abstractmethod
    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        """Forward FLOPs (two per multiply-add) per token at a sequence length; `causal` counts only visible pairs."""

    def canonical(self, dims: Dims) -> "AbstractMixer":
        """The simplest config that computes the same function at these sizes."""
        return self

    def check(self, dims: Dims) -> None:
        """Raise InfeasibleArchitecture where fields and sizes contradict each other."""


class AbstractPremixer:
    """What each mixer's input passes through first."""

    kind: ClassVar[str]
    paper: ClassVar[str]
    directions: ClassVar[frozenset[Direction]] = CAUSAL_ONLY
    packs: ClassVar[bool] = False
    """Whether it keeps the documents of Context.segments apart."""

    @abstractmethod
    def build(self, dims: Dims) -> MixerModule:
        """A module with the interface of a mixer; the position module is ignored."""

    @abstractmethod
    def flops_per_token(self, dims: Dims) -> float: ...


class AbstractPosition:
    """How the model knows the order of tokens."""

    kind: ClassVar[str]
    paper: ClassVar[str]
    needs: ClassVar[frozenset[Hook]]
    directions: ClassVar[frozenset[Direction]] = BOTH_DIRECTIONS
    relative: ClassVar[bool] = True
    """Whether what it does to mixers depends on distances only, wherever a document starts in its row."""
    mixes_tokens: ClassVar[bool] = False
    """Whether it lets tokens see each other by itself, before the first layer."""

    @abstractmethod
    def build(self, dims: Dims, heads: HeadShape) -> PositionModule: ...

    def flops_per_token(self, dims: Dims, heads: HeadShape, length: int, causal: bool) -> float:
        """Forward FLOPs of matrix products that it adds to a mixer with these heads, per token of such a sequence."""
        return 0.0

    def at_layer(self, layer: int) -> "AbstractPosition":
        """The scheme that acts on the mixer of a layer, counted from 0; all act on the embedding alike."""
        return self

    def canonical(self, dims: Dims) -> "AbstractPosition":
        """The simplest config that computes the same function at these sizes; dead fields go to their default."""
        return self

    def check(self, dims: Dims, heads: HeadShape) -> None:
        """Raise InfeasibleArchitecture where fields and sizes contradict each other."""


class RoutedFFN(nn.Module):
    """An FFN that is told of padding and may add losses: called as ffn(x, context), without one while decoding."""

    def forward(self, x: Float[Tensor, "B T D"], context: Context | None = None) -> Float[Tensor, "B T D"]:
        """Padding changes no live token's output; losses go to context.losses, already weighted."""
        raise NotImplementedError

    def rebalance(self) -> None:
        """What happens between two optimizer steps, outside of gradients."""

    def statistics(self) -> dict[str, Tensor]:
        """Metrics of training since they were last asked for, each a mean over tokens; asking begins anew."""
        return {}


class AbstractFFN:
    """The position-wise feed-forward network."""

    kind: ClassVar[str]
    paper: ClassVar[str]
    width_factor: ClassVar[float]
    """Inner width at equal parameters relative to a two-matrix FFN: 1, or 2/3 with a gate."""
    expansion: float
    """Inner width over model width, before width_factor; a sizing field that blocks.size alone reads."""
    directions: ClassVar[frozenset[Direction]] = BOTH_DIRECTIONS
    grows: ClassVar[bool] = True
    """Whether d_ff decides its size; where not, d_ff counts for nothing."""
    dense: ClassVar[bool] = True
    """Whether it is linear maps around an activation, the last one a module of role FFN_OUT."""

    @abstractmethod
    def build(self, dims: Dims) -> nn.Module:
        """A module [B, T, D] -> [B, T, D], or a RoutedFFN."""

    @abstractmethod
    def flops_per_token(self, dims: Dims) -> float: ...

    def natural_width(self, d_model: int) -> float:
        """The inner width at which a token passes through as many parameters as in any other FFN of this expansion."""
        return self.expansion * self.width_factor * d_model

    def canonical(self, dims: Dims) -> "AbstractFFN":
        """The simplest config that computes the same function at these sizes; dead fields go to their default."""
        return self

    def check(self, dims: Dims) -> None:
        """Raise InfeasibleArchitecture where fields and sizes contradict each other."""


class AbstractNorm:
    """Normalisation over the model width."""

    kind: ClassVar[str]
    paper: ClassVar[str]
    one_factor: ClassVar[bool] = False
    """Whether all it learns is one factor for all channels."""

    @abstractmethod
    def build(self, width: int) -> nn.Module: ...


class AbstractPlacement:
    """Where norms stand around the mixer and the FFN of a layer."""

    kind: ClassVar[str]
    paper: ClassVar[str]
    final_norm: ClassVar[bool]
    """Whether a norm precedes the output head."""
    additive: ClassVar[bool] = True
    """Whether a layer adds to the residual stream and otherwise leaves it as it is."""
    norms_stream: ClassVar[bool] = False
    """Whether the model's norm stands on the residual stream itself in some layer, and has to keep its scale."""
    embedding_norm: ClassVar[bool] = False
    """Whether a norm stands before the first layer."""
    uses_norm: ClassVar[bool] = True
    """Whether the model's norm stands anywhere; where not, it counts for nothing."""
    ffns: ClassVar[int] = 1
    """FFNs in each layer."""
    opens_later: ClassVar[bool] = False
    """Whether a layer starts as the identity: what is inside gets its first gradient after one step."""
    provides: ClassVar[frozenset[Trait]] = frozenset()
    reaches: ClassVar[frozenset[Role]] = frozenset()
    """Roles of linear maps inside the mixer, FFN_OUT inside the FFN, that it puts norms at."""

    @abstractmethod
    def build(
        self,
        dims: Dims,
        layer: int,
        norm: AbstractNorm,
        mixer: nn.Module,
        ffn: nn.Module,
        dropout: nn.Module,
    ) -> nn.Module:
        """The layer, counted from 0; `mixer` maps [B, T, D] with whatever more arguments the layer is called with."""

    def sublayer(
        self, dims: Dims, layer: int, norm: AbstractNorm, branch: nn.Module, dropout: nn.Module
    ) -> nn.Module | None:
        """One sublayer as the placement wraps it, for layers of more than a mixer and an FFN; None: it cannot."""
        return None

    def layer_form(self, dims: Dims, layer: int) -> object:
        """What tells the form of a layer from that of others, counted from 0; layers of one form can share a block."""
        return None

    def settle(self, model: nn.Module, d_model: int) -> None:
        """What is done to a model's weights, in place, once they are drawn and after each step of the optimizer."""

    def canonical(self, dims: Dims) -> "AbstractPlacement":
        """The simplest config that computes the same function at these sizes."""
        return self

    def without_ffn(self) -> "AbstractPlacement":
        """The simplest config that computes the same function in layers that have no FFN."""
        return self

    def check(self, config: Any) -> None:
        """Raise InfeasibleArchitecture where the rest of a ModelConfig contradicts the placement."""


class AbstractInit:
    """The rule that draws every matrix and embedding."""

    kind: ClassVar[str]
    paper: ClassVar[str]

    needs: ClassVar[frozenset[Trait]] = frozenset()
    """What its placement must provide."""
    opens_later: ClassVar[bool] = False
    """Whether branches start at zero: what is inside gets its first gradient after one step."""
    amplifies: ClassVar[bool] = False
    """Whether a branch returns more than it is given, so that norms alone keep the residual stream finite."""
    relates: ClassVar[bool] = False
    """Whether drawing matrices that depend on each other is all that tells it from a plainer rule."""

    @abstractmethod
    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        """Standard deviation of a weight with this role and these fans in a model of so many layers."""

    def std_at(self, role: Role, fan_in: int, fan_out: int, layers: int, layer: int) -> float:
        """The same for a weight of one layer, counted from 0."""
        return self.std(role, fan_in, fan_out, layers)

    @abstractmethod
    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        """Draw the weight in place; one of three axes holds a matrix per expert."""

    def fill_table(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        """Draw an embedding or a table of positions in place."""
        self.fill(weight, std, generator)

    def relate(self, matrices: Mapping[Role, nn.Parameter], heads: HeadShape, generator: torch.Generator) -> None:
        """Draw matrices of one mixer, by role, that depend on each other; called after each was drawn alone."""

    def can_relate(self, matrices: Mapping[Role, nn.Parameter], heads: HeadShape) -> bool:
        """Whether some of these matrices can be drawn so; asked of rules that relate only."""
        return True

    def learning_rate_factor(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        """The learning rate of a parameter over the optimizer's, for Adam and its kin."""
        return 1.0

    def branch_multiplier(self, layers: int) -> float:
        """Factor on what each branch adds to the residual stream."""
        return 1.0

    def logit_multiplier(self, d_model: int) -> float:
        """Factor on the logits."""
        return 1.0

    def query_multiplier(self, head_dim: int) -> float:
        """Factor on queries where they are projected."""
        return 1.0

    def for_side(self, dims: Dims) -> "AbstractInit":
        """The rule for one side of an encoder-decoder, whose layers have these sizes."""
        return self

    def canonical(self, dims: Dims) -> "AbstractInit":
        """The simplest rule that draws and multiplies alike at these sizes."""
        return self


class AbstractPattern:
    """How mixers alternate over the layers."""

    kind: ClassVar[str]
    paper: ClassVar[str]

    @abstractmethod
    def mixers(self, main: Any, layers: int) -> tuple[Any, ...]:
        """The mixer config of each layer, first layer first."""

    def canonical(self, main: Any, dims: Dims) -> "AbstractPattern":
        """The simplest pattern that gives every layer the same mixer around a canonical main mixer."""
        return self


class AbstractStack:
    """What is built of the layers, and which way they look."""

    kind: ClassVar[str]
    paper: ClassVar[str]
    direction: ClassVar[Direction]
    """The direction of the layers that ModelConfig.dims() is about."""
    directions: ClassVar[frozenset[Direction]]
    """Every direction in which its layers look."""
    position_direction: ClassVar[Direction]
    """The direction that position schemes are built for."""
    predicts_next: ClassVar[bool] = False
    """Whether forward(tokens, live, checkpointing) gives logits of the token after each."""

    @abstractmethod
    def model(self, config: Any) -> nn.Module:
        """The model of a ModelConfig, its weights not yet drawn."""

    def parts(self, config: Any) -> list[nn.Module]:
        """What the model has beyond the embedding, layers, norms and head of a decoder of this ModelConfig."""
        return []

    def flops_per_token(self, config: Any, length: int, causal: bool) -> float:
        """Forward FLOPs of those parts, per token of the sequence that the decoder's layers run on."""
        return 0.0

    def partner_layers(self) -> int:
        """Layers that stand beside those of the ModelConfig, on the other side of an encoder-decoder."""
        return 0

    def sides(self, config: Any) -> Mapping[str, Dims]:
        """The sizes of the layers of each side, by how the names of its parameters begin; empty with one side.

        The first that fits a name counts.
        """
        return {}

    def check(self, config: Any) -> None:
        """Raise InfeasibleArchitecture where the rest of a ModelConfig contradicts the stack."""


class AbstractResidual:
    """How the residual stream passes from layer to layer."""

    kind: ClassVar[str]
    paper: ClassVar[str]

    @abstractmethod
    def build(self, dims: Dims) -> ResidualModule: ...

    def block_of(self, layer: int, layers: int) -> int:
        """The block whose parameters a layer uses, both counted from 0; blocks come in the order of first use."""
        return layer

    def flops_per_token(self, dims: Dims) -> float:
        """Forward FLOPs per token of all layers together, beyond what the layers do."""
        return 0.0

    def canonical(self, config: Any) -> "AbstractResidual":
        """The simplest config that computes the same function with the rest of this ModelConfig."""
        return self

    def check(self, config: Any) -> None:
        """Raise InfeasibleArchitecture where the rest of a ModelConfig contradicts the residual form."""
