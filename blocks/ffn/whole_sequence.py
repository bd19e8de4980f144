"""Experts that look at a whole sequence before they choose: legal where every layer may see all of it."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from blocks.families import AbstractFFN, Context, Dims, Direction, Role, RoutedFFN, linear, mark
from blocks.ffn.modules import expansion_field
from blocks.registry import register
from search_space.domains import choice

BIDIRECTIONAL_ONLY = frozenset({Direction.BIDIRECTIONAL})


class GatedExperts(nn.Module):
    """One W2 (silu(W1 x) * V x) per expert, each on rows of its own."""

    def __init__(self, dims: Dims, n_experts: int) -> None:
        super().__init__()
        self.w_gate = _matrices(Role.FFN_GATE, n_experts, dims.d_model, dims.d_ff)
        self.w_in = _matrices(Role.FFN_IN, n_experts, dims.d_model, dims.d_ff)
        self.w_out = _matrices(Role.FFN_OUT, n_experts, dims.d_ff, dims.d_model)

    def forward(self, x: Float[Tensor, "B E C D"]) -> Float[Tensor, "B E C D"]:
        inner = F.silu(torch.einsum("becd,efd->becf", x, self.w_gate)) * torch.einsum("becd,efd->becf", x, self.w_in)
        return torch.einsum("becf,edf->becd", inner, self.w_out)


def _matrices(role: Role, n_experts: int, d_in: int, d_out: int) -> nn.Parameter:
    return mark(nn.Parameter(torch.empty(n_experts, d_out, d_in)), role, fan_in=d_in, fan_out=d_out)


class ExpertChoiceModule(RoutedFFN):
    """Each expert takes the tokens of a row that it scores highest, and always as many."""

    def __init__(self, dims: Dims, n_experts: int, taken: int) -> None:
        super().__init__()
        self.taken = taken
        self.router = linear(dims.d_model, n_experts, Role.ROUTER)
        self.experts = GatedExperts(dims, n_experts)

    def forward(self, x: Float[Tensor, "B T D"], context: Context | None = None) -> Float[Tensor, "B T D"]:
        scores = self.router(x).softmax(-1).transpose(1, 2)
        if context is not None and context.live is not None:
            scores = scores * context.live[:, None]
        gates, tokens = scores.topk(min(self.taken, x.shape[1]), -1)
        index = tokens[..., None].expand(-1, -1, -1, x.shape[2])
        rows = x[:, None].expand(-1, tokens.shape[1], -1, -1).gather(2, index)
        mixed = gates[..., None].to(x.dtype) * self.experts(rows)
        return torch.zeros_like(mixed[:, 0, :1]).expand_as(x).scatter_add(1, index.flatten(1, 2), mixed.flatten(1, 2))


class SoftMoeModule(RoutedFFN):
    """Slots that are weighted means of a row's tokens go through experts; tokens are weighted means of the results."""

    def __init__(self, dims: Dims, n_experts: int, slots: int) -> None:
        super().__init__()
        self.n_experts = n_experts
        self.router = linear(dims.d_model, n_experts * slots, Role.ROUTER)
        self.experts = GatedExperts(dims, n_experts)

    def forward(self, x: Float[Tensor, "B T D"], context: Context | None = None) -> Float[Tensor, "B T D"]:
        logits = self.router(x)
        combine = logits.softmax(-1)
        if context is not None and context.live is not None:
            logits = logits.masked_fill(~context.live[..., None], torch.finfo(logits.dtype).min)
        slots = torch.einsum("bts,btd->bsd", logits.softmax(1), x).unflatten(1, (self.n_experts, -1))
        return torch.einsum("bts,bsd->btd", combine, self.experts(slots).flatten(1, 2))


@register
@dataclass(frozen=True, kw_only=True)
class ExpertChoice(AbstractFFN):
    """Each expert takes the tokens it wants most: perfect balance, a token may get none or several; encoders only."""

    kind: ClassVar[str] = "expert_choice"
    paper: ClassVar[str] = (
        "Mixture-of-Experts with Expert Choice Routing, Zhou et al. 2022, section 3.2, arXiv:2202.09368"
    )
    proof: ClassVar[str] = "test_expert_choice_gives_every_expert_the_same_number_of_its_best_tokens"
    reference: ClassVar[str] = "its choice, expert by expert in the test"
    width_factor: ClassVar[float] = 2 / 3
    dense: ClassVar[bool] = False
    directions: ClassVar[frozenset[Direction]] = BIDIRECTIONAL_ONLY

    expansion: float = expansion_field()
    experts: int = choice(4, 8, 16, default=8, help="experts in each layer")
    per_token: float = choice(1.0, 2.0, default=2.0, help="experts a token gets on average")

    def _taken(self, dims: Dims) -> int:
        return math.ceil(self.per_token * dims.train_len / self.experts)

    def build(self, dims: Dims) -> nn.Module:
        return ExpertChoiceModule(dims, self.experts, self._taken(dims))

    def natural_width(self, d_model: int) -> float:
        return self.expansion * self.width_factor * d_model / self.per_token

    def flops_per_token(self, dims: Dims) -> float:
        rows = self._taken(dims) * self.experts / dims.train_len
        return 2.0 * dims.d_model * self.experts + 6.0 * dims.d_model * dims.d_ff * rows


@register
@dataclass(frozen=True, kw_only=True)
class SoftMoe(AbstractFFN):
    """Experts work on mixtures of all tokens of a row: no token is dropped, all is differentiable; encoders only."""

    kind: ClassVar[str] = "soft_moe"
    paper: ClassVar[str] = (
        "From Sparse to Soft Mixtures of Experts, Puigcerver et al. 2023, eq. 1 and 2, arXiv:2308.00951"
    )
    proof: ClassVar[str] = "test_soft_experts_mix_tokens_into_slots_and_slots_into_tokens"
    reference: ClassVar[str] = "its published formula, written out in the test"
    width_factor: ClassVar[float] = 2 / 3
    dense: ClassVar[bool] = False
    directions: ClassVar[frozenset[Direction]] = BIDIRECTIONAL_ONLY

    expansion: float = expansion_field()
    experts: int = choice(4, 8, 16, default=8, help="experts in each layer; together they have one slot per token")

    def _slots(self, dims: Dims) -> int:
        return math.ceil(dims.train_len / self.experts)

    def build(self, dims: Dims) -> nn.Module:
        return SoftMoeModule(dims, self.experts, self._slots(dims))

    def flops_per_token(self, dims: Dims) -> float:
        slots = self._slots(dims) * self.experts
        return 6.0 * dims.d_model * slots + 6.0 * dims.d_model * dims.d_ff * slots / dims.train_len
