"""Linear attention: the softmax kernel replaced by a product of features, so that the past is one sum."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
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
)
from blocks.families import linear as linear_map
from blocks.mixers import heads
from blocks.ops.linear_attention import (
    CHUNK,
    LinearNeeds,
    choose_linear_attention,
    chunked,
    empty_sums,
    over_all,
    over_all_flops,
    packed,
    recurrent,
)
from blocks.registry import register
from search_space.domains import choice


def _elu_plus_one(x: Float[Tensor, "*A"]) -> Float[Tensor, "*A"]:
    return F.elu(x) + 1


def _relu_squared(x: Float[Tensor, "*A"]) -> Float[Tensor, "*A"]:
    return F.relu(x).square()


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": _elu_plus_one,
    "relu": F.relu,
    "relu_squared": _relu_squared,
}


class LinearModule(MixerModule):
    """Normalised linear attention; a rotation acts on the numerator only (Su et al. 2021, eq. 19).

    Causal: the sums are those up to each token. Otherwise they are those of the whole sequence (Katharopoulos et al.
    2020, eq. 6).
    """

    def __init__(self, *, d_model: int, shape: HeadShape, feature_map: str, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.shape = shape
        width = shape.heads * shape.head_dim
        self.query = linear_map(d_model, width, Role.QUERY)
        self.key = linear_map(d_model, width, Role.KEY)
        self.value = linear_map(d_model, width, Role.VALUE)
        self.out = linear_map(width, d_model, Role.MIXER_OUT)
        self.features = FEATURE_MAPS[feature_map]
        chosen = choose_linear_attention(LinearNeeds())
        self.attend = chosen.run
        self.backends = {"linear attention": chosen.record if causal else "over_all (not chunked: no order in time)"}

    def forward(self, x: Float[Tensor, "B T D"], position: PositionModule, context: Context) -> Float[Tensor, "B T D"]:
        q, k, v = self._project(x)
        if context.live is not None:
            alive = context.live[:, :, None, None]
            q, k = q * alive, k * alive
        rotated_q, rotated_k = position.rotate(q, k)
        if not self.causal:
            return self._join(over_all(rotated_q, rotated_k, v, q, k, context.segments))
        if context.segments is not None:
            return self._join(packed(rotated_q, rotated_k, v, q, k, context.segments))
        return self._join(self.attend(rotated_q, rotated_k, v, q, k))

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        width = self.shape.head_dim
        sum_kv, sum_k = empty_sums(batch, self.shape.heads, width, width, device, dtype)
        return {"sum_kv": sum_kv, "sum_k": sum_k}

    def step(
        self, x: Float[Tensor, "B T D"], state: State, position: PositionModule, start: int
    ) -> tuple[Float[Tensor, "B T D"], State]:
        q, k, v = self._project(x)
        # A rotation treats queries and keys alike, and only as a query can a row be given its place in the sequence.
        rotated_q, rotated_k = position.rotate(q, k, start)[0], position.rotate(k, k, start)[0]
        run = recurrent if x.shape[1] == 1 else chunked
        mixed, (sum_kv, sum_k) = run(rotated_q, rotated_k, v, q, k, (state["sum_kv"], state["sum_k"]))
        return self._join(mixed), {"sum_kv": sum_kv, "sum_k": sum_k}

    def _project(
        self, x: Float[Tensor, "B T D"]
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T H K"], Float[Tensor, "B T H K"]]:
        q, k, v = (
            rearrange(project(x), "B T (H K) -> B T H K", K=self.shape.head_dim)
            for project in (self.query, self.key, self.value)
        )
        wide = torch.promote_types(v.dtype, torch.float32)
        return self.features(q.to(wide)), self.features(k.to(wide)), v

    def _join(self, mixed: Float[Tensor, "B T H K"]) -> Float[Tensor, "B T D"]:
        return self.out(rearrange(mixed, "B T H K -> B T (H K)"))


@register
@dataclass(frozen=True, kw_only=True)
class Linear(AbstractMixer):
    """Weights are products of non-negative features of query and key: linear in length, a state of fixed size."""

    kind: ClassVar[str] = "linear"
    paper: ClassVar[str] = (
        "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention, Katharopoulos et al. 2020, "
        "arXiv:2006.16236; Linear Transformers Are Secretly Fast Weight Programmers, Schlag et al. 2021, "
        "arXiv:2102.11174"
    )
    proof: ClassVar[str] = "test_linear_attention_equals_flash_linear_attention"
    reference: ClassVar[str] = "flash-linear-attention naive_recurrent_linear_attn"
    offers: ClassVar[frozenset[Hook]] = frozenset({Hook.EMBEDDING, Hook.ROTATE})
    directions: ClassVar[frozenset[Direction]] = BOTH_DIRECTIONS
    packs: ClassVar[bool] = True
    value_projection: ClassVar[bool] = True

    heads: int = choice(1, 2, 4, 8, default=4, help="heads; the state holds heads x head_dim^2 numbers")
    head_dim: int = choice(
        8, 16, 32, 64, 128, default=32, help="channels per head; recall over many pairs grows with them"
    )
    feature_map: str = choice(
        "elu",
        "relu",
        "relu_squared",
        default="elu",
        help="features of queries and keys: elu(x)+1, always positive; relu and its square can be empty, which gives 0",
    )

    def scale_free(self) -> frozenset[Role]:
        """Rectified features carry a factor into weights and their sum alike."""
        return frozenset() if self.feature_map == "elu" else frozenset({Role.QUERY, Role.KEY})

    def build(self, dims: Dims) -> MixerModule:
        return LinearModule(
            d_model=dims.d_model,
            shape=self.head_shape(),
            feature_map=self.feature_map,
            causal=dims.direction == Direction.CAUSAL,
        )

    def head_shape(self) -> HeadShape:
        return HeadShape(heads=self.heads, kv_heads=self.heads, head_dim=self.head_dim)

    def flops_per_token(self, dims: Dims, length: int, causal: bool) -> float:
        projections = heads.projection_flops(dims.d_model, self.head_shape())
        if dims.direction != Direction.CAUSAL:
            return projections + over_all_flops(self.heads, self.head_dim, self.head_dim)
        chunk = min(CHUNK, length)
        pairs = heads.mean_visible(chunk, chunk) if causal else chunk
        features, sums = self.heads * self.head_dim, self.heads * self.head_dim**2
        normaliser = 2.0 * features * (pairs + 1)
        return projections + heads.score_flops(self.head_shape(), pairs) + 4.0 * sums + normaliser
