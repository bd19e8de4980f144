"""Mamba2: a state space layer with one decay per head and token, which is a gated scan."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from blocks.families import (
    AbstractMixer,
    Context,
    Dims,
    HeadShape,
    Hook,
    MixerModule,
    PositionModule,
    Role,
    State,
    linear,
    mark,
)
from blocks.mixers import recurrence
from blocks.mixers.gated_scans import mixed_flops
from blocks.ops.gated_scan import ScanNeeds, choose_gated_scan, chunked, empty_state, recurrent
from blocks.registry import register
from search_space.domains import choice


class Mamba2Module(MixerModule):
    """State space duality (Dao and Gu 2024, section 7): queries C and keys B are shared by all heads.

    S_t = exp(-dt_t exp(A)) S_{t-1} + dt_t B_t v_t^T and y_t = S_t^T C_t + D v_t, with v, B and C convolved before; the
    output is multiplied by SiLU of a gate, normalised over its whole width, and mapped to the model width.
    """

    def __init__(self, *, d_model: int, heads: int, value_dim: int, state_dim: int, conv_width: int) -> None:
        super().__init__()
        self.heads, self.value_dim, self.state_dim = heads, value_dim, state_dim
        width = heads * value_dim
        self.value = linear(d_model, width, Role.VALUE)
        self.key = linear(d_model, state_dim, Role.KEY)
        self.query = linear(d_model, state_dim, Role.QUERY)
        self.step_size = linear(d_model, heads, Role.QUERY)
        self.gate = linear(d_model, width, Role.QUERY)
        self.convolve = recurrence.InnerConvolution(width + 2 * state_dim, conv_width)
        self.decay = recurrence.StepDecay(heads, 1)
        self.skip = mark(nn.Parameter(torch.ones(heads)), Role.SCALAR)
        self.norm = recurrence.HeadNorm(1, width)
        self.out = linear(width, d_model, Role.MIXER_OUT)
        chosen = choose_gated_scan(ScanNeeds())
        self.scan = chosen.run
        self.backends = {"gated scan": chosen.record}

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        x = recurrence.masked(x, context.live)
        (c, b, v, log_decay), _ = self._inputs(x, {}, context.segments)
        if context.live is not None:
            alive = context.live[:, :, None, None]
            b, v, log_decay = b * alive, v * alive, torch.where(alive, log_decay, 0.0)
        return self._join(self.scan(c, b, v, log_decay), v, x)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        state = empty_state(batch, self.heads, self.state_dim, self.value_dim, device, dtype)
        return {"state": state, **self.convolve.empty_state(batch, device, dtype)}

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        inputs, kept = self._inputs(x, state, None)
        run = recurrent if x.shape[1] == 1 else chunked
        mixed, after = run(*inputs, state["state"])
        return self._join(mixed, inputs[2], x), {"state": after, **kept}

    def _inputs(
        self, x: Float[Tensor, "B T D"], state: State, segments: recurrence.Segments
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], State]:
        """C, dt * B, v and log decays, per head, and what the convolution keeps."""
        joined, kept = self.convolve(torch.cat([self.value(x), self.key(x), self.query(x)], dim=-1), state, segments)
        v, b, c = joined.split([self.heads * self.value_dim, self.state_dim, self.state_dim], dim=-1)
        logits = self.step_size(x)[..., None]
        steps = self.decay.steps(logits)
        b, c = (repeat(y, "B T K -> B T H K", H=self.heads) for y in (b, c))
        return (
            c,
            steps * b,
            recurrence.split_heads(v, self.heads),
            recurrence.decays_within(self.decay(logits), segments),
        ), kept

    def _join(
        self, mixed: Float[Tensor, "B T H V"], v: Float[Tensor, "B T H V"], x: Float[Tensor, "B T D"]
    ) -> Float[Tensor, "B T D"]:
        y = rearrange(mixed + self.skip[:, None] * v, "B T H V -> B T (H V)") * F.silu(self.gate(x))
        return self.out(self.norm(y[:, :, None])[:, :, 0])


@register
@dataclass(frozen=True, kw_only=True)
class Mamba2(AbstractMixer):
    """A state space layer: each head fades at a pace chosen token by token; what to write and to read is shared."""

    kind: ClassVar[str] = "mamba2"
    paper: ClassVar[str] = (
        "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality, "
        "Dao and Gu 2024, arXiv:2405.21060"
    )
    proof: ClassVar[str] = "test_mamba2_equals_transformers"
    reference: ClassVar[str] = "transformers Mamba2Mixer"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING})
    packs: ClassVar[bool] = True

    heads: int = recurrence.heads_field()
    head_dim: int = choice(8, 16, 32, 64, 128, default=64, help="value channels per head")
    state_dim: int = choice(16, 32, 64, 128, default=64, help="state numbers per value channel; recall grows with them")
    conv_width: int = choice(
        1, 2, 4, default=4, help="tokens that each channel mixes before the state; 1: no convolution"
    )

    def build(self, dims: Dims) -> MixerModule:
        return Mamba2Module(
            d_model=dims.d_model,
            heads=self.heads,
            value_dim=self.head_dim,
            state_dim=self.state_dim,
            conv_width=self.conv_width,
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.heads, kv_heads=1, head_dim=self.state_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        width = self.heads * self.head_dim
        projections = 2.0 * dims.d_model * (3 * width + 2 * self.state_dim + self.heads)
        convolution = 2.0 * (width + 2 * self.state_dim) * self.conv_width if self.conv_width > 1 else 0.0
        scan = mixed_flops(self.head_shape(), self.head_dim, length, causal, per_channel=False)
        return projections + convolution + scan
