"""Mixtures of experts whose routing looks at one token at a time: legal in every stack."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from blocks.families import AbstractFFN, Dims, InfeasibleArchitecture
from blocks.ffn.modules import expansion_field
from blocks.ffn.routing import (
    Experts,
    RoutingRule,
    biased_route,
    capacity_of,
    renormalised_route,
    routed_flops,
    softmax_route,
)
from blocks.registry import register
from search_space.domains import choice


def _balance_field() -> Any:
    """Weight of the balance loss."""
    return choice(
        0.0,
        0.001,
        0.01,
        0.1,
        default=0.01,
        opt_in=True,
        help="weight of the loss that spreads tokens over experts; at 0 they tend to collapse onto a few",
    )


def _z_field() -> Any:
    """Weight of the z-loss."""
    return choice(0.0, 0.001, default=0.001, opt_in=True, help="weight of the loss that keeps router logits small")


def _check_top_k(kind: str, top_k: int, experts: int) -> None:
    if not 1 <= top_k <= experts:
        raise InfeasibleArchitecture(
            f"model.ffn.{kind}.top_k must be from 1 to model.ffn.{kind}.experts; got {top_k} of {experts}; "
            f"lower top_k or add experts"
        )


@register
@dataclass(frozen=True, kw_only=True)
class Moe(AbstractFFN):
    """Each token goes to its top_k of many SwiGLU experts: many parameters, of which a token uses few."""

    kind: ClassVar[str] = "moe"
    paper: ClassVar[str] = (
        "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer, Shazeer et al. 2017, "
        "arXiv:1701.06538; Mixtral of Experts, Jiang et al. 2024, eq. 1, arXiv:2401.04088; ST-MoE, Zoph et al. 2022, "
        "eq. 5, arXiv:2202.08906"
    )
    proof: ClassVar[str] = "test_renormalised_top_two_equals_mixtral"
    reference: ClassVar[str] = "transformers MixtralSparseMoeBlock"
    width_factor: ClassVar[float] = 2 / 3
    dense: ClassVar[bool] = False

    expansion: float = expansion_field()
    experts: int = choice(4, 8, 16, default=8, help="experts in each layer")
    top_k: int = choice(2, 4, default=2, help="experts each token goes to")
    renormalised: bool = choice(
        True, False, default=True, opt_in=True, help="whether a token's gates sum to 1, or are plain probabilities"
    )
    capacity: str = choice(
        "unlimited",
        "1.0",
        "1.25",
        "1.5",
        default="unlimited",
        opt_in=True,
        help="in training, tokens an expert takes over its fair share of a row; those beyond skip it",
    )
    balance_weight: float = _balance_field()
    z_weight: float = _z_field()

    def check(self, dims: Dims) -> None:
        _check_top_k(self.kind, self.top_k, self.experts)
        if self.top_k == 1 and self.renormalised:
            raise InfeasibleArchitecture(
                "model.ffn.moe.renormalised=true with model.ffn.moe.top_k=1 makes every gate 1, and the router gets no "
                "gradient; set renormalised to false, or top_k to 2 or more, or use model.ffn.kind='switch'"
            )

    def canonical(self, dims: Dims) -> AbstractFFN:
        everything = self.top_k == self.experts
        free = self.capacity != "unlimited" and float(self.capacity) * self.top_k >= self.experts
        return replace(
            self,
            renormalised=self.renormalised or everything,
            capacity="unlimited" if free or everything else self.capacity,
        )

    def _rule(self, dims: Dims) -> RoutingRule:
        limited = self.capacity != "unlimited"
        return RoutingRule(
            n_experts=self.experts,
            top_k=self.top_k,
            route=renormalised_route if self.renormalised else softmax_route,
            capacity=capacity_of(float(self.capacity), dims, self.top_k, self.experts) if limited else None,
            balance_weight=self.balance_weight,
            z_weight=self.z_weight,
        )

    def build(self, dims: Dims) -> nn.Module:
        return Experts(dims, self._rule(dims))

    def natural_width(self, d_model: int) -> float:
        return self.expansion * self.width_factor * d_model / self.top_k

    def flops_per_token(self, dims: Dims) -> float:
        return routed_flops(dims, self._rule(dims))


@register
@dataclass(frozen=True, kw_only=True)
class Switch(AbstractFFN):
    """Each token goes to its one most probable expert, weighed by that probability; full experts let tokens pass by."""

    kind: ClassVar[str] = "switch"
    paper: ClassVar[str] = (
        "Switch Transformers: Scaling to Trillion Parameter Models with Simple and Efficient Sparsity, "
        "Fedus et al. 2021, eq. 4, arXiv:2101.03961"
    )
    proof: ClassVar[str] = "test_switch_drops_whom_the_switch_transformer_drops"
    reference: ClassVar[str] = "transformers SwitchTransformersTop1Router"
    width_factor: ClassVar[float] = 2 / 3
    dense: ClassVar[bool] = False

    expansion: float = expansion_field()
    experts: int = choice(4, 8, 16, default=8, help="experts in each layer")
    capacity_factor: float = choice(
        1.0,
        1.25,
        1.5,
        default=1.25,
        opt_in=True,
        help="in training, tokens an expert takes over its fair share of a row; those beyond skip it",
    )
    balance_weight: float = _balance_field()
    z_weight: float = _z_field()

    def check(self, dims: Dims) -> None:
        _check_top_k(self.kind, 1, self.experts)

    def _rule(self, dims: Dims) -> RoutingRule:
        return RoutingRule(
            n_experts=self.experts,
            top_k=1,
            route=softmax_route,
            capacity=capacity_of(self.capacity_factor, dims, 1, self.experts),
            balance_weight=self.balance_weight,
            z_weight=self.z_weight,
        )

    def build(self, dims: Dims) -> nn.Module:
        return Experts(dims, self._rule(dims))

    def flops_per_token(self, dims: Dims) -> float:
        return routed_flops(dims, self._rule(dims))


@register
@dataclass(frozen=True, kw_only=True)
class SharedMoe(AbstractFFN):
    """A few experts that every token passes through, beside many small routed ones, balanced by a loss."""

    kind: ClassVar[str] = "moe_shared"
    paper: ClassVar[str] = (
        "DeepSeekMoE: Towards Ultimate Expert Specialization in Mixture-of-Experts Language Models, Dai et al. 2024, "
        "eq. 9, arXiv:2401.06066"
    )
    proof: ClassVar[str] = "test_without_routed_output_shared_experts_are_one_dense_network"
    reference: ClassVar[str] = "one dense network of the shared experts"
    width_factor: ClassVar[float] = 2 / 3
    dense: ClassVar[bool] = False

    expansion: float = expansion_field()
    shared: int = choice(1, 2, default=1, help="experts that every token passes through")
    experts: int = choice(8, 16, default=16, help="routed experts in each layer")
    top_k: int = choice(2, 4, default=4, help="routed experts each token goes to")
    balance_weight: float = _balance_field()

    def check(self, dims: Dims) -> None:
        _check_top_k(self.kind, self.top_k, self.experts)

    def _rule(self) -> RoutingRule:
        return RoutingRule(
            n_experts=self.experts,
            top_k=self.top_k,
            route=softmax_route,
            shared=self.shared,
            balance_weight=self.balance_weight,
        )

    def build(self, dims: Dims) -> nn.Module:
        return Experts(dims, self._rule())

    def natural_width(self, d_model: int) -> float:
        return self.expansion * self.width_factor * d_model / (self.top_k + self.shared)

    def flops_per_token(self, dims: Dims) -> float:
        return routed_flops(dims, self._rule())


@register
@dataclass(frozen=True, kw_only=True)
class BiasedMoe(AbstractFFN):
    """Shared and routed experts balanced by no loss: a bias per expert, used to select only, follows its load."""

    kind: ClassVar[str] = "moe_bias"
    paper: ClassVar[str] = (
        "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts, Wang et al. 2024, algorithm 1, "
        "arXiv:2408.15664; DeepSeek-V3 Technical Report 2024, eq. 16, arXiv:2412.19437"
    )
    proof: ClassVar[str] = "test_shared_and_biased_experts_equal_deepseek_v3"
    reference: ClassVar[str] = "transformers DeepseekV3MoE"
    width_factor: ClassVar[float] = 2 / 3
    dense: ClassVar[bool] = False

    expansion: float = expansion_field()
    shared: int = choice(0, 1, 2, default=1, help="experts that every token passes through")
    experts: int = choice(8, 16, default=16, help="routed experts in each layer")
    top_k: int = choice(2, 4, default=4, help="routed experts each token goes to")

    def check(self, dims: Dims) -> None:
        _check_top_k(self.kind, self.top_k, self.experts)
        if self.top_k == 1:
            raise InfeasibleArchitecture(
                "model.ffn.moe_bias.top_k=1 makes every normalised gate 1, and the router gets no gradient; "
                "set top_k to 2 or more, or use model.ffn.kind='switch'"
            )

    def _rule(self) -> RoutingRule:
        return RoutingRule(
            n_experts=self.experts, top_k=self.top_k, route=biased_route, shared=self.shared, moves_bias=True
        )

    def build(self, dims: Dims) -> nn.Module:
        return Experts(dims, self._rule())

    def natural_width(self, d_model: int) -> float:
        return self.expansion * self.width_factor * d_model / (self.top_k + self.shared)

    def flops_per_token(self, dims: Dims) -> float:
        return routed_flops(dims, self._rule())
