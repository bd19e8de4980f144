"""Feed-forward networks: equality with Llama's and with x-transformers', sizes, and what distinguishes the forms."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from blocks import registry
from blocks.families import AbstractFFN, Dims
from blocks.ffn.gelu import Gelu
from blocks.ffn.modules import GatedFFN, PlainFFN
from blocks.ffn.swiglu import Swiglu

DIMS = Dims(d_model=24, d_ff=64, layers=2, train_len=8, max_len=8)
X = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))
FFNS = registry.variants(AbstractFFN)
PLAIN = {"relu": F.relu, "gelu": F.gelu, "relu_squared": lambda x: F.relu(x) ** 2}
GATED = {"geglu": F.gelu, "swiglu": F.silu}


def test_swiglu_equals_llama() -> None:
    ours = Swiglu().build(DIMS)
    llama = LlamaMLP(LlamaConfig(hidden_size=24, intermediate_size=64, num_attention_heads=4))
    with torch.no_grad():
        for theirs, mine in ((llama.gate_proj, ours.w_gate), (llama.up_proj, ours.w_in), (llama.down_proj, ours.w_out)):
            assert isinstance(mine, nn.Linear)
            theirs.weight.copy_(mine.weight)
    torch.testing.assert_close(ours(X), llama(X))


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_forms_are_two_matrices_around_their_activation(kind: str) -> None:
    ffn = FFNS[kind]().build(DIMS)
    assert isinstance(ffn, PlainFFN)
    torch.testing.assert_close(ffn(X), PLAIN[kind](X @ ffn.w_in.weight.T) @ ffn.w_out.weight.T)


@pytest.mark.parametrize("kind", GATED)
def test_gated_forms_multiply_an_activated_gate(kind: str) -> None:
    ffn = FFNS[kind]().build(DIMS)
    assert isinstance(ffn, GatedFFN)
    inner = GATED[kind](X @ ffn.w_gate.weight.T) * (X @ ffn.w_in.weight.T)
    torch.testing.assert_close(ffn(X), inner @ ffn.w_out.weight.T)


def test_every_form_here_is_covered_by_a_definition() -> None:
    assert set(FFNS) == set(PLAIN) | set(GATED)


def test_the_two_gelus_differ_a_little_and_only_a_little() -> None:
    erf, tanh = Gelu(form="erf").build(DIMS), Gelu(form="tanh").build(DIMS)
    assert isinstance(erf, PlainFFN)
    assert isinstance(tanh, PlainFFN)
    x = torch.linspace(-6, 6, 1001)
    gap = (erf.activation(x) - tanh.activation(x)).abs().max()
    assert 1e-4 < gap < 5e-4


def test_squared_relu_has_gradient_two_relu() -> None:
    ffn = FFNS["relu_squared"]().build(DIMS)
    assert isinstance(ffn, PlainFFN)
    x = torch.linspace(-2, 2, 9, requires_grad=True)
    (gradient,) = torch.autograd.grad(ffn.activation(x).sum(), x)
    torch.testing.assert_close(gradient, 2 * F.relu(x.detach()))


@pytest.mark.parametrize("kind", FFNS)
def test_declared_flops_equal_the_counted(kind: str) -> None:
    config = FFNS[kind]()
    ffn = config.build(DIMS)
    with FlopCounterMode(display=False) as counter:
        ffn(X)
    assert counter.get_total_flops() == config.flops_per_token(DIMS) * X.shape[0] * X.shape[1]


def test_equal_expansion_means_equal_parameters() -> None:
    sizes = {}
    for kind, config in FFNS.items():
        d_ff = round(4 * 192 * config.width_factor)
        ffn = config().build(Dims(d_model=192, d_ff=d_ff, layers=2, train_len=8, max_len=8))
        sizes[kind] = sum(parameter.numel() for parameter in ffn.parameters())
    for one, other in itertools.combinations(sizes.values(), 2):
        assert abs(one / other - 1) < 0.01, sizes
