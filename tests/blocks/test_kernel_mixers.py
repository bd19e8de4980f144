"""Mixers over features of queries and keys: random, Taylor and cosine features, and their references."""

import math

import pytest
import torch
from fla_naive import fla_naive
from reference_table import Compare
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from blocks.families import AbstractMixer, Context, Dims, InfeasibleArchitecture, MixerModule, PositionModule
from blocks.mixers.based import Based, TaylorFeatures
from blocks.mixers.cosformer import Cosformer
from blocks.mixers.performer import Performer, log_features, orthogonal_directions

pytestmark = pytest.mark.slow

DIMS = Dims(d_model=24, d_ff=48, layers=1, train_len=128, max_len=192)
PLAIN = PositionModule()
LENGTH = 63
PERFORMER = Performer(heads=2, head_dim=8, features=32)
BASED = Based(heads=2, head_dim=4, value_dim=8)
COSFORMER = Cosformer(heads=2, head_dim=8)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def built(mixer: AbstractMixer) -> MixerModule:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = mixer.build(DIMS)
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter += 0.2 * draw(*parameter.shape, seed=index)
    return module


def directions(count: int, width: int, seed: int = 0) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return orthogonal_directions(count, width)


def test_random_features_estimate_the_exponential_and_not_its_circulating_variant() -> None:
    """exp(w.x - |x|^2/2) estimates exp(q.k); exp(w.x - |w|^2/2), seen in circulating code, gives 0.766 here."""
    one = torch.eye(1, 16, dtype=torch.float64) * 16**0.25
    q, k = 0.5 * one, 0.8 * one
    w = directions(100_000, 16).double()
    estimate = torch.exp(log_features(q, w) + log_features(k, w)).sum()
    assert estimate.item() == pytest.approx(1.492, abs=0.01)
    assert math.exp(0.5 * 0.8) == pytest.approx(1.492, abs=1e-3)


def test_directions_are_orthogonal_in_blocks_and_gaussian_in_length() -> None:
    w = directions(4096, 16)
    for block in w.split(16):
        products = block @ block.T
        torch.testing.assert_close(products, torch.diag(products.diag()), rtol=0, atol=1e-4)
    lengths = w.square().sum(-1)
    assert lengths.mean().item() == pytest.approx(16, rel=0.03)
    assert lengths.var().item() == pytest.approx(2 * 16, rel=0.15)
    assert directions(20, 16).shape == (20, 16)


def test_the_error_of_random_features_falls_with_their_root() -> None:
    q, k = 0.5 * draw(256, 16).double(), 0.5 * draw(256, 16, seed=1).double()
    exact = torch.softmax(q @ k.T / 4, dim=-1)
    errors = []
    for count in (64, 256, 1024, 4096):
        w = directions(count, 16).double()
        rows = log_features(q, w).exp() @ log_features(k, w).exp().T
        errors.append(float((rows / rows.sum(-1, keepdim=True) - exact).norm() / exact.norm()))
    slope = (math.log(errors[-1]) - math.log(errors[0])) / math.log(64)
    assert -0.6 < slope < -0.4, errors
    assert errors[-1] < 0.06


@pytest.mark.parametrize("length", [1, 63, 100])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_performer_is_the_quotient_of_its_features(length: int, scale: float) -> None:
    module = built(PERFORMER)
    x = scale * draw(2, length, 24)
    q, k, v = (y.double() for y in module.project(x))
    w = module.directions.double()
    weights = torch.einsum("bthm,bshm->bhts", log_features(q, w).exp(), log_features(k, w).exp()).tril()
    mixed = torch.einsum("bhts,bshv->bthv", weights / weights.sum(-1, keepdim=True), v)
    expected = module.out(mixed.flatten(2).float())
    torch.testing.assert_close(module(x, PLAIN, Context()), expected, rtol=1e-4, atol=2e-5)


def test_many_random_features_come_close_to_softmax_attention() -> None:
    x = 0.5 * draw(2, LENGTH, 24)
    errors = []
    for features in (32, 4096):
        module = built(Performer(heads=2, head_dim=8, features=features))
        q, k, v = (y.transpose(1, 2) for y in module.project(x))
        exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        exact = module.out(exact)
        errors.append(float((module(x, PLAIN, Context()) - exact).detach().norm() / exact.detach().norm()))
    assert errors[1] < 0.25 * errors[0]
    assert errors[1] < 0.1


def test_performer_keeps_its_features_in_range_whatever_came_before() -> None:
    module = built(PERFORMER)
    x = draw(1, 40, 24)
    x[:, ::7] *= 100
    inputs, largest = module._inputs(x, torch.full((1, 1, 2), -torch.inf), None)
    assert all(part.isfinite().all() for part in inputs)
    assert inputs[0].amax() <= 1
    assert inputs[1].amax() <= 1
    assert (inputs[3] <= 0).all()
    assert largest.isfinite().all()


def test_taylor_features_multiply_to_the_expansion_and_weigh_at_least_one_half() -> None:
    q, k = 3 * draw(1, 50, 2, 4).double(), 3 * draw(1, 50, 2, 4, seed=1).double()
    features = TaylorFeatures()
    weights = torch.einsum("bthf,bshf->bhts", features(q, 0), features(k, 0))
    x = torch.einsum("bthk,bshk->bhts", q, k) / 2
    torch.testing.assert_close(weights, 1 + x + x.square() / 2)
    assert weights.min() >= 0.5 - 1e-9


def test_based_equals_flash_linear_attention(compared: Compare) -> None:
    module = built(BASED)
    x = draw(2, 256, 24)[:, :192]
    naive = fla_naive("based")
    q, k, v = (y.transpose(1, 2) for y in module.project(x))
    for form, chunks in ((naive.naive_parallel_based, {}), (naive.naive_chunk_based, {"chunk_size": 64})):
        expected = module.out(form(q, k, v, **chunks).transpose(1, 2).flatten(2))
        compared(
            "mixer.based",
            f"flash-linear-attention {form.__name__}",
            module(x, PLAIN, Context()),
            expected,
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.parametrize("length", [1, 63, 192])
def test_cosformer_is_its_quadratic_form(length: int) -> None:
    module = built(COSFORMER)
    x = draw(2, length, 24)
    q, k, v = module.project(x)
    place = torch.arange(length)
    cosine = torch.cos(math.pi * (place[:, None] - place) / (2 * DIMS.max_len)).tril()
    weights = torch.einsum("bthk,bshk->bhts", q.relu(), k.relu()) * cosine
    total = weights.sum(-1, keepdim=True)
    mixed = torch.einsum("bhts,bshv->bthv", torch.where(total > 0, weights / total, 0.0), v)
    expected = module.out(mixed.flatten(2))
    torch.testing.assert_close(module(x, PLAIN, Context()), expected, rtol=1e-3, atol=1e-4)


def test_cosformer_refuses_sequences_beyond_its_longest() -> None:
    module = built(COSFORMER)
    with pytest.raises(
        InfeasibleArchitecture, match=r"distances below 192.*run on 193 positions; run it on at most 192"
    ):
        module(draw(1, 193, 24), PLAIN, Context())
    state = module.empty_state(1, torch.device("cpu"), torch.float32)
    with pytest.raises(InfeasibleArchitecture, match="run on 193 positions"):
        module.step(draw(1, 1, 24), state, PLAIN, 192)


@pytest.mark.parametrize("length", [64, 192])
@pytest.mark.parametrize("mixer", [PERFORMER, BASED, COSFORMER])
def test_declared_flops_are_the_counted_products(mixer: AbstractMixer, length: int) -> None:
    module = built(mixer)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(draw(1, length, 24), PLAIN, Context())
    assert mixer.flops_per_token(DIMS, length, causal=False) == counter.get_total_flops() / length
    assert mixer.flops_per_token(DIMS, length, causal=True) < mixer.flops_per_token(DIMS, length, causal=False)


@pytest.mark.parametrize(
    ("mixer", "numbers"), [(PERFORMER, 2 * 32 * 9 + 2), (BASED, 2 * 21 * 9), (COSFORMER, 2 * 16 * 9)]
)
def test_the_state_never_grows(mixer: AbstractMixer, numbers: int) -> None:
    module = built(mixer)
    state = module.empty_state(1, torch.device("cpu"), torch.float32)
    for start in range(4):
        assert sum(tensor.numel() for tensor in state.values()) == numbers
        _, state = module.step(draw(1, 1, 24), state, PLAIN, start)
