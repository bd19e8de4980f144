"""What placements are made of: the parts around one branch, and a layer of a mixer branch and an FFN branch."""

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import AbstractNorm, AbstractPlacement, Context, Dims, Role, RoutedFFN, mark
from blocks.ffn.none import NoFFN

Branch = Callable[[Tensor], Tensor]


class Gain(nn.Module):
    """A learned factor, one for all channels or one for each."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.gain = mark(nn.Parameter(torch.full((width,), start)), Role.SCALAR if width == 1 else Role.GAIN)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return x * self.gain.to(x.dtype)


class Shift(nn.Module):
    """A learned scalar added to the input, 0 at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = mark(nn.Parameter(torch.zeros(1)), Role.SCALAR)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return x + self.bias.to(x.dtype)


class Around(nn.Module):
    """outer(skip x + scale(dropout(after(f(before(x)))))), where entry(x) stands for x if there is an entry."""

    def __init__(
        self,
        dropout: nn.Module,
        *,
        entry: nn.Module | None = None,
        before: nn.Module | None = None,
        after: nn.Module | None = None,
        scale: nn.Module | None = None,
        outer: nn.Module | None = None,
        skip: float = 1.0,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.entry = entry or nn.Identity()
        self.before = before or nn.Identity()
        self.after = after or nn.Identity()
        self.scale = scale or nn.Identity()
        self.outer = outer or nn.Identity()
        self.skip = skip

    def forward(self, x: Float[Tensor, "B T D"], branch: Branch) -> Float[Tensor, "B T D"]:
        x = self.entry(x)
        added = self.scale(self.dropout(self.after(branch(self.before(x)))))
        return self.outer((x if self.skip == 1 else self.skip * x) + added)


class Sublayer(nn.Module):
    """One branch and what is around it. Called with the residual stream and the branch's further arguments."""

    def __init__(self, around: nn.Module, branch: nn.Module) -> None:
        super().__init__()
        self.around = around
        self.branch = branch

    def forward(self, x: Float[Tensor, "B T D"], *args: Any) -> Float[Tensor, "B T D"]:
        return self.around(x, functools.partial(run_branch, self.branch, args))


class Layer(nn.Module):
    """A mixer branch, then an FFN branch; the latter is left out, norms and all, where there is no FFN."""

    def __init__(self, mixer: nn.Module, around_mixer: nn.Module, ffn: nn.Module, around_ffn: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer
        self.around_mixer = around_mixer
        self.has_ffn = not isinstance(ffn, NoFFN)
        if self.has_ffn:
            self.ffn = ffn
            self.around_ffn = around_ffn

    def forward(self, x: Float[Tensor, "B T D"], *args: Any) -> Float[Tensor, "B T D"]:
        x = self.around_mixer(x, functools.partial(run_branch, self.mixer, args))
        if not self.has_ffn:
            return x
        return self.around_ffn(x, functools.partial(run_ffn, self.ffn, args))


class AbstractEvenPlacement(AbstractPlacement):
    """A placement that wraps every sublayer of a layer alike."""

    @abstractmethod
    def around(self, dims: Dims, layer: int, norm: AbstractNorm, dropout: nn.Module) -> nn.Module:
        """What stands around one sublayer of a layer, called with the stream and the branch."""

    def build(
        self,
        dims: Dims,
        layer: int,
        norm: AbstractNorm,
        mixer: nn.Module,
        ffn: nn.Module,
        dropout: nn.Module,
    ) -> nn.Module:
        around_mixer, around_ffn = (self.around(dims, layer, norm, dropout) for _ in range(2))
        return Layer(mixer, around_mixer, ffn, around_ffn)

    def sublayer(self, dims: Dims, layer: int, norm: AbstractNorm, branch: nn.Module, dropout: nn.Module) -> nn.Module:
        return Sublayer(self.around(dims, layer, norm, dropout), branch)


def run_branch(branch: nn.Module, args: tuple[Any, ...], x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
    """The branch's output with the layer's further arguments; those an FFN that routes has no use for are left out."""
    return run_ffn(branch, args, x) if isinstance(branch, RoutedFFN) else branch(x, *args)


def run_ffn(ffn: nn.Module, args: tuple[Any, ...], x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
    """The FFN's output; one that routes is handed the context, if the layer was called with one."""
    if not isinstance(ffn, RoutedFFN):
        return ffn(x)
    return ffn(x, next((given for given in args if isinstance(given, Context)), None))
