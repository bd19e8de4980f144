"""Positions conditioned on content: a convolution over neighbouring embeddings."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from blocks.families import AbstractPosition, Dims, Direction, HeadShape, Hook, PositionModule, Role, State, mark
from blocks.ops.short_convolution import short_convolution
from blocks.registry import register
from search_space.domains import choice


class ConditionalModule(PositionModule):
    """Adds a depthwise convolution of the embedded tokens; outside the sequence, and at padding, there is zero.

    Causal: a token and those before it. Looking both ways: as many on each side.
    """

    def __init__(self, d_model: int, width: int, direction: Direction) -> None:
        super().__init__()
        self.kernel = mark(nn.Parameter(torch.zeros(d_model, width)), Role.POSITION, fan_in=width, fan_out=d_model)
        self.after = 0 if direction == Direction.CAUSAL else (width - 1) // 2

    def embed(
        self, x: Float[Tensor, "B T D"], start: int = 0, live: Bool[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        seen = x if live is None else x * live[:, :, None]
        outside = self.kernel.shape[1] - 1
        padded = nn.functional.pad(seen, (0, 0, outside - self.after, self.after))
        return x + short_convolution(padded[:, outside:], self.kernel, padded[:, :outside])

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        d_model, width = self.kernel.shape
        return {"inputs": torch.zeros(batch, width - 1, d_model, device=device, dtype=dtype)}

    def embed_step(self, x: Float[Tensor, "B T D"], state: State, start: int) -> tuple[Float[Tensor, "B T D"], State]:
        history = state["inputs"]
        kept = torch.cat([history, x.to(history.dtype)], dim=1)[:, x.shape[1] :]
        return x + short_convolution(x, self.kernel, history), {"inputs": kept}


@register
@dataclass(frozen=True, kw_only=True)
class Conditional(AbstractPosition):
    """A short convolution over the embeddings tells tokens apart by their neighbours; runs at any length."""

    kind: ClassVar[str] = "conditional"
    paper: ClassVar[str] = (
        "Conditional Positional Encodings for Vision Transformers, section 3.2, Chu et al. 2021, arXiv:2102.10882"
    )
    proof: ClassVar[str] = "test_conditional_positions_equal_a_depthwise_convolution_with_zeros_outside"
    reference: ClassVar[str] = "torch nn.Conv1d(groups=channels)"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING})
    mixes_tokens: ClassVar[bool] = True

    width: int = choice(3, 5, 7, default=3, help="tokens the convolution spans, the token itself included")

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        return ConditionalModule(dims.d_model, self.width, dims.direction)
