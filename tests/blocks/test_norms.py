"""Norms: their invariances, and equality with the libraries that define them."""

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from blocks.norms.standard import LAYERNORM_EPS, RMSNORM_EPS, LayerNorm, RMSNorm


def sample(seed: int = 0) -> Tensor:
    return 3 + 5 * torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_layernorm_equals_torch_and_ignores_shift_and_scale() -> None:
    norm, reference, x = LayerNorm(64).double(), torch.nn.LayerNorm(64, eps=LAYERNORM_EPS).double(), sample()
    torch.testing.assert_close(norm(x), reference(x))
    torch.testing.assert_close(norm(4 * x + 11), norm(x), rtol=1e-6, atol=1e-6)


def test_layernorm_gradient_is_orthogonal_to_ones_and_to_its_output() -> None:
    norm, x = LayerNorm(64).double(), sample().requires_grad_()
    y = norm(x)
    (gradient,) = torch.autograd.grad((y * sample(1)).sum(), x)
    assert gradient.abs().max() > 0.1
    assert gradient.sum(-1).abs().max() < 1e-10
    assert (gradient * y).sum(-1).abs().max() < 1e-4


def test_rmsnorm_equals_llama_and_ignores_scale_but_not_shift() -> None:
    norm, reference, x = RMSNorm(64), LlamaRMSNorm(64, eps=RMSNORM_EPS), sample().float()
    with torch.no_grad():
        norm.gain.copy_(torch.rand(64))
        reference.weight.copy_(norm.gain)
    torch.testing.assert_close(norm(x), reference(x))
    torch.testing.assert_close(norm(4 * x), norm(x), rtol=1e-5, atol=1e-5)
    assert (norm(x + 11) - norm(x)).abs().max() > 0.1


def test_layernorm_is_rmsnorm_of_the_centred_input() -> None:
    x = sample()
    centred = x - x.mean(-1, keepdim=True)
    torch.testing.assert_close(LayerNorm(64).double()(x), RMSNorm(64).double()(centred), rtol=1e-5, atol=1e-5)


def test_epsilon_decides_tiny_inputs() -> None:
    x = torch.full((1, 1, 4), 1e-3)
    torch.testing.assert_close(RMSNorm(4)(x), x / (1e-6 + RMSNORM_EPS) ** 0.5)


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_norms_keep_the_dtype_of_their_input(norm: type[torch.nn.Module]) -> None:
    x = sample().bfloat16()
    assert norm(64)(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(64)(x).float(), norm(64)(x.float()), rtol=2e-2, atol=2e-2)
