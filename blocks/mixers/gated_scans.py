"""The module that mixers over a gated scan share: projections, a gate of their own, the scan, and their output."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from blocks.families import Context, HeadShape, MixerModule, PositionModule, State
from blocks.mixers import heads
from blocks.mixers.recurrence import Projections, decays_within, masked, rotated
from blocks.ops.gated_scan import (
    CHANNEL_CHUNK,
    CHUNK,
    ScanNeeds,
    choose_gated_scan,
    chunked,
    empty_state,
    recurrent,
    scan_flops,
)

Output = Callable[[Tensor, Tensor], Tensor]
"""From what the heads read and the input to the residual stream."""


class GatedScanModule(MixerModule):
    """A decayed sum of k v^T per head, read by q.

    `gate` maps the input, the queries and the keys to the queries and keys in use and the logarithms of the decays;
    rotations act on what it returns.
    """

    def __init__(self, *, d_model: int, shape: HeadShape, value_dim: int, gate: nn.Module, output: nn.Module) -> None:
        super().__init__()
        self.shape = shape
        self.value_dim = value_dim
        self.project = Projections(d_model, shape.heads, shape.head_dim, value_dim)
        self.gate = gate
        self.output = output
        chosen = choose_gated_scan(ScanNeeds())
        self.scan = chosen.run
        self.backends = {"gated scan": chosen.record}

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        x = masked(x, context.live)
        q, k, v, log_decay = self._gated(x, position, 0)
        if context.live is not None:
            k, log_decay = _skipped(context.live, k), _skipped(context.live, log_decay)
        return self.output(self.scan(q, k, v, decays_within(log_decay, context.segments)), x)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        return {"state": empty_state(batch, self.shape.heads, self.shape.head_dim, self.value_dim, device, dtype)}

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        run = recurrent if x.shape[1] == 1 else chunked
        mixed, after = run(*self._gated(x, position, start), state["state"])
        return self.output(mixed, x), {"state": after}

    def _gated(
        self, x: Float[Tensor, "B T D"], position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T H K"], Float[Tensor, "B T H V"], Float[Tensor, "B T H #K"]]:
        q, k, v = self.project(x)
        q, k, log_decay = self.gate(x, q, k)
        q, k = rotated(q, k, position, start)
        return q, k, v, log_decay


def _skipped(live: Bool[Tensor, "B T"], x: Float[Tensor, "B T H K"]) -> Float[Tensor, "B T H K"]:
    return torch.where(live[:, :, None, None], x, 0.0)


def mixed_flops(shape: HeadShape, value_dim: int, length: int, causal: bool, per_channel: bool) -> float:
    """FLOPs per token of a scan in the chunks that its decays suit."""
    chunk = min(CHANNEL_CHUNK if per_channel else CHUNK, length)
    pairs = heads.mean_visible(chunk, chunk) if causal else float(chunk)
    return scan_flops(heads=shape.heads, key_dim=shape.head_dim, value_dim=value_dim, pairs=pairs)
