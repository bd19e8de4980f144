"""Hyper-connections: several residual streams instead of one, mixed around every layer, mixer and FFN together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from blocks.families import AbstractResidual, Dims, LayerCall, ResidualModule, Role, mark
from blocks.model import ModelConfig
from blocks.registry import register
from blocks.residual import require_additive
from search_space.domains import choice


class HyperConnection(nn.Module):
    """How one layer reads n streams (width mix) and writes to them (depth mix): Zhu et al. 2024, eqs. 1-5 and 10-13.

    The dynamic part is tanh of a linear map of each normed stream, without a further factor, and starts at zero.
    """

    def __init__(self, dims: Dims, layer: int, streams: int, dynamic: bool) -> None:
        super().__init__()
        read = torch.zeros(streams, streams + 1)
        read[layer % streams, 0] = 1.0
        read[:, 1:] = torch.eye(streams)
        self.read = mark(nn.Parameter(read), Role.SCALAR)
        self.write = mark(nn.Parameter(torch.ones(streams)), Role.SCALAR)
        self.read_map = _zero_map(dims.d_model, streams + 1) if dynamic else None
        self.write_map = _zero_map(dims.d_model, 1) if dynamic else None

    def forward(self, streams: Float[Tensor, "B T N D"], layer: LayerCall) -> Float[Tensor, "B T N D"]:
        normed = F.rms_norm(streams, streams.shape[-1:], eps=1e-6)
        read = _gates(self.read, self.read_map, normed)
        write = _gates(self.write[:, None], self.write_map, normed)[..., 0]
        mixed = einsum(read, streams, "B T N M, B T N D -> B T M D")
        x = mixed[:, :, 0]
        branch = layer(x, None) - x
        return mixed[:, :, 1:] + write[..., None] * branch[:, :, None]


def _zero_map(d_model: int, width: int) -> nn.Parameter:
    return mark(nn.Parameter(torch.zeros(width, d_model)), Role.SCALAR)


def _gates(
    static: Float[Tensor, "N M"], dynamic: nn.Parameter | None, normed: Float[Tensor, "B T N D"]
) -> Float[Tensor, "B T N M"]:
    gates = static.to(normed.dtype).expand(*normed.shape[:2], *static.shape)
    return gates if dynamic is None else gates + torch.tanh(F.linear(normed, dynamic.to(normed.dtype)))


class HyperConnections(ResidualModule):
    """n copies of the stream, mixed around every layer; their mean leaves the last one."""

    def __init__(self, dims: Dims, streams: int, dynamic: bool) -> None:
        super().__init__()
        self.streams = streams
        self.connections = nn.ModuleList(HyperConnection(dims, layer, streams, dynamic) for layer in range(dims.layers))

    def forward(self, x: Float[Tensor, "B T D"], layers: Sequence[LayerCall]) -> Float[Tensor, "B T D"]:
        streams = x[:, :, None].expand(-1, -1, self.streams, -1)
        for connection, layer in zip(self.connections, layers, strict=True):
            streams = connection(streams, layer)
        return streams.mean(2)


@register
@dataclass(frozen=True, kw_only=True)
class Hyper(AbstractResidual):
    """Several copies of the residual stream, which each layer learns to read, mix and write; at first all the same."""

    kind: ClassVar[str] = "hyper_connections"
    paper: ClassVar[str] = "Hyper-Connections, Zhu et al. 2024, arXiv:2409.19606"
    proof: ClassVar[str] = "test_hyper_connections_follow_their_equations"
    reference: ClassVar[str] = "its published formula, written out in the test"

    streams: int = choice(2, 4, default=4, help="copies of the residual stream; the paper found 4 best")
    dynamic: bool = choice(True, False, default=True, help="whether the mix also depends on the streams themselves")

    def build(self, dims: Dims) -> ResidualModule:
        return HyperConnections(dims, self.streams, self.dynamic)

    def flops_per_token(self, dims: Dims) -> float:
        mixes = 2.0 * self.streams * (self.streams + 1) * dims.d_model
        gates = 2.0 * self.streams * (self.streams + 2) * dims.d_model if self.dynamic else 0.0
        return dims.layers * (mixes + gates)

    def check(self, config: ModelConfig) -> None:
        require_additive(config, self.kind)
