"""The abstract families of blocks, the sizes they are built with, and the roles of parameters."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from search_space.errors import UserError


class InfeasibleArchitecture(UserError):
    """A point that no model can be built from; the message names the paths, the rule and what would do."""


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
    CONVOLUTION = "convolution"
    BIAS_TABLE = "bias_table"
    GAIN = "gain"
    BIAS = "bias"
    SCALAR = "scalar"


MATRICES = frozenset(
    {Role.HEAD, Role.QUERY, Role.KEY, Role.VALUE, Role.MIXER_OUT, Role.FFN_IN, Role.FFN_GATE, Role.FFN_OUT}
)
"""Roles an init rule draws by fan-in and fan-out; EMBEDDING and POSITION are drawn too, the rest start as built."""
RESIDUAL_OUTPUTS = frozenset({Role.MIXER_OUT, Role.FFN_OUT})


def mark(parameter: nn.Parameter, role: Role, *, fan_in: int = 0, fan_out: int = 0) -> nn.Parameter:
    """Give a parameter its role and fans; every parameter of a model carries a role."""
    parameter.role = role  # type: ignore[attr-defined]
    parameter.fans = (fan_in, fan_out)  # type: ignore[attr-defined]
    return parameter


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


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Sizes a position scheme needs to know of a mixer."""

    heads: int
    kv_heads: int
    head_dim: int


State = dict[str, Tensor]
"""What a causal block carries between tokens while decoding; batch first."""


@dataclass
class Context:
    """What one forward pass hands to every mixer."""

    live: Bool[Tensor, "B S"] | None = None
    """False where a token is padding: it is never attended to. None: every token is live."""
    losses: list[Tensor] = field(default_factory=list)
    """Auxiliary losses of this pass, already weighted; the training loop adds them."""


class PositionModule(nn.Module):
    """What a position scheme does in a model; every method defaults to doing nothing.

    `start` is the position of the first row given.
    """

    def embed(self, x: Float[Tensor, "B T D"], start: int = 0) -> Float[Tensor, "B T D"]:
        """The residual stream with positions added."""
        return x

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


class MixerModule(nn.Module):
    """A causal sequence mixer: mixes information over time. All are causal in this registry's decoders."""

    backends: Mapping[str, str] = MappingProxyType({})
    """Per op: the backend chosen at build, and why the others were not."""

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        """Output t depends on inputs 0..t only."""
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


class AbstractMixer:
    """How tokens exchange information."""

    kind: ClassVar[str]
    paper: ClassVar[str]
    offers: ClassVar[frozenset[Hook]]

    @abstractmethod
    def build(self, dims: Dims) -> MixerModule: ...

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

    @abstractmethod
    def build(self, dims: Dims, heads: HeadShape) -> PositionModule: ...

    def canonical(self, dims: Dims) -> "AbstractPosition":
        """The simplest config that computes the same function at these sizes; dead fields go to their default."""
        return self

    def check(self, dims: Dims, heads: HeadShape) -> None:
        """Raise InfeasibleArchitecture where fields and sizes contradict each other."""


class AbstractFFN:
    """The position-wise feed-forward network."""

    kind: ClassVar[str]
    paper: ClassVar[str]
    width_factor: ClassVar[float]
    """Inner width at equal parameters relative to a two-matrix FFN: 1, or 2/3 with a gate."""
    expansion: float
    """Inner width over model width, before width_factor; a sizing field that blocks.size alone reads."""

    @abstractmethod
    def build(self, dims: Dims) -> nn.Module:
        """A module [B, T, D] -> [B, T, D]."""

    @abstractmethod
    def flops_per_token(self, dims: Dims) -> float: ...


class AbstractNorm:
    """Normalisation over the model width."""

    kind: ClassVar[str]
    paper: ClassVar[str]

    @abstractmethod
    def build(self, width: int) -> nn.Module: ...


class AbstractPlacement:
    """Where norms stand around the mixer and the FFN of a layer."""

    kind: ClassVar[str]
    paper: ClassVar[str]
    final_norm: ClassVar[bool]
    """Whether a norm precedes the output head."""

    @abstractmethod
    def build(self, dims: Dims, norm: AbstractNorm, mixer: nn.Module, ffn: nn.Module, dropout: nn.Module) -> nn.Module:
        """The layer; `mixer` maps [B, T, D] with whatever further arguments the layer is called with."""


class AbstractInit:
    """The rule that draws every matrix and embedding."""

    kind: ClassVar[str]
    paper: ClassVar[str]

    @abstractmethod
    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        """Standard deviation of a weight with this role and these fans in a model of so many layers."""

    @abstractmethod
    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        """Draw the weight in place."""


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
