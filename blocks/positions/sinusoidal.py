"""Fixed sinusoids added to the embedding."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from blocks.families import AbstractPosition, Dims, HeadShape, Hook, PositionModule
from blocks.ops.rotation import angles
from blocks.registry import register
from search_space.domains import choice

BASE = 10000.0


def sinusoids(start: int, n_rows: int, d_model: int, device: torch.device, dtype: torch.dtype) -> Float[Tensor, "T D"]:
    """Row p holds sin and cos of p / 10000^(2i/D) in channels 2i and 2i + 1; the last channel of an odd D is a sine."""
    angle = angles(start, n_rows, d_model, BASE, device, dtype)[:, 0]
    return rearrange(torch.stack([angle.sin(), angle.cos()], dim=-1), "T P two -> T (P two)")[:, :d_model]


class SinusoidalModule(PositionModule):
    """Adds the sinusoids; positions count from the first column, padding included."""

    def __init__(self, amplitude: float) -> None:
        super().__init__()
        self.amplitude = amplitude

    def embed(
        self, x: Float[Tensor, "B T D"], start: int = 0, live: Bool[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        return x + self.amplitude * sinusoids(start, x.shape[1], x.shape[2], x.device, wide).to(x.dtype)


@register
@dataclass(frozen=True, kw_only=True)
class Sinusoidal(AbstractPosition):
    """Sines and cosines of the position, added to the token embedding; no parameters, any length."""

    kind: ClassVar[str] = "sinusoidal"
    paper: ClassVar[str] = "Attention Is All You Need, section 3.5, Vaswani et al. 2017, arXiv:1706.03762"
    proof: ClassVar[str] = "test_sinusoids_equal_marian_up_to_the_order_of_channels"
    reference: ClassVar[str] = "transformers MarianSinusoidalPositionalEmbedding"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING})

    amplitude: float = choice(
        0.02,
        0.1,
        1.0,
        default=0.02,
        opt_in=True,
        help="height of the sinusoids; in the paper it equals the standard deviation of the token embedding, which "
        "here starts at 0.02 under scaled_normal; sinusoids far above it drown the tokens",
    )

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        return SinusoidalModule(self.amplitude)
