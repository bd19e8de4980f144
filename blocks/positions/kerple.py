"""Kernelised penalties on attention logits, their rate and their shape learned per head."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from blocks.families import AbstractPosition, Dims, HeadShape, Hook, PositionModule, Role, mark
from blocks.ops.toeplitz import every_distance, over_pairs
from blocks.positions.alibi import slopes
from blocks.registry import register
from search_space.domains import choice


def _before_softplus(value: Float[Tensor, "H"]) -> Float[Tensor, "H"]:
    return value + torch.log(-torch.expm1(-value))


def _logarithmic(distance: Float[Tensor, "N"], raw: Float[Tensor, "H 1"]) -> Float[Tensor, "H N"]:
    return torch.log1p(F.softplus(raw) * distance)


def _power(distance: Float[Tensor, "N"], raw: Float[Tensor, "H 1"]) -> Float[Tensor, "H N"]:
    """distance^(2 sigmoid(raw)), by a way that has a gradient at distance 0."""
    return torch.exp(2 * torch.sigmoid(raw) * torch.log(distance.clamp_min(1))) * (distance > 0)


_FORMS = {"log": _logarithmic, "power": _power}


class KerpleModule(PositionModule):
    """Subtracts r1 log(1 + r2 d), or r1 d^r2 with r2 below 2. Starts with ALiBi's slopes as r1, and r2 = 1."""

    def __init__(self, heads: int, form: str) -> None:
        super().__init__()
        start = _before_softplus(slopes(heads, torch.get_default_device()))
        shape = torch.zeros(heads) if form == "power" else _before_softplus(torch.ones(heads))
        self.raw_rate = mark(nn.Parameter(start), Role.SCALAR)
        self.raw_shape = mark(nn.Parameter(shape), Role.SCALAR)
        self.curve = _FORMS[form]

    def score_bias(self, n_query: int, n_key: int, start: int = 0) -> Float[Tensor, "H T S"]:
        wide = torch.promote_types(self.raw_rate.dtype, torch.float32)
        distance = every_distance(n_query, n_key, start, self.raw_rate.device).abs().to(wide)
        rate = F.softplus(self.raw_rate.to(wide))[:, None]
        return over_pairs(-rate * self.curve(distance, self.raw_shape.to(wide)[:, None]), n_key)


@register
@dataclass(frozen=True, kw_only=True)
class Kerple(AbstractPosition):
    """Each head lowers its logits with distance along a curve it learns: a logarithm or a power; extends to long text.

    The logarithm forgets slowly and extrapolates best in the paper; the power contains ALiBi.
    """

    kind: ClassVar[str] = "kerple"
    paper: ClassVar[str] = (
        "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation, eq. 4 and 5, Chi et al. 2022, "
        "arXiv:2205.09921"
    )
    proof: ClassVar[str] = "test_kerple_is_its_formula_and_its_exponent_stays_below_two"
    reference: ClassVar[str] = "its published formula, written out in the test"
    needs: ClassVar[frozenset[Hook]] = frozenset({Hook.SCORE_BIAS})

    form: str = choice("log", "power", default="log", help="curve of the penalty: r1 log(1 + r2 d), or r1 d^r2")

    def build(self, dims: Dims, heads: HeadShape) -> PositionModule:
        return KerpleModule(heads.heads, self.form)
