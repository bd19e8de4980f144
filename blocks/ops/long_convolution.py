"""Causal convolution with a filter as long as the sequence: one function in a direct, a blocked and a transformed form.

y_t = sum_{s<=t} h_{t-s} u_s for every channel. The blocked form forms short distances directly and carries each block
into the one after it by a transform, block sizes doubling: exactly causal, gradients included, in n log^2 n. One
transform over the whole sequence is faster, but its rounding lets every output depend on every input, in the last
digits. All is computed in float32 or wider, whatever the input.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from blocks.ops.backends import Backend, Chosen, choose
from blocks.ops.gated_scan import widened
from blocks.ops.precision import full_precision

BLOCK = 32
"""Tokens within which distances are formed directly."""


def direct(u: Float[Tensor, "B T W"], taps: Float[Tensor, "T W"]) -> Float[Tensor, "B T W"]:
    """The definition: every visible pair is formed, a matrix of distances per channel."""
    with full_precision(u.device):
        values, taps = widened(u, taps)
        return einsum(_distances(taps), values, "T S W, B S W -> B T W").to(u.dtype)


def transformed(u: Float[Tensor, "B T W"], taps: Float[Tensor, "T W"]) -> Float[Tensor, "B T W"]:
    """One product of transforms over twice the length, so that nothing wraps around."""
    with full_precision(u.device):
        values, taps = widened(u, taps)
        size = 2 * u.shape[1]
        product = torch.fft.rfft(values, n=size, dim=1) * torch.fft.rfft(taps, n=size, dim=0)
        return torch.fft.irfft(product, n=size, dim=1)[:, : u.shape[1]].to(u.dtype)


def blocked(u: Float[Tensor, "B T W"], taps: Float[Tensor, "T W"], block: int = BLOCK) -> Float[Tensor, "B T W"]:
    """Direct within blocks; from each even block of every doubled size into the odd one after it by transforms."""
    n_tokens = u.shape[1]
    with full_precision(u.device):
        values, taps = widened(u, taps)
        size = block
        while size < n_tokens:
            size *= 2
        values = F.pad(values, (0, 0, 0, size - n_tokens))
        taps = F.pad(taps, (0, 0, 0, size - n_tokens))
        within = rearrange(values, "B (N C) W -> B N C W", C=block)
        y = rearrange(einsum(_distances(taps[:block]), within, "C S W, B N S W -> B N C W"), "B N C W -> B (N C) W")
        while block < size:
            y = y + _carried(values, taps, block)
            block *= 2
        return y[:, :n_tokens].to(u.dtype)


def _carried(values: Float[Tensor, "B T W"], taps: Float[Tensor, "T W"], block: int) -> Float[Tensor, "B T W"]:
    """What each odd block gets from the even block before it; zero in even blocks."""
    early = rearrange(values, "B (N two C) W -> B N two C W", two=2, C=block)[:, :, 0]
    product = torch.fft.rfft(early, n=2 * block, dim=2) * torch.fft.rfft(taps[: 2 * block], n=2 * block, dim=0)
    # Sums over distances 1 to 2C - 1 that end in the later block do not wrap around in a transform of 2C.
    late = torch.fft.irfft(product, n=2 * block, dim=2)[:, :, block:]
    return rearrange(torch.stack([torch.zeros_like(late), late], dim=2), "B N two C W -> B (N two C) W")


def _distances(taps: Float[Tensor, "T W"]) -> Float[Tensor, "T S W"]:
    """The tap between each pair of tokens; zero where the second lies ahead."""
    place = torch.arange(taps.shape[0], device=taps.device)
    distance = place[:, None] - place
    return torch.where((distance >= 0)[..., None], taps[distance.clamp(min=0)], 0.0)


ConvolutionOp = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ConvolutionNeeds:
    """What a block asks of a long convolution beyond its output."""

    exactly_causal: bool = True
    """Whether not even rounding may carry anything from a later token to an earlier one."""


_BACKENDS: tuple[Backend[ConvolutionOp, ConvolutionNeeds], ...] = (
    Backend(
        name="transformed",
        run=transformed,
        refuses=lambda needs: "its rounding is not causal" if needs.exactly_causal else "",
    ),
    Backend(name="blocked", run=blocked, refuses=lambda needs: ""),
    Backend(name="direct", run=direct, refuses=lambda needs: ""),
)


def choose_long_convolution(needs: ConvolutionNeeds, named: str = "auto") -> Chosen[ConvolutionOp]:
    """The backend for whole sequences; a named one is used or refused, never replaced."""
    return choose("long convolution", _BACKENDS, needs, named)
