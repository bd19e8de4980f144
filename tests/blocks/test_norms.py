"""Norms: their invariances, and equality with the libraries that define them."""

import math
import warnings

import pytest
import torch
from reference_table import Compare
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from blocks import registry
from blocks.families import AbstractNorm
from blocks.norms.light import DynamicErf, DynamicTanh, ScaleNorm
from blocks.norms.standard import LAYERNORM_EPS, RMSNORM_EPS, LayerNorm, LayerNormConfig, RMSNorm, RMSNormConfig

with warnings.catch_warnings():
    # x-transformers compiles a function with torch.jit.script, which torch deprecates.
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=DeprecationWarning)
    from x_transformers import x_transformers


def sample(seed: int = 0) -> Tensor:
    return 3 + 5 * torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_layernorm_equals_torch_and_ignores_shift_and_scale(compared: Compare) -> None:
    norm, reference, x = LayerNorm(64).double(), torch.nn.LayerNorm(64, eps=LAYERNORM_EPS).double(), sample()
    compared("norm.layernorm", "torch nn.LayerNorm", norm(x), reference(x), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(norm(4 * x + 11), norm(x), rtol=1e-6, atol=1e-6)


def test_layernorm_gradient_is_orthogonal_to_ones_and_to_its_output() -> None:
    norm, x = LayerNorm(64).double(), sample().requires_grad_()
    y = norm(x)
    (gradient,) = torch.autograd.grad((y * sample(1)).sum(), x)
    assert gradient.abs().max() > 0.1
    assert gradient.sum(-1).abs().max() < 1e-10
    assert (gradient * y).sum(-1).abs().max() < 1e-4


def test_rmsnorm_equals_llama_and_ignores_scale_but_not_shift(compared: Compare) -> None:
    norm, reference, x = RMSNorm(64), LlamaRMSNorm(64, eps=RMSNORM_EPS), sample().float()
    with torch.no_grad():
        norm.gain.copy_(torch.rand(64))
        reference.weight.copy_(norm.gain)
    compared("norm.rmsnorm", "transformers LlamaRMSNorm", norm(x), reference(x))
    torch.testing.assert_close(norm(4 * x), norm(x), rtol=1e-5, atol=1e-5)
    assert (norm(x + 11) - norm(x)).abs().max() > 0.1


def test_layernorm_is_rmsnorm_of_the_centred_input() -> None:
    x = sample()
    centred = x - x.mean(-1, keepdim=True)
    torch.testing.assert_close(LayerNorm(64).double()(x), RMSNorm(64).double()(centred), rtol=1e-5, atol=1e-5)


def jacobian(norm: torch.nn.Module) -> tuple[Tensor, Tensor]:
    x = sample()[0, 0]
    found = torch.autograd.functional.jacobian(lambda row: norm(row[None, None])[0, 0], x)
    return found, norm(x[None, None])[0, 0].detach()


def test_the_jacobian_of_layernorm_annihilates_ones_and_its_output_on_both_sides() -> None:
    found, y = jacobian(LayerNorm(64).double())
    assert found.abs().max() > 0.1
    for vector in (torch.ones(64, dtype=torch.float64), y):
        assert (found @ vector).abs().max() < 1e-4
        assert (vector @ found).abs().max() < 1e-4


def test_the_jacobian_of_rmsnorm_annihilates_its_output_but_not_ones() -> None:
    found, y = jacobian(RMSNorm(64).double())
    assert (found @ y).abs().max() < 1e-4
    assert (found @ torch.ones(64, dtype=torch.float64)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("config", "left"),
    [
        (LayerNormConfig(gain=False, bias=False), set()),
        (LayerNormConfig(bias=False), {"gain"}),
        (LayerNormConfig(gain=False), {"bias"}),
        (RMSNormConfig(gain=False), set()),
    ],
)
def test_what_is_left_out_has_no_parameter_and_is_neutral(config: AbstractNorm, left: set[str]) -> None:
    bare, full = config.build(64).double(), type(config)().build(64).double()
    assert set(dict(bare.named_parameters())) == left
    torch.testing.assert_close(bare(sample()), full(sample()))


def test_ids_of_norms_with_gain_and_bias_are_those_of_before_either_could_be_left_out() -> None:
    assert registry.identity(LayerNormConfig()) == registry.identity(RMSNormConfig()) == {}


def test_scalenorm_gives_every_row_the_same_length_and_equals_x_transformers(compared: Compare) -> None:
    ours, theirs, x = ScaleNorm(64), x_transformers.ScaleNorm(64), sample().float()
    torch.testing.assert_close(ours(x).norm(dim=-1), torch.full((2, 7), 8.0))
    with torch.no_grad():
        ours.length.fill_(3.0)
        theirs.g.fill_(3.0 / 8.0)
    torch.testing.assert_close(ours(x).norm(dim=-1), torch.full((2, 7), 3.0))
    compared("norm.scalenorm", "x-transformers ScaleNorm", ours(x), theirs(x))
    torch.testing.assert_close(ours(5 * x), ours(x))


def test_dynamic_tanh_equals_x_transformers_and_looks_at_one_channel_at_a_time(compared: Compare) -> None:
    ours, x = DynamicTanh(64, alpha=0.5), sample().float()
    theirs = x_transformers.DynamicTanh(64, init_alpha=0.5)
    compared("norm.dyt", "x-transformers DynamicTanh", ours(x), theirs(x))
    other = x.clone()
    other[0, 0, 0] += 1
    changed = (ours(other) != ours(x)).nonzero().tolist()
    assert changed == [[0, 0, 0]]


def test_dynamic_tanh_becomes_linear_as_its_slope_falls() -> None:
    x = sample()
    torch.testing.assert_close(DynamicTanh(64, alpha=1e-4).double()(x) / 1e-4, x, rtol=1e-5, atol=1e-5)


def test_epsilon_decides_tiny_inputs() -> None:
    x = torch.full((1, 1, 4), 1e-3)
    torch.testing.assert_close(RMSNorm(4)(x), x / (1e-6 + RMSNORM_EPS) ** 0.5)


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm, ScaleNorm, lambda width: DynamicTanh(width, 0.5)])
def test_norms_keep_the_dtype_of_their_input(norm: type[torch.nn.Module]) -> None:
    x = sample().bfloat16()
    assert norm(64)(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(64)(x).float(), norm(64)(x.float()), rtol=2e-2, atol=2e-2)


def test_derf_is_the_error_function_of_a_line() -> None:
    norm, x = DynamicErf(64, 0.5).double(), sample()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(len(parameter))))
    alpha, shift = norm.alpha.item(), norm.shift.item()
    bounded = torch.tensor([math.erf(alpha * value + shift) for value in x.flatten().tolist()]).double().view_as(x)
    torch.testing.assert_close(norm(x), norm.gain * bounded + norm.bias, rtol=1e-6, atol=1e-6)
    fresh = DynamicErf(64, 0.5).double()
    assert (fresh.alpha.item(), fresh.shift.item()) == (0.5, 0.0)
    torch.testing.assert_close(fresh(1e-4 * x), 1e-4 * x * 0.5 * 2 / math.sqrt(math.pi), rtol=1e-4, atol=1e-9)


def test_partial_rmsnorm_takes_the_mean_of_its_first_channels() -> None:
    x = sample()
    for share, first in ((0.25, 16), (0.0625, 4)):
        norm = RMSNorm(64, share=share).double()
        assert norm.first == first
        torch.testing.assert_close(norm(x)[..., :first].square().mean(-1), torch.ones(2, 7).double(), rtol=0, atol=1e-4)
        torch.testing.assert_close(norm(x) / norm(x)[..., :1], x / x[..., :1])
        torch.testing.assert_close(norm(4 * x), norm(x), rtol=1e-5, atol=1e-5)
        other = x.clone()
        other[..., first:] += 1
        torch.testing.assert_close(norm(other)[..., :first], norm(x)[..., :first])
    torch.testing.assert_close(RMSNorm(64, share=1.0)(x.float()), RMSNorm(64)(x.float()))
