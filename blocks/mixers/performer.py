"""Performer: softmax attention estimated by products of positive random features."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from blocks.families import (
    BOTH_DIRECTIONS,
    AbstractMixer,
    Context,
    Dims,
    Direction,
    HeadShape,
    Hook,
    MixerModule,
    PositionModule,
    Role,
    State,
    linear,
)
from blocks.mixers import recurrence
from blocks.mixers.gated_scans import mixed_flops
from blocks.ops.gated_scan import ScanNeeds, choose_gated_scan, chunked, empty_state, recurrent
from blocks.ops.linear_attention import EMPTY, over_all, over_all_flops
from blocks.registry import register
from search_space.domains import choice


def orthogonal_directions(count: int, width: int) -> Float[Tensor, "M K"]:
    """Random rows, orthogonal in blocks of `width`, each as long as a Gaussian vector (Choromanski et al., 2.4)."""
    frames = []
    for _ in range(-(-count // width)):
        q, r = torch.linalg.qr(torch.randn(width, width))
        # A factorisation fixes the signs of r as it likes; only with positive ones is the frame uniform, and unbiased.
        frames.append(q * r.diagonal().sign())
    return torch.cat(frames)[:count] * torch.randn(count, width).norm(dim=-1, keepdim=True)


def log_features(x: Float[Tensor, "*A K"], directions: Float[Tensor, "M K"]) -> Float[Tensor, "*A M"]:
    """Logarithms of M features whose product has the mean exp(q.k / sqrt(K)) (eq. 5), in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scaled = x.to(wide) * x.shape[-1] ** -0.25
    projected = einsum(scaled, directions.to(wide), "... K, M K -> ... M")
    return projected - scaled.square().sum(-1, keepdim=True) / 2 - math.log(directions.shape[0]) / 2


class PerformerModule(MixerModule):
    """Normalised linear attention over exponential features, kept relative to the largest seen so far, or of all.

    That maximum cancels between numerator and denominator; as a decay of the state it keeps every feature in (0, 1].
    A rotation would be exact in the mean only: one draw of features knows where a sequence starts.
    """

    directions: Tensor

    def __init__(self, *, d_model: int, shape: HeadShape, features: int, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.shape = shape
        self.project = recurrence.Projections(d_model, shape.heads, shape.head_dim, shape.head_dim)
        self.out = linear(shape.heads * shape.head_dim, d_model, Role.MIXER_OUT)
        self.register_buffer("directions", orthogonal_directions(features, shape.head_dim))
        chosen = choose_gated_scan(ScanNeeds())
        self.scan = chosen.run
        self.backends = {"gated scan": chosen.record if causal else "over_all (not scanned: no order in time)"}

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        if not self.causal:
            mixed = self._over_all(x, context.live, context.segments)
            return self.out(rearrange(mixed, "B T H V -> B T (H V)"))
        nothing = torch.full((x.shape[0], 1, self.shape.heads), -torch.inf, device=x.device)
        inputs, _ = self._inputs(x, nothing, context.live)
        q, k, v, log_decay = inputs
        return self._join(self.scan(q, k, v, recurrence.decays_within(log_decay, context.segments)), x)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        heads, width = self.shape.heads, self.shape.head_dim
        state = empty_state(batch, heads, self.directions.shape[0], width + 1, device, dtype)
        return {"state": state, "largest": torch.full((batch, 1, heads), -torch.inf, device=device, dtype=state.dtype)}

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        inputs, largest = self._inputs(x, state["largest"], None)
        run = recurrent if x.shape[1] == 1 else chunked
        mixed, after = run(*inputs, state["state"])
        return self._join(mixed, x), {"state": after, "largest": largest}

    def _inputs(
        self,
        x: Float[Tensor, "B T D"],
        before: Float[Tensor, "B 1 H"],
        live: Bool[Tensor, "B T"] | None,
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Float[Tensor, "B 1 H"]]:
        """Query and key features, values with a column of ones, and log decays; and the largest log feature so far."""
        q, k, v = self.project(x)
        log_q, log_k = log_features(q, self.directions), log_features(k, self.directions)
        if live is not None:
            log_k = torch.where(live[:, :, None, None], log_k, -torch.inf)
        # The outputs do not depend on the maximum, so no gradient flows through it.
        own = log_k.detach().amax(-1)
        running = torch.cat([before.to(own.dtype), own], dim=1).cummax(1).values
        started = running > -torch.inf
        floor = torch.where(started, running, 0.0)
        decay = torch.where(started[:, :-1], floor[:, :-1] - floor[:, 1:], 0.0)[..., None]
        features_q = torch.exp(log_q - log_q.detach().amax(-1, keepdim=True))
        features_k = torch.exp(log_k - floor[:, 1:, :, None])
        if live is not None:
            features_q = torch.where(live[:, :, None, None], features_q, 0.0)
        values = torch.cat([v.to(log_q.dtype), torch.ones_like(log_q[..., :1])], dim=-1)
        return (features_q, features_k, values, decay), running[:, -1:]

    def _over_all(
        self, x: Float[Tensor, "B T D"], live: Bool[Tensor, "B T"] | None, segments: Int[Tensor, "B T"] | None
    ) -> Float[Tensor, "B T H V"]:
        """Every token reads all of its document; features are kept relative to the largest of it."""
        q, k, v = self.project(x)
        log_q, log_k = log_features(q, self.directions), log_features(k, self.directions)
        if live is not None:
            log_k = torch.where(live[:, :, None, None], log_k, -torch.inf)
        own = log_k.detach().amax(-1)
        if segments is None:
            largest = own.amax(1, keepdim=True)
        else:
            same = segments[:, :, None] == segments[:, None, :]
            largest = torch.where(same[..., None], own[:, None], -torch.inf).amax(2)
        floor = torch.where(largest > -torch.inf, largest, 0.0)
        features_q = torch.exp(log_q - log_q.detach().amax(-1, keepdim=True))
        features_k = torch.exp(log_k - floor[..., None])
        if live is not None:
            features_q = torch.where(live[:, :, None, None], features_q, 0.0)
        return over_all(features_q, features_k, v, features_q, features_k, segments)

    def _join(self, mixed: Float[Tensor, "B T H V"], x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        total, weight = mixed[..., :-1], mixed[..., -1:]
        filled = weight > EMPTY
        y = torch.where(filled, total / torch.where(filled, weight, 1.0), 0.0)
        return self.out(rearrange(y.to(x.dtype), "B T H V -> B T (H V)"))


@register
@dataclass(frozen=True, kw_only=True)
class Performer(AbstractMixer):
    """An unbiased estimate of softmax attention with a state of fixed size; more features, a smaller error."""

    kind: ClassVar[str] = "performer"
    paper: ClassVar[str] = "Rethinking Attention with Performers, Choromanski et al. 2020, arXiv:2009.14794"
    proof: ClassVar[str] = "test_performer_is_the_quotient_of_its_features"
    reference: ClassVar[str] = "its quadratic form, written out in the test"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING})
    directions: ClassVar[frozenset[Direction]] = BOTH_DIRECTIONS
    packs: ClassVar[bool] = True

    heads: int = recurrence.heads_field()
    head_dim: int = recurrence.head_dim_field()
    features: int = choice(
        32, 64, 128, 256, default=64, help="random features per head; the error falls with their root"
    )

    def build(self, dims: Dims) -> MixerModule:
        return PerformerModule(
            d_model=dims.d_model,
            shape=self.head_shape(),
            features=self.features,
            causal=dims.direction == Direction.CAUSAL,
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.heads, kv_heads=self.heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        width = self.heads * self.head_dim
        projections = 8.0 * dims.d_model * width
        features = 4.0 * width * self.features
        if dims.direction != Direction.CAUSAL:
            return projections + features + over_all_flops(self.heads, self.features, self.head_dim)
        over = HeadShape(heads=self.heads, kv_heads=self.heads, head_dim=self.features)
        return projections + features + mixed_flops(over, self.head_dim + 1, length, causal, per_channel=False)
