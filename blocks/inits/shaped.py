"""Rules that shape the draw or go by depth: truncated_normal, orthogonal, mimetic, depth_scaled and zero_outputs."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from blocks.families import RESIDUAL_OUTPUTS, AbstractInit, HeadShape, Role
from blocks.init import TABLES
from blocks.inits.draws import kept, normal, orthogonal, truncated, uniform
from blocks.registry import register
from search_space.domains import choice

BASE_STD = 0.02


@register
@dataclass(frozen=True, kw_only=True)
class TruncatedNormal(AbstractInit):
    """0.02 with the tails cut off; residual outputs divided by sqrt(2 x layers)."""

    kind: ClassVar[str] = "truncated_normal"
    paper: ClassVar[str] = "BERT, Devlin et al. 2018, appendix A.2 and its code, arXiv:1810.04805"
    proof: ClassVar[str] = "test_cutting_the_tails_lowers_the_deviation_unless_it_is_restored"
    reference: ClassVar[str] = "the published deviations, by role in the test"

    cut: float = choice(2.0, 3.0, default=2.0, help="where tails end, in widths of the Gaussian")
    rescaled: bool = choice(
        True, False, default=True, help="whether the deviation after the cut is 0.02, or that of the Gaussian before"
    )

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        std = BASE_STD / math.sqrt(2 * layers) if role in RESIDUAL_OUTPUTS else BASE_STD
        return std if self.rescaled else std * kept(self.cut)

    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        truncated(weight, std / kept(self.cut), self.cut, generator)


@register
@dataclass(frozen=True, kw_only=True)
class Orthogonal(AbstractInit):
    """Every matrix a rotation, as far as its shape allows: all directions pass with equal strength."""

    kind: ClassVar[str] = "orthogonal"
    paper: ClassVar[str] = (
        "Exact Solutions to the Nonlinear Dynamics of Learning in Deep Linear Neural Networks, Saxe et al. 2013, "
        "section 3, arXiv:1312.6120"
    )
    proof: ClassVar[str] = "test_orthogonal_matrices_are_rotations_as_far_as_their_shape_allows"
    reference: ClassVar[str] = "the identity, as the product of a matrix and its transpose"

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        return fan_out**-0.5 if role in TABLES else max(fan_in, fan_out) ** -0.5

    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        orthogonal(weight, std, generator)

    def fill_table(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        normal(weight, std, generator)


MIMETIC_SCORES = (0.7, 0.7)
MIMETIC_VALUES = (0.4, -0.4)
"""Shares of noise and of the identity in the products of matrices (Trockman and Kolter, section 4)."""


@register
@dataclass(frozen=True, kw_only=True)
class Mimetic(AbstractInit):
    """Query times key matrices near the identity, value times output near its negative, as in trained models."""

    kind: ClassVar[str] = "mimetic"
    paper: ClassVar[str] = (
        "Mimetic Initialization of Self-Attention Layers, Trockman and Kolter 2023, section 4, arXiv:2305.09828"
    )
    proof: ClassVar[str] = "test_mimetic_products_lie_near_plus_and_minus_the_identity"
    reference: ClassVar[str] = "the published products of matrices"
    amplifies: ClassVar[bool] = True
    """Heads add up: eight of them return 3.2 times what they are given."""
    relates: ClassVar[bool] = True
    """Without a product to draw this is `xavier`."""

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        return fan_out**-0.5 if role in TABLES else math.sqrt(2 / (fan_in + fan_out))

    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        normal(weight, std, generator)

    def relate(self, matrices: Mapping[Role, nn.Parameter], heads: HeadShape, generator: torch.Generator) -> None:
        per_kv = heads.heads // heads.kv_heads
        for left, right, shares in _products(matrices, heads):
            for head in range(heads.heads):
                near = _near_identity(right.shape[1], shares, generator)
                rows = _rows(left, heads.heads, head), _rows(right, heads.kv_heads, head // per_kv)
                _factor(near, *rows, fresh=head % per_kv == 0)

    def can_relate(self, matrices: Mapping[Role, nn.Parameter], heads: HeadShape) -> bool:
        return any(True for _ in _products(matrices, heads))


def _products(
    matrices: Mapping[Role, nn.Parameter], heads: HeadShape
) -> Iterator[tuple[Tensor, Tensor, tuple[float, float]]]:
    """The pairs of matrices whose product per head is drawn, and the shares of noise and of the identity in it."""
    query, key, value, out = (matrices.get(role) for role in (Role.QUERY, Role.KEY, Role.VALUE, Role.MIXER_OUT))
    if query is not None and key is not None and _are_factors(query, key, heads):
        yield query, key, MIMETIC_SCORES
    if value is not None and out is not None and _are_factors(out.T, value, heads):
        yield out.T, value, MIMETIC_VALUES


def _are_factors(left: Tensor, right: Tensor, heads: HeadShape) -> bool:
    """Whether both act on vectors of one width and give each head as many channels."""
    per_head = left.shape[0] / heads.heads
    return per_head % 1 == 0 and left.shape[1] == right.shape[1] and right.shape[0] == per_head * heads.kv_heads


def _rows(weight: Tensor, heads: int, head: int) -> Tensor:
    """The rows of one head, as a view."""
    return weight.unflatten(0, (heads, -1))[head]


def _near_identity(width: int, shares: tuple[float, float], generator: torch.Generator) -> Tensor:
    noise, identity = shares
    return noise * torch.randn(width, width, generator=generator) / math.sqrt(width) + identity * torch.eye(width)


def _factor(product: Tensor, left: Tensor, right: Tensor, *, fresh: bool) -> None:
    """Fill left and right so that left' right is near the product; right is kept where another head filled it."""
    if fresh:
        u, s, v = torch.linalg.svd(product)
        rank = min(left.shape[0], left.shape[1])
        left.zero_()
        right.zero_()
        left[:rank] = (u[:, :rank] * s[:rank].sqrt()).T
        right[:rank] = s[:rank].sqrt()[:, None] * v[:rank]
    else:
        left.copy_((product @ torch.linalg.pinv(right)).T)


@register
@dataclass(frozen=True, kw_only=True)
class DepthScaled(AbstractInit):
    """Residual outputs 0.02 / sqrt(2 x depth of their layer); unit embeddings; made for an untied head."""

    kind: ClassVar[str] = "depth_scaled"
    paper: ClassVar[str] = (
        "Improving Deep Transformer with Depth-Scaled Initialization and Merged Attention, Zhang et al. 2019, eq. 10, "
        "arXiv:1908.11365, with the constants of TorchTitan, Liang et al. 2024, arXiv:2410.06511"
    )
    proof: ClassVar[str] = "test_depth_scaled_outputs_shrink_layer_by_layer"
    reference: ClassVar[str] = "the published deviations, by layer in the test"

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        return self.std_at(role, fan_in, fan_out, layers, layers - 1)

    def std_at(self, role: Role, fan_in: int, fan_out: int, layers: int, layer: int) -> float:
        if role in RESIDUAL_OUTPUTS:
            return BASE_STD / math.sqrt(2 * (layer + 1))
        if role in TABLES:
            return 1.0
        return fan_in**-0.5 if role == Role.HEAD else BASE_STD

    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        truncated(weight, std / kept(3.0), 3.0, generator)

    def fill_table(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        normal(weight, std, generator)


@register
@dataclass(frozen=True, kw_only=True)
class ZeroOutputs(AbstractInit):
    """Residual outputs 0, so that every layer starts as the identity; inputs even with std 1 / sqrt(fan_in)."""

    kind: ClassVar[str] = "zero_outputs"
    paper: ClassVar[str] = (
        "nanochat, Karpathy 2025; zero branches after Accurate, Large Minibatch SGD, Goyal et al. 2017, section 5.1, "
        "arXiv:1706.02677"
    )
    proof: ClassVar[str] = "test_zero_outputs_make_every_layer_the_identity_and_the_loss_that_of_guessing"
    reference: ClassVar[str] = "the identity"
    opens_later: ClassVar[bool] = True

    def std(self, role: Role, fan_in: int, fan_out: int, layers: int) -> float:
        if role in RESIDUAL_OUTPUTS:
            return 0.0
        if role in TABLES:
            return 1.0
        return 0.001 if role == Role.HEAD else fan_in**-0.5

    def fill(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        uniform(weight, std, generator)

    def fill_table(self, weight: Tensor, std: float, generator: torch.Generator) -> None:
        normal(weight, std, generator)
