"""The module that mixers over features of queries and keys share: projections, features, linear attention."""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import Context, HeadShape, MixerModule, PositionModule, Role, State, linear
from blocks.mixers import heads
from blocks.mixers.recurrence import Projections, rotated
from blocks.ops.linear_attention import (
    CHUNK,
    LinearNeeds,
    choose_linear_attention,
    chunked,
    empty_sums,
    packed,
    recurrent,
)


class KernelModule(MixerModule):
    """Weights are products of features of query and key over their sum; rotations act before the features.

    `features` maps rows of H x K and the position of the first to features in float32 or wider; `key_features` does so
    for keys, where they differ.
    """

    def __init__(
        self,
        *,
        d_model: int,
        shape: HeadShape,
        value_dim: int,
        features: nn.Module,
        feature_dim: int,
        key_features: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.value_dim = value_dim
        self.feature_dim = feature_dim
        self.project = Projections(d_model, shape.heads, shape.head_dim, value_dim)
        self.features = features
        self.key_features = features if key_features is None else key_features
        self.out = linear(shape.heads * value_dim, d_model, Role.MIXER_OUT)
        chosen = choose_linear_attention(LinearNeeds())
        self.attend = chosen.run
        self.backends = {"linear attention": chosen.record}

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        q, k, v = self._features(x, position, 0)
        if context.live is not None:
            q, k = (torch.where(context.live[:, :, None, None], y, 0.0) for y in (q, k))
        if context.segments is not None:
            return self._join(packed(q, k, v, q, k, context.segments))
        return self._join(self.attend(q, k, v, q, k))

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        sum_kv, sum_k = empty_sums(batch, self.shape.heads, self.feature_dim, self.value_dim, device, dtype)
        return {"sum_kv": sum_kv, "sum_k": sum_k}

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        q, k, v = self._features(x, position, start)
        run = recurrent if x.shape[1] == 1 else chunked
        mixed, (sum_kv, sum_k) = run(q, k, v, q, k, (state["sum_kv"], state["sum_k"]))
        return self._join(mixed), {"sum_kv": sum_kv, "sum_k": sum_k}

    def _features(
        self, x: Float[Tensor, "B T D"], position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T H F"], Float[Tensor, "B T H F"], Float[Tensor, "B T H V"]]:
        q, k, v = self.project(x)
        q, k = rotated(q, k, position, start)
        return self.features(q, start), self.key_features(k, start), v

    def _join(self, mixed: Float[Tensor, "B T H V"]) -> Float[Tensor, "B T D"]:
        return self.out(rearrange(mixed, "B T H V -> B T (H V)"))


def kernel_flops(d_model: int, shape: HeadShape, value_dim: int, feature_dim: int, length: int, causal: bool) -> float:
    """FLOPs per token of projections and normalised linear attention over so many features."""
    chunk = min(CHUNK, length)
    pairs = heads.mean_visible(chunk, chunk) if causal else float(chunk)
    projections = 2.0 * d_model * shape.heads * (2 * shape.head_dim + 2 * value_dim)
    scores = 2.0 * shape.heads * (feature_dim + value_dim) * pairs
    normaliser = 2.0 * shape.heads * feature_dim * (pairs + 1)
    return projections + scores + shape.heads * 4.0 * feature_dim * value_dim + normaliser
