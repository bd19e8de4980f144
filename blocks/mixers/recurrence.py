"""What the recurrent mixers share: fields, projections with their short convolution, and gated outputs."""

import math
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from blocks.families import PositionModule, Role, State, linear, mark
from blocks.ops.short_convolution import short_convolution
from search_space.domains import choice

NORM_EPS = 1e-5
"""Added to the mean square of a head before its root."""
UNIT_EPS = 1e-6
"""Least length by which a key is divided."""
FORGET = -1e4
"""A log decay whose exponential is zero."""
Segments = Int[Tensor, "B T"] | None
"""The document of each token where several are packed into a row."""


def heads_field() -> Any:
    """Number of heads."""
    return choice(1, 2, 4, 8, default=4, help="heads; the state holds heads x head_dim x value width numbers")


def head_dim_field() -> Any:
    """Channels per head of queries and keys."""
    return choice(8, 16, 32, 64, 128, default=32, help="query and key channels per head; recall grows with them")


def value_factor_field(default: int) -> Any:
    """Value channels per query channel."""
    return choice(1, 2, default=default, help="value channels per query channel; the state grows with them")


def conv_width_field() -> Any:
    """Taps of the convolution inside a mixer."""
    return choice(
        1, 2, 4, default=4, help="tokens that each channel of queries, keys and values mixes first; 1: no convolution"
    )


def split_heads(x: Float[Tensor, "B T W"], heads: int) -> Float[Tensor, "B T H K"]:
    """Channels dealt out to heads."""
    return rearrange(x, "B T (H K) -> B T H K", H=heads)


def masked(x: Float[Tensor, "B T W"], live: Bool[Tensor, "B T"] | None) -> Float[Tensor, "B T W"]:
    """The rows with padding set to zero."""
    return x if live is None else x * live[:, :, None]


def starts(segments: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """True at the first token of every document but the first of a row."""
    return F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))


def decays_within(log_decay: Float[Tensor, "B T H #K"], segments: Segments) -> Float[Tensor, "B T H #K"]:
    """Log decays that clear the state where a document starts."""
    return log_decay if segments is None else torch.where(starts(segments)[:, :, None, None], FORGET, log_decay)


def packed_convolution(
    x: Float[Tensor, "B T W"], taps: Float[Tensor, "W R"], segments: Int[Tensor, "B T"]
) -> Float[Tensor, "B T W"]:
    """The short convolution of each document by itself, with zeros before its first token."""
    width = taps.shape[1]
    y = x * taps[:, width - 1]
    for back in range(1, min(width, x.shape[1])):
        same = (segments[:, back:] == segments[:, :-back])[:, :, None]
        y = y + F.pad(x[:, :-back] * same, (0, 0, back, 0)) * taps[:, width - 1 - back]
    return y


def rotated(
    q: Float[Tensor, "B T H K"], k: Float[Tensor, "B T H K"], position: PositionModule, start: int
) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T H K"]]:
    """Queries and keys of the same tokens, the first at position `start`, turned by position."""
    if start == 0:
        return position.rotate(q, k)
    # A rotation treats queries and keys alike, and only as a query can a row be given its place in the sequence.
    return position.rotate(q, k, start)[0], position.rotate(k, k, start)[0]


class InnerConvolution(nn.Module):
    """Each channel a weighted sum of its last few values, then SiLU; starts as SiLU alone, and is it at width 1."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.channels = channels
        self.width = width
        if width > 1:
            taps = torch.zeros(channels, width)
            taps[:, -1] = 1.0
            self.taps = mark(nn.Parameter(taps), Role.CONVOLUTION, fan_in=width, fan_out=width)

    def forward(
        self, x: Float[Tensor, "B T W"], state: State, segments: Segments
    ) -> tuple[Float[Tensor, "B T W"], State]:
        """Outputs, and the state after the last token; `state` may be empty before the first."""
        if self.width == 1:
            return F.silu(x), {}
        if segments is not None:
            return F.silu(packed_convolution(x, self.taps, segments)), {}
        history = state.get("inputs", x.new_zeros(x.shape[0], self.width - 1, x.shape[2]))
        kept = torch.cat([history, x.to(history.dtype)], dim=1)[:, x.shape[1] :]
        return F.silu(short_convolution(x, self.taps, history)), {"inputs": kept}

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        """The inputs before the first token, all zero."""
        if self.width == 1:
            return {}
        return {"inputs": torch.zeros(batch, self.width - 1, self.channels, device=device, dtype=dtype)}


class Projections(nn.Module):
    """Queries and keys of H x K channels and values of H x V channels."""

    def __init__(self, d_model: int, heads: int, key_dim: int, value_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = linear(d_model, heads * key_dim, Role.QUERY)
        self.key = linear(d_model, heads * key_dim, Role.KEY)
        self.value = linear(d_model, heads * value_dim, Role.VALUE)

    def flat(self, x: Float[Tensor, "B T D"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, heads side by side."""
        return self.query(x), self.key(x), self.value(x)

    def forward(self, x: Float[Tensor, "B T D"]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (split_heads(part, self.heads) for part in self.flat(x))
        return q, k, v


class LowRank(nn.Module):
    """A linear map through a narrow middle."""

    def __init__(self, d_in: int, rank: int, d_out: int, *, bias: bool = False) -> None:
        super().__init__()
        self.down = linear(d_in, rank, Role.QUERY)
        self.up = linear(rank, d_out, Role.QUERY, bias=bias)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T W"]:
        return self.up(self.down(x))


class HeadNorm(nn.Module):
    """Every head scaled to unit root mean square, centred first where asked; in float32 or wider."""

    def __init__(self, heads: int, value_dim: int, *, centred: bool = False) -> None:
        super().__init__()
        self.gain = mark(nn.Parameter(torch.ones(heads, value_dim)), Role.GAIN)
        self.centred = centred

    def forward(self, y: Float[Tensor, "B T H V"]) -> Float[Tensor, "B T H V"]:
        wide = y.to(torch.promote_types(y.dtype, torch.float32))
        if self.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)
        return (scaled * self.gain).to(y.dtype)


class GatedOutput(nn.Module):
    """Heads normalised, multiplied by SiLU of a gate, and mapped to the model width."""

    def __init__(self, d_model: int, heads: int, value_dim: int, *, centred: bool = False) -> None:
        super().__init__()
        self.norm = HeadNorm(heads, value_dim, centred=centred)
        self.gate = linear(d_model, heads * value_dim, Role.QUERY)
        self.out = linear(heads * value_dim, d_model, Role.MIXER_OUT)

    def forward(self, y: Float[Tensor, "B T H V"], x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        flat = rearrange(self.norm(y), "B T H V -> B T (H V)")
        return self.out(flat * F.silu(self.gate(x)))


class PlainOutput(nn.Module):
    """Heads normalised and mapped to the model width."""

    def __init__(self, d_model: int, heads: int, value_dim: int) -> None:
        super().__init__()
        self.norm = HeadNorm(heads, value_dim)
        self.out = linear(heads * value_dim, d_model, Role.MIXER_OUT)

    def forward(self, y: Float[Tensor, "B T H V"], x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.out(rearrange(self.norm(y), "B T H V -> B T (H V)"))


def spread_rates(count: int, low: float, high: float) -> Float[Tensor, "W"]:
    """Numbers from low to high, their logarithms evenly spaced."""
    return torch.exp(torch.linspace(math.log(low), math.log(high), count))


def inverse_softplus(x: Float[Tensor, "*A"]) -> Float[Tensor, "*A"]:
    """The number whose softplus is x."""
    return x + torch.log(-torch.expm1(-x))


class StepDecay(nn.Module):
    """Log decays -exp(A) * softplus(z + b): A per head, from rates 1 to 16; b per channel, steps of 0.001 to 0.1."""

    def __init__(self, heads: int, channels: int) -> None:
        super().__init__()
        self.log_rate = mark(nn.Parameter(torch.log(torch.linspace(1.0, 16.0, heads))), Role.SCALAR)
        steps = spread_rates(heads * channels, 1e-3, 1e-1).reshape(channels, heads).T
        self.step_bias = mark(nn.Parameter(inverse_softplus(steps).contiguous()), Role.BIAS)

    def steps(self, logits: Float[Tensor, "B T H K"]) -> Float[Tensor, "B T H K"]:
        """The step sizes, in float32 or wider."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.softplus(logits.to(wide) + self.step_bias.to(wide))

    def forward(self, logits: Float[Tensor, "B T H K"]) -> Float[Tensor, "B T H K"]:
        steps = self.steps(logits)
        return -steps * self.log_rate.to(steps.dtype).exp()[:, None]
