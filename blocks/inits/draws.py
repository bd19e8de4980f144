"""Distributions that init rules draw from, each of a given standard deviation."""

import math

import torch
from torch import Tensor, nn


def normal(weight: Tensor, std: float, generator: torch.Generator) -> None:
    """Gaussian."""
    weight.normal_(0.0, std, generator=generator)


def uniform(weight: Tensor, std: float, generator: torch.Generator) -> None:
    """Even between plus and minus sqrt(3) std."""
    bound = math.sqrt(3) * std
    weight.uniform_(-bound, bound, generator=generator)


def truncated(weight: Tensor, sigma: float, cut: float, generator: torch.Generator) -> None:
    """Gaussian of width sigma, cut at plus and minus `cut` sigma: its deviation is `kept(cut)` sigma."""
    nn.init.trunc_normal_(weight, 0.0, sigma, -cut * sigma, cut * sigma, generator=generator)


def kept(cut: float) -> float:
    """The standard deviation of a unit Gaussian cut at plus and minus `cut`."""
    density = math.exp(-cut * cut / 2) / math.sqrt(2 * math.pi)
    return math.sqrt(1 - 2 * cut * density / math.erf(cut / math.sqrt(2)))


def orthogonal(weight: Tensor, std: float, generator: torch.Generator) -> None:
    """Rows or columns orthogonal and of equal length, in each matrix of a stack of them."""
    gain = std * math.sqrt(max(weight.shape[-2:]))
    for matrix in weight.flatten(0, -3) if weight.dim() > 2 else weight[None]:
        nn.init.orthogonal_(matrix, gain, generator=generator)
