"""Rotation of some channels by frequencies of their own, and the frequencies that published schemes use."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from blocks.ops.rotation import rotate_pairs


def turned(
    x: Float[Tensor, "B T H K"], start: int, frequencies: Float[Tensor, "P"], factor: float = 1.0
) -> Float[Tensor, "B T H K"]:
    """The first 2P channels turned: pair i at position p by p times its frequency, then scaled; the others as they are.

    Channel i of the turned part is paired with channel i + P. Row 0 stands at position `start`.
    """
    width = 2 * frequencies.shape[0]
    position = torch.arange(start, start + x.shape[1], device=x.device, dtype=frequencies.dtype)
    angle = position[:, None, None] * frequencies
    part = (factor * rotate_pairs(x[..., :width], angle)).to(x.dtype)
    return part if width == x.shape[3] else torch.cat([part, x[..., width:]], dim=-1)


def plain_frequencies(width: int, base: float, device: torch.device, dtype: torch.dtype) -> Float[Tensor, "P"]:
    """base^(-2i/width) for each pair i (Su et al. 2021)."""
    return base ** (-torch.arange(0, width, 2, device=device, dtype=dtype) / width)


def highest_frequencies(
    width: int, base: float, kept: int, device: torch.device, dtype: torch.dtype
) -> Float[Tensor, "P"]:
    """The plain frequencies, all but the `kept` highest set to zero (Barbero et al. 2024, section 6)."""
    pair = torch.arange(width // 2, device=device)
    return plain_frequencies(width, base, device, dtype) * (pair < kept)


def interpolated_frequencies(
    width: int, base: float, scale: float, device: torch.device, dtype: torch.dtype
) -> Float[Tensor, "P"]:
    """All frequencies divided by the scale (Chen et al. 2023, eq. 3)."""
    return plain_frequencies(width, base, device, dtype) / scale


def ntk_frequencies(
    width: int, base: float, scale: float, device: torch.device, dtype: torch.dtype
) -> Float[Tensor, "P"]:
    """A larger base: the highest frequency stays, the lowest is divided by the scale (Peng et al. 2023, 3.1)."""
    return plain_frequencies(width, base * scale ** (width / (width - 2)), device, dtype)


YARN_FAST, YARN_SLOW = 32.0, 1.0
"""Turns over the training length from which a pair is left alone, and below which it is interpolated."""


def yarn_frequencies(
    width: int, base: float, scale: float, train_len: int, device: torch.device, dtype: torch.dtype
) -> Float[Tensor, "P"]:
    """Fast pairs as they are, slow ones divided by the scale, a ramp between (Peng et al. 2023, section 3.2).

    The ramp is linear in the pair, between whole pairs, as in the published code.
    """

    def pair_of(turns: float) -> float:
        return width * math.log(train_len / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = max(math.floor(pair_of(YARN_FAST)), 0), min(math.ceil(pair_of(YARN_SLOW)), width - 1)
    pair = torch.arange(width // 2, device=device, dtype=dtype)
    slow = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    plain = plain_frequencies(width, base, device, dtype)
    return plain / scale * slow + plain * (1 - slow)


def yarn_factor(scale: float) -> float:
    """What queries and keys are multiplied with; logits get its square (Peng et al. 2023, eq. 22)."""
    return 0.1 * math.log(scale) + 1.0


LLAMA_FAST, LLAMA_SLOW = 4.0, 1.0
"""As for YaRN, in turns over the training length."""


def llama3_frequencies(
    width: int, base: float, scale: float, train_len: int, device: torch.device, dtype: torch.dtype
) -> Float[Tensor, "P"]:
    """Fast pairs as they are, slow ones divided by the scale, between them linear in the number of turns."""
    plain = plain_frequencies(width, base, device, dtype)
    turns = train_len * plain / (2 * math.pi)
    fast = ((turns - LLAMA_SLOW) / (LLAMA_FAST - LLAMA_SLOW)).clamp(0, 1)
    return plain / scale * (1 - fast) + plain * fast
