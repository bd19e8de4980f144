"""Options of softmax attention: a cap on its logits, a sink, learned memory, and a gate on its output."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from blocks.families import HeadShape, Role, linear, mark
from blocks.ops.attention import weighted_values
from blocks.ops.scores import masked_softmax, scaled_logits
from search_space.domains import choice


def gate_field() -> Any:
    """The gate on the output of attention."""
    return choice(
        "none",
        "head",
        "channel",
        default="none",
        neutral="none",
        opt_in=True,
        help="sigmoid gate on what attention returns, read from its input: one number per head, or one per channel "
        "(Qiu et al. 2025, arXiv:2505.06708)",
    )


def sink_field() -> Any:
    """The extra entry of the softmax that takes weight and gives nothing."""
    return choice(
        "none",
        "zero",
        "learned",
        default="none",
        neutral="none",
        opt_in=True,
        help="a further logit in the softmax, so that a head can attend to nothing: zero, or learned per head (Xiao et "
        "al. 2023, arXiv:2309.17453)",
    )


def softcap_field() -> Any:
    """The bound on logits; 0 for none."""
    return choice(
        0.0,
        20.0,
        30.0,
        50.0,
        default=0.0,
        neutral=0.0,
        opt_in=True,
        help="bound c on logits, as c tanh(logit / c), before biases are added; 0 leaves them alone (Gemma 2, "
        "arXiv:2408.00118)",
    )


def memory_field() -> Any:
    """How many learned keys and values stand beside those of the text."""
    return choice(
        0,
        1,
        4,
        16,
        default=0,
        neutral=0,
        opt_in=True,
        help="learned keys and values per head that every query sees, whatever its place (Sukhbaatar et al. 2019, "
        "arXiv:1907.01470)",
    )


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The options of one attention block; the defaults leave it plain."""

    gate: str = "none"
    sink: str = "none"
    softcap: float = 0.0
    memory: int = 0

    @property
    def shaped(self) -> bool:
        """Whether the softmax itself differs from the plain one."""
        return self.sink != "none" or self.softcap != 0 or self.memory > 0

    def flops_per_token(self, d_model: int, shape: HeadShape) -> float:
        """FLOPs per token of the gate and of the memory."""
        outputs = {"none": 0, "head": shape.heads, "channel": shape.heads * shape.head_dim}[self.gate]
        return 2.0 * d_model * outputs + 4.0 * shape.heads * shape.head_dim * self.memory


PLAIN = AttentionOptions()


class OutputGate(nn.Module):
    """What attention returns, times a logistic function of its input."""

    def __init__(self, d_model: int, shape: HeadShape, gate: str) -> None:
        super().__init__()
        self.per_head = 1 if gate == "head" else shape.head_dim
        self.gate = linear(d_model, shape.heads * self.per_head, Role.QUERY)

    def forward(self, mixed: Float[Tensor, "B T H V"], x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H V"]:
        return mixed * torch.sigmoid(rearrange(self.gate(x), "B T (H P) -> B T H P", P=self.per_head)).to(mixed.dtype)


class ShapedSoftmax(nn.Module):
    """Softmax attention whose logits are capped, and whose rows have a sink or memory beside the keys of the text."""

    def __init__(self, shape: HeadShape, options: AttentionOptions) -> None:
        super().__init__()
        self.softcap, self.memory, self.sink = options.softcap, options.memory, options.sink
        if options.sink == "learned":
            self.sink_logit = mark(nn.Parameter(torch.zeros(shape.heads)), Role.SCALAR)
        if options.memory:
            size = (options.memory, shape.kv_heads, shape.head_dim)
            self.memory_k = mark(nn.Parameter(torch.randn(size) / math.sqrt(shape.head_dim)), Role.SCALAR)
            self.memory_v = mark(nn.Parameter(torch.randn(size) / math.sqrt(shape.head_dim)), Role.SCALAR)

    def forward(
        self,
        plain_q: Float[Tensor, "B T H K"],
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B S G K"],
        v: Float[Tensor, "B S G K"],
        *,
        scale: float,
        bias: Float[Tensor, "*#B H T S"] | None,
        seen: Bool[Tensor, "#B 1 T S"],
        dropout: float,
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B H T U"]]:
        """The mixed values, and the weights of memory and keys. Memory has no place: queries meet it unrotated."""
        logits = self._capped(scaled_logits(q, k, scale))
        if bias is not None:
            logits = logits + bias.to(logits.dtype)
        if self.memory:
            memory_k, memory_v = (
                kept.to(k.dtype).expand(k.shape[0], -1, -1, -1) for kept in (self.memory_k, self.memory_v)
            )
            logits = torch.cat([self._capped(scaled_logits(plain_q, memory_k, scale)), logits], dim=-1)
            v = torch.cat([memory_v, v], dim=1)
            # Padding sees no key of the text, and shall not see memory either.
            seen = torch.cat([seen.any(-1, keepdim=True).expand(-1, -1, -1, self.memory), seen], dim=-1)
        weights = self._softmax(logits, seen)
        return weighted_values(weights, v, dropout), weights

    def _capped(self, logits: Float[Tensor, "B H T S"]) -> Float[Tensor, "B H T S"]:
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    def _softmax(self, logits: Float[Tensor, "B H T S"], seen: Bool[Tensor, "#B 1 T S"]) -> Float[Tensor, "B H T S"]:
        if self.sink == "none":
            return masked_softmax(logits, seen)
        extra = logits.new_zeros(logits.shape[1]) if self.sink == "zero" else self.sink_logit.to(logits.dtype)
        column = extra[:, None, None].expand(*logits.shape[:3], 1)
        with_sink = masked_softmax(torch.cat([logits, column], dim=-1), nn.functional.pad(seen, (0, 1), value=True))
        return with_sink[..., :-1]
