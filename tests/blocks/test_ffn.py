"""Feed-forward networks: equality with Llama's and with x-transformers', sizes, and what distinguishes the forms."""

import dataclasses
import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
from reference_table import Compare
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import GptOssConfig, LlamaConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaMLP

from blocks import registry
from blocks.families import AbstractFFN, Dims, Direction, Role, active_share
from blocks.ffn.clamped_swiglu import ClampedSwigluConfig
from blocks.ffn.gelu import Gelu
from blocks.ffn.modules import GatedFFN, PlainFFN
from blocks.ffn.swiglu import Swiglu
from blocks.model import ModelConfig

with warnings.catch_warnings():
    # x-transformers compiles a function with torch.jit.script, which torch deprecates.
    warnings.simplefilter("ignore", DeprecationWarning)
    from x_transformers.x_transformers import FeedForward

DIMS = Dims(d_model=24, d_ff=64, layers=2, train_len=8, max_len=8)
X = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))
FFNS = registry.variants(AbstractFFN)
DENSE = {kind: ffn for kind, ffn in FFNS.items() if ffn.dense}
PLAIN = {"relu": F.relu, "gelu": F.gelu, "silu": lambda x: x * x.sigmoid(), "relu_squared": lambda x: F.relu(x) ** 2}
GATED = {"geglu": F.gelu, "swiglu": F.silu, "glu": torch.sigmoid, "bilinear": lambda x: x, "reglu": F.relu}


def test_swiglu_equals_llama(compared: Compare) -> None:
    ours = Swiglu().build(DIMS)
    llama = LlamaMLP(LlamaConfig(hidden_size=24, intermediate_size=64, num_attention_heads=4))
    with torch.no_grad():
        for theirs, mine in ((llama.gate_proj, ours.w_gate), (llama.up_proj, ours.w_in), (llama.down_proj, ours.w_out)):
            assert isinstance(mine, nn.Linear)
            theirs.weight.copy_(mine.weight)
    compared("ffn.swiglu", "transformers LlamaMLP", ours(X), llama(X))


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
    assert set(DENSE) == set(PLAIN) | set(GATED) | {"clamped_swiglu"}


def test_clamped_swiglu_equals_gpt_oss(compared: Compare) -> None:
    ours = ClampedSwigluConfig().build(DIMS)
    config = GptOssConfig(hidden_size=24, intermediate_size=64, num_local_experts=1, num_experts_per_tok=1)
    theirs = GptOssExperts(config)
    with torch.no_grad():
        gate_up = torch.stack([ours.w_gate.weight, ours.w_in.weight], dim=1).flatten(0, 1)
        theirs.gate_up_proj.copy_(gate_up.T[None])
        theirs.down_proj.copy_(ours.w_out.weight.T[None])
        theirs.gate_up_proj_bias.zero_()
        theirs.down_proj_bias.zero_()
    x = 20 * X.flatten(0, 1)
    inner = ours.w_gate(x)
    assert inner.max() > 7, "some gates are clamped"
    expected = theirs(x, torch.zeros(10, 1, dtype=torch.int64), torch.ones(10, 1))
    compared("ffn.clamped_swiglu", "transformers GptOssExperts", ours(x[None])[0], expected)


def test_clamped_swiglu_without_offset_and_below_its_limit_is_a_swish_gate() -> None:
    ours = ClampedSwigluConfig(offset=0.0).build(DIMS)
    gate, up = ours.w_gate(X), ours.w_in(X)
    assert gate.abs().max() < 7
    torch.testing.assert_close(ours(X), ours.w_out(gate * torch.sigmoid(1.702 * gate) * up))


def test_bilinear_is_exactly_quadratic() -> None:
    ffn = FFNS["bilinear"]().build(DIMS)
    torch.testing.assert_close(ffn(3 * X), 9 * ffn(X))


@pytest.mark.parametrize(("kind", "flags"), [("silu", {"swish": True}), ("swiglu", {"swish": True, "glu": True})])
def test_forms_equal_x_transformers(compared: Compare, kind: str, flags: dict[str, bool]) -> None:
    ours = FFNS[kind]().build(DIMS)
    theirs = FeedForward(24, mult=64 / 24, no_bias=True, **flags)
    first = theirs.ff[0].proj if "glu" in flags else theirs.ff[0][0]
    gates = [ours.w_gate.weight] if "glu" in flags else []
    with torch.no_grad():
        first.weight.copy_(torch.cat([ours.w_in.weight, *gates]))
        if first.bias is not None:
            first.bias.zero_()
        theirs.ff[-1].weight.copy_(ours.w_out.weight)
    compared(f"ffn.{kind}", "x-transformers FeedForward", ours(X), theirs(X))


def test_without_an_ffn_a_layer_is_its_mixer_and_has_no_second_norm(small: Callable[..., ModelConfig]) -> None:
    config = small({"ffn.kind": "none"})
    assert not any("ffn" in name for name, _ in config.build(seed=0).named_parameters())
    assert config.canonical() == dataclasses.replace(config, d_ff=7).canonical()


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


@pytest.mark.parametrize("kind", [kind for kind, ffn in FFNS.items() if ffn.grows and not ffn.dense])
def test_declared_flops_of_experts_are_those_of_the_useful_rows(kind: str) -> None:
    """Rows beyond those are padding: at most as many again."""
    config = FFNS[kind]()
    ffn, x = config.build(DIMS), torch.randn(8, 8, 24)
    for parameter in ffn.parameters():
        nn.init.normal_(parameter)
    with FlopCounterMode(display=False) as counter:
        ffn(x)
    declared = config.flops_per_token(DIMS) * 64
    assert declared <= counter.get_total_flops() <= 2.2 * declared


@pytest.mark.parametrize("kind", DENSE)
def test_declared_flops_equal_the_counted(kind: str) -> None:
    config = FFNS[kind]()
    ffn = config.build(DIMS)
    with FlopCounterMode(display=False) as counter:
        ffn(X)
    assert counter.get_total_flops() == config.flops_per_token(DIMS) * X.shape[0] * X.shape[1]


def test_equal_expansion_means_equal_active_parameters() -> None:
    sizes = {}
    for kind, config in FFNS.items():
        if not config.grows or config.directions == {Direction.BIDIRECTIONAL}:
            continue
        d_ff = round(config().natural_width(192))
        ffn = config().build(Dims(d_model=192, d_ff=d_ff, layers=2, train_len=8, max_len=8))
        matrices = [parameter for parameter in ffn.parameters() if parameter.role != Role.ROUTER]
        sizes[kind] = sum(parameter.numel() * active_share(parameter) for parameter in matrices)
    for one, other in itertools.combinations(sizes.values(), 2):
        assert abs(one / other - 1) < 0.01, sizes
