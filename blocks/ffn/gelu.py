"""Two matrices with a Gaussian error linear unit between."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from blocks.families import AbstractFFN, Dims
from blocks.ffn.modules import PlainFFN, expansion_field, plain_flops
from blocks.registry import register
from search_space.domains import choice


def _erf(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="none")


def _tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_FORMS = {"erf": _erf, "tanh": _tanh}


@register
@dataclass(frozen=True, kw_only=True)
class Gelu(AbstractFFN):
    """W2 gelu(W1 x): smooth rectifier of BERT and GPT-2."""

    kind: ClassVar[str] = "gelu"
    paper: ClassVar[str] = "Gaussian Error Linear Units, Hendrycks and Gimpel 2016, section 2, arXiv:1606.08415"
    proof: ClassVar[str] = "test_plain_forms_are_two_matrices_around_their_activation"
    reference: ClassVar[str] = "its published formula, written out in the test"
    width_factor: ClassVar[float] = 1.0

    expansion: float = expansion_field()
    form: str = choice(
        "erf", "tanh", default="erf", opt_in=True, help="exact (erf) or GPT-2's tanh form; they differ by at most 5e-4"
    )

    def build(self, dims: Dims) -> nn.Module:
        return PlainFFN(dims, _FORMS[self.form])

    def flops_per_token(self, dims: Dims) -> float:
        return plain_flops(dims)
