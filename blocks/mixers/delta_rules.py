"""The module that mixers over the delta rule share: projections, a convolution, decays of their own, an output."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from blocks.families import Context, HeadShape, MixerModule, PositionModule, Role, State, linear
from blocks.mixers import heads
from blocks.mixers.recurrence import (
    UNIT_EPS,
    InnerConvolution,
    Projections,
    Segments,
    decays_within,
    masked,
    rotated,
    split_heads,
)
from blocks.ops.delta_rule import CHANNEL_CHUNK, CHUNK, DeltaNeeds, choose_delta_rule, chunked, delta_flops, recurrent
from blocks.ops.gated_scan import empty_state
from search_space.domains import choice


def negative_eigenvalues_field() -> Any:
    """Range of the strengths."""
    return choice(
        False,
        True,
        default=False,
        help="whether a write may overshoot (strengths up to 2, not 1), which lets a state flip and count",
    )


class NoDecay(nn.Module):
    """Nothing is forgotten but what is overwritten."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H 1"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        return torch.zeros(*x.shape[:2], self.heads, 1, device=x.device, dtype=wide)


class DeltaModule(MixerModule):
    """Values kept under unit keys, each write replacing by its strength what the key held (Schlag et al. 2021, eq. 24).

    Queries and keys go through convolution, SiLU and unit norm, in that order; rotations act last, and keep the norm.
    """

    def __init__(
        self,
        *,
        d_model: int,
        shape: HeadShape,
        value_dim: int,
        conv_width: int,
        strongest: float,
        decay: nn.Module,
        output: nn.Module,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.value_dim = value_dim
        self.strongest = strongest
        self.project = Projections(d_model, shape.heads, shape.head_dim, value_dim)
        self.convolve = InnerConvolution(shape.heads * (2 * shape.head_dim + value_dim), conv_width)
        self.strength = linear(d_model, shape.heads, Role.QUERY)
        self.decay = decay
        self.output = output
        chosen = choose_delta_rule(DeltaNeeds())
        self.rule = chosen.run
        self.backends = {"delta rule": chosen.record}

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        x = masked(x, context.live)
        (q, k, v, strength, log_decay), _ = self._inputs(x, {}, position, 0, context.segments)
        if context.live is not None:
            alive = context.live[:, :, None]
            q, strength = q * alive[..., None], strength * alive
            log_decay = torch.where(alive[..., None], log_decay, 0.0)
        return self.output(self.rule(q, k, v, strength, log_decay), x)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        state = empty_state(batch, self.shape.heads, self.shape.head_dim, self.value_dim, device, dtype)
        return {"state": state, **self.convolve.empty_state(batch, device, dtype)}

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        inputs, kept = self._inputs(x, state, position, start, None)
        run = recurrent if x.shape[1] == 1 else chunked
        mixed, after = run(*inputs, state["state"])
        return self.output(mixed, x), {"state": after, **kept}

    def _inputs(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int, segments: Segments
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], State]:
        """Queries, keys, values, strengths and log decays, and what the convolution keeps."""
        parts = self.project.flat(x)
        joined, kept = self.convolve(torch.cat(parts, dim=-1), state, segments)
        q, k, v = (split_heads(y, self.shape.heads) for y in joined.split([part.shape[-1] for part in parts], dim=-1))
        wide = torch.promote_types(v.dtype, torch.float32)
        q, k = (F.normalize(y.to(wide), dim=-1, eps=UNIT_EPS) for y in (q, k))
        q, k = rotated(q, k, position, start)
        strength = self.strongest * torch.sigmoid(self.strength(x).to(wide))
        return (q * self.shape.head_dim**-0.5, k, v, strength, decays_within(self.decay(x), segments)), kept


def mixed_flops(
    d_model: int, shape: HeadShape, value_dim: int, conv_width: int, length: int, causal: bool, per_channel: bool
) -> float:
    """FLOPs per token of the projections, strengths, convolution and delta rule, with neither decays nor output."""
    chunk = min(CHANNEL_CHUNK if per_channel else CHUNK, length)
    pairs = heads.mean_visible(chunk, chunk) if causal else float(chunk)
    channels = shape.heads * (2 * shape.head_dim + value_dim)
    convolution = 2.0 * channels * conv_width if conv_width > 1 else 0.0
    rule = delta_flops(heads=shape.heads, key_dim=shape.head_dim, value_dim=value_dim, chunk=chunk, pairs=pairs)
    return 2.0 * d_model * (channels + shape.heads) + convolution + rule
