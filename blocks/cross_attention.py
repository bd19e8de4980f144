"""Attention from the tokens of a decoder to what an encoder made of a source."""

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor, nn

from blocks.decoding import Decoding
from blocks.families import Context, HeadShape, Role, State, linear
from blocks.ops.precision import full_precision


def cross_weights(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B M G K"],
    live: Bool[Tensor, "B M"] | None,
    scale: float,
) -> Float[Tensor, "B H T M"]:
    """Softmax weights over the live part of the source; all zero where nothing of it is live."""
    wide = torch.promote_types(q.dtype, torch.float32)
    with full_precision(q.device):
        k = repeat(k, "B M G K -> B M (G R) K", R=q.shape[2] // k.shape[2])
        logits = einsum(q.to(wide), k.to(wide), "B T H K, B M H K -> B H T M") * scale
        if live is None:
            return torch.softmax(logits, dim=-1)
        dead = ~live[:, None, None, :]
        return torch.softmax(logits.masked_fill(dead, torch.finfo(wide).min), dim=-1).masked_fill(dead, 0.0)


class CrossAttention(nn.Module):
    """Softmax attention to a memory, without positions: permuting the memory with its mask changes nothing."""

    def __init__(self, d_model: int, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.query = linear(d_model, shape.heads * shape.head_dim, Role.QUERY)
        self.key = linear(d_model, shape.kv_heads * shape.head_dim, Role.KEY)
        self.value = linear(d_model, shape.kv_heads * shape.head_dim, Role.VALUE)
        self.out = linear(shape.heads * shape.head_dim, d_model, Role.MIXER_OUT)

    def forward(
        self, x: Float[Tensor, "B T D"], position: nn.Module, run: Context | Decoding
    ) -> Float[Tensor, "B T D"]:
        """What the tokens find in the memory; a decoding run carries it in its state."""
        if isinstance(run, Decoding):
            kept = {name: run.state[name] for name in ("cross.k", "cross.v", "cross.live")}
            run.following.update(kept)
            return self._look(x, kept["cross.k"], kept["cross.v"], kept["cross.live"])
        assert run.memory is not None, "cross-attention needs a memory"
        return self._look(x, *self._remember(run.memory), run.memory_live)

    def state(self, memory: Float[Tensor, "B M D"], live: Bool[Tensor, "B M"] | None) -> State:
        """What decoding keeps of a memory: it does not grow with the target."""
        k, v = self._remember(memory)
        everywhere = torch.ones(memory.shape[:2], dtype=torch.bool, device=memory.device)
        return {"cross.k": k, "cross.v": v, "cross.live": everywhere if live is None else live}

    def _remember(self, memory: Float[Tensor, "B M D"]) -> tuple[Float[Tensor, "B M G K"], Float[Tensor, "B M G K"]]:
        k, v = (
            rearrange(project(memory), "B M (G K) -> B M G K", K=self.shape.head_dim)
            for project in (self.key, self.value)
        )
        return k, v

    def _look(
        self,
        x: Float[Tensor, "B T D"],
        k: Float[Tensor, "B M G K"],
        v: Float[Tensor, "B M G K"],
        live: Bool[Tensor, "B M"] | None,
    ) -> Float[Tensor, "B T D"]:
        q = rearrange(self.query(x), "B T (H K) -> B T H K", K=self.shape.head_dim)
        weights = cross_weights(q, k, live, self.shape.head_dim**-0.5)
        with full_precision(x.device):
            values = repeat(v, "B M G K -> B M (G R) K", R=self.shape.heads // self.shape.kv_heads)
            mixed = einsum(weights, values.to(weights.dtype), "B H T M, B M H K -> B T H K")
        return self.out(rearrange(mixed, "B T H K -> B T (H K)").to(x.dtype))


def cross_flops(d_model: int, shape: HeadShape, source: float) -> float:
    """Forward FLOPs per target token, for a source of as many tokens as the target has (its keys counted per token)."""
    projections = 2.0 * d_model * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    return projections + 4.0 * shape.heads * shape.head_dim * source
