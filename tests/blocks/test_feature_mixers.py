"""Mixers over features of queries and keys that are learned: squares, and softmaxes."""

import pytest
import torch
from fla_naive import fla_naive
from reference_table import Compare
from small_mixers import CPU, DIMS, LENGTH, PLAIN, build, draw
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from blocks.families import AbstractMixer, Context
from blocks.mixers.hedgehog import Hedgehog, SpikyFeatures
from blocks.mixers.kernels import KernelModule
from blocks.mixers.rebased import Rebased, SquareFeatures

pytestmark = pytest.mark.slow

REBASED = Rebased(heads=2, head_dim=4, value_dim=8)
HEDGEHOG = Hedgehog(heads=2, head_dim=8)


def test_square_features_multiply_to_the_square_and_count_each_pair_once() -> None:
    features = SquareFeatures(4).double()
    for index, parameter in enumerate(features.parameters()):
        parameter.data += draw(4, seed=5 + index).double()
    q, k = (draw(1, 50, 2, 4, seed=seed).double() for seed in (0, 1))
    weights = torch.einsum("bthf,bshf->bhts", features(q, 0), features(k, 0))
    normed_q, normed_k = (torch.nn.functional.layer_norm(x, (4,), features.gain, features.bias) for x in (q, k))
    torch.testing.assert_close(weights, torch.einsum("bthk,bshk->bhts", normed_q, normed_k).square() / 4)
    assert features(q, 0).shape[-1] == 10


def test_rebased_equals_flash_linear_attention(compared: Compare) -> None:
    module, _ = build(REBASED)
    assert isinstance(module, KernelModule)
    x = draw(2, LENGTH, 24)
    features = module.features
    assert isinstance(features, SquareFeatures)
    q, k, v = module.project(x)
    q, k = (torch.nn.functional.layer_norm(y, (4,), features.gain, features.bias) for y in (q, k))
    mixed = fla_naive("rebased").naive_parallel_rebased(*(y.transpose(1, 2) for y in (q, k, v)))
    expected = module.out(mixed.transpose(1, 2).flatten(2))
    compared(
        "mixer.rebased",
        "flash-linear-attention naive_parallel_rebased",
        module(x, PLAIN, Context()),
        expected,
        rtol=1e-4,
        atol=2e-5,
    )


@pytest.mark.parametrize("length", [1, 21, 64])
def test_hedgehog_is_its_quadratic_form(length: int) -> None:
    module, _ = build(HEDGEHOG)
    assert isinstance(module, KernelModule)
    x = draw(2, length, 24)
    q, k, v = module.project(x)

    def features(y: Tensor, spiky: object) -> Tensor:
        assert isinstance(spiky, SpikyFeatures)
        mapped = torch.stack([y[:, :, head] @ spiky.weight[head].T for head in range(2)], dim=2)
        return torch.softmax(torch.cat([mapped, -mapped], dim=-1), dim=-1)

    weights = torch.einsum("bthf,bshf->bhts", features(q, module.features), features(k, module.key_features)).tril()
    mixed = torch.einsum("bhts,bshv->bthv", weights / weights.sum(-1, keepdim=True), v)
    torch.testing.assert_close(module(x, PLAIN, Context()), module.out(mixed.flatten(2)), rtol=1e-4, atol=1e-5)


def test_hedgehog_features_are_positive_sum_to_one_and_start_without_a_map() -> None:
    x = 5 * draw(2, 30, 2, 8)
    y = SpikyFeatures(2, 8)(x, 0)
    assert y.min() > 0
    torch.testing.assert_close(y.sum(-1), torch.ones(2, 30, 2))
    torch.testing.assert_close(y, torch.softmax(torch.cat([x, -x], dim=-1), dim=-1))


@pytest.mark.parametrize("length", [21, 64])
@pytest.mark.parametrize("mixer", [REBASED, HEDGEHOG])
def test_declared_flops_are_the_counted_products(mixer: AbstractMixer, length: int) -> None:
    module, _ = build(mixer)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(draw(1, length, 24), PLAIN, Context())
    assert mixer.flops_per_token(DIMS, length, causal=False) == counter.get_total_flops() / length
    assert mixer.flops_per_token(DIMS, length, causal=True) < mixer.flops_per_token(DIMS, length, causal=False)


@pytest.mark.parametrize(("mixer", "numbers"), [(REBASED, 2 * 10 * 9), (HEDGEHOG, 2 * 16 * 9)])
def test_the_state_never_grows(mixer: AbstractMixer, numbers: int) -> None:
    module, _ = build(mixer)
    state = module.empty_state(1, CPU, torch.float32)
    for start in range(4):
        assert sum(tensor.numel() for tensor in state.values()) == numbers
        _, state = module.step(draw(1, 1, 24), state, PLAIN, start)
