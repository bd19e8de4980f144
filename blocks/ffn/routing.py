"""Routing tokens to experts: gates, the losses and the bias that balance load, capacity, and the routed network."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from blocks.families import Context, Dims, Role, RoutedFFN, linear, mark
from blocks.ffn.modules import GatedFFN
from blocks.ops.experts import grouped_experts
from blocks.ops.precision import full_precision
from blocks.ops.running_sum import running_sum

BIAS_STEP = 0.001
"""How far a selection bias moves between two optimizer steps (DeepSeek-V3, section 4.2)."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Where each token goes."""

    experts: Int[Tensor, "B T A"]
    gates: Float[Tensor, "B T A"]
    probabilities: Float[Tensor, "B T E"]
    """Affinities that sum to 1 over the experts; the balance loss is about these."""


Route = Callable[[Float[Tensor, "B T E"], Float[Tensor, "E"], int], Routing]
"""From router logits, the selection bias and the experts per token."""


def softmax_route(logits: Float[Tensor, "B T E"], bias: Float[Tensor, "E"], top_k: int) -> Routing:
    """The top_k most probable experts, weighed by their probability."""
    probabilities = logits.softmax(-1)
    gates, experts = probabilities.topk(top_k, -1)
    return Routing(experts=experts, gates=gates, probabilities=probabilities)


def renormalised_route(logits: Float[Tensor, "B T E"], bias: Float[Tensor, "E"], top_k: int) -> Routing:
    """The top_k most probable experts, weighed by their probability among those."""
    route = softmax_route(logits, bias, top_k)
    gates = route.gates / route.gates.sum(-1, keepdim=True)
    return Routing(experts=route.experts, gates=gates, probabilities=route.probabilities)


def biased_route(logits: Float[Tensor, "B T E"], bias: Float[Tensor, "E"], top_k: int) -> Routing:
    """The experts of the top_k largest sigmoid + bias, weighed by their unbiased sigmoids, normalised."""
    scores = logits.sigmoid()
    experts = (scores + bias.to(scores.dtype)).topk(top_k, -1).indices
    gates = scores.gather(-1, experts)
    return Routing(
        experts=experts,
        gates=gates / gates.sum(-1, keepdim=True),
        probabilities=scores / scores.sum(-1, keepdim=True),
    )


def chosen(experts: Int[Tensor, "B T A"], n_experts: int) -> Float[Tensor, "B T E"]:
    """1 where a token goes to an expert."""
    return torch.zeros(*experts.shape[:2], n_experts, device=experts.device).scatter(2, experts, 1.0)


def balance_loss(routing: Routing, live: Bool[Tensor, "B T"] | None) -> Float[Tensor, ""]:
    """E x sum of f_e P_e (Switch Transformers, eq. 4) with f summing to the experts per token.

    That many is its minimum, at perfect balance; E when every token goes to the same experts for sure.
    """
    n_experts = routing.probabilities.shape[-1]
    share = _mean(chosen(routing.experts, n_experts), live)
    return n_experts * (share * _mean(routing.probabilities, live)).sum()


def z_loss(logits: Float[Tensor, "B T E"], live: Bool[Tensor, "B T"] | None) -> Float[Tensor, ""]:
    """The mean squared log-sum-exp of router logits (ST-MoE, eq. 5)."""
    return _mean(logits.logsumexp(-1, keepdim=True).square(), live).sum()


def _mean(x: Float[Tensor, "B T E"], live: Bool[Tensor, "B T"] | None) -> Float[Tensor, "E"]:
    """The mean over live tokens."""
    if live is None:
        return x.flatten(0, 1).mean(0)
    weights = live.to(x.dtype)[..., None]
    return (x * weights).sum((0, 1)) / weights.sum().clamp_min(1.0)


def within_capacity(
    experts: Int[Tensor, "B T A"], n_experts: int, capacity: int, live: Bool[Tensor, "B T"] | None
) -> Bool[Tensor, "B T A"]:
    """False where an expert already has `capacity` earlier tokens of the row: earlier tokens go first."""
    taken = chosen(experts, n_experts)
    if live is not None:
        taken = taken * live[..., None]
    return running_sum(taken).gather(2, experts) <= capacity


def capacity_of(factor: float, dims: Dims, top_k: int, n_experts: int) -> int:
    """Tokens of a row that an expert takes: factor x its fair share of a row of the training length."""
    return math.ceil(factor * dims.train_len * top_k / n_experts)


@dataclass(frozen=True, kw_only=True)
class RoutingRule:
    """How one network of experts routes."""

    n_experts: int
    top_k: int
    route: Route
    shared: int = 0
    """Experts that every token passes through."""
    capacity: int | None = None
    """Tokens of a row that an expert takes in training; in evaluation, and where None, every token is served."""
    balance_weight: float = 0.0
    z_weight: float = 0.0
    moves_bias: bool = False
    """Whether load is balanced by moving the selection bias between steps."""


class Experts(RoutedFFN):
    """The sum of the experts a token is routed to, each W2 (silu(W1 x) * V x), and of the shared ones."""

    bias: Tensor
    step_load: Tensor
    load: Tensor
    dropped: Tensor

    def __init__(self, dims: Dims, rule: RoutingRule) -> None:
        super().__init__()
        self.rule = rule
        d_model, d_ff, n_experts = dims.d_model, dims.d_ff, rule.n_experts
        self.router = linear(d_model, n_experts, Role.ROUTER)
        self.w_gate = self._matrices(Role.FFN_GATE, d_model, d_ff)
        self.w_in = self._matrices(Role.FFN_IN, d_model, d_ff)
        self.w_out = self._matrices(Role.FFN_OUT, d_ff, d_model)
        wide = Dims(**{**vars(dims), "d_ff": rule.shared * d_ff})
        self.shared = GatedFFN(wide, F.silu) if rule.shared else None
        self.register_buffer("bias", torch.zeros(n_experts), persistent=rule.moves_bias)
        for name, size in (("step_load", n_experts), ("load", n_experts), ("dropped", 1)):
            self.register_buffer(name, torch.zeros(size, dtype=torch.int64), persistent=False)

    def _matrices(self, role: Role, d_in: int, d_out: int) -> nn.Parameter:
        weight = nn.Parameter(torch.empty(self.rule.n_experts, d_out, d_in))
        share = float(Fraction(self.rule.top_k, self.rule.n_experts))
        return mark(weight, role, fan_in=d_in, fan_out=d_out, active_share=share)

    def forward(self, x: Float[Tensor, "B T D"], context: Context | None = None) -> Float[Tensor, "B T D"]:
        live = None if context is None else context.live
        with full_precision(x.device):
            wide = torch.promote_types(x.dtype, torch.float32)
            logits = F.linear(x.to(wide), self.router.weight.to(wide))
            routing = self.rule.route(logits, self.bias, self.rule.top_k)
        if context is not None:
            self._add_losses(context, routing, logits)
        gates = routing.gates
        if self.training:
            kept = self._kept(routing.experts, live)
            gates = gates * kept
            self._count(routing.experts, kept, live)
        mixed = grouped_experts(
            x.flatten(0, 1), routing.experts.flatten(0, 1), gates.flatten(0, 1), self.w_gate, self.w_in, self.w_out
        ).view_as(x)
        return mixed if self.shared is None else mixed + self.shared(x)

    def _add_losses(self, context: Context, routing: Routing, logits: Float[Tensor, "B T E"]) -> None:
        if self.rule.balance_weight:
            context.losses.append(self.rule.balance_weight * balance_loss(routing, context.live))
        if self.rule.z_weight:
            context.losses.append(self.rule.z_weight * z_loss(logits, context.live))

    def _kept(self, experts: Int[Tensor, "B T A"], live: Bool[Tensor, "B T"] | None) -> Bool[Tensor, "B T A"]:
        if self.rule.capacity is None:
            return torch.ones_like(experts, dtype=torch.bool)
        return within_capacity(experts, self.rule.n_experts, self.rule.capacity, live)

    @torch.no_grad()
    def _count(
        self, experts: Int[Tensor, "B T A"], kept: Bool[Tensor, "B T A"], live: Bool[Tensor, "B T"] | None
    ) -> None:
        weight = torch.ones_like(kept) if live is None else live[..., None].expand_as(kept)
        load = torch.zeros_like(self.load).scatter_add(0, experts.flatten(), weight.flatten().long())
        self.load += load
        self.step_load += load
        self.dropped += (weight & ~kept).sum()

    @torch.no_grad()
    def rebalance(self) -> None:
        """Raise the bias of experts with less than the mean load by a fixed step, and lower the others'."""
        if self.rule.moves_bias:
            load = self.step_load.to(self.bias.dtype)
            self.bias += BIAS_STEP * (load.mean() - load).sign()
        self.step_load.zero_()

    @torch.no_grad()
    def statistics(self) -> dict[str, Tensor]:
        """The greatest load over the mean load, and the share of assignments dropped."""
        total = self.load.sum().clamp_min(1)
        found = {
            "load_max_over_mean": self.load.max() * self.rule.n_experts / total,
            "drop_rate": self.dropped[0] / total,
        }
        self.load.zero_()
        self.dropped.zero_()
        return found


def rebalance(model: nn.Module) -> None:
    """To be called after every optimizer step."""
    for module in model.modules():
        if isinstance(module, RoutedFFN):
            module.rebalance()


def routing_statistics(model: nn.Module) -> dict[str, float]:
    """The mean over layers of every statistic of routed FFNs since the last call; empty where nothing routes."""
    found: dict[str, list[float]] = {}
    for module in model.modules():
        if isinstance(module, RoutedFFN):
            for name, value in module.statistics().items():
                found.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(values) for name, values in found.items()}


def routed_flops(dims: Dims, rule: RoutingRule) -> float:
    """Forward FLOPs per token of the router, the experts a token goes to and the shared ones."""
    return 2.0 * dims.d_model * rule.n_experts + 6.0 * dims.d_model * dims.d_ff * (rule.top_k + rule.shared)
