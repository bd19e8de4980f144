"""Biases on logits by distance: Kerple, Sandwich, the dynamic bias and FIRE."""

import dataclasses
import math
import warnings

import pytest
import torch
from placed import BOTH, CPU, DIMS, SHAPE, draw, filled
from reference_table import Compare
from torch import Tensor

from blocks.families import AbstractPosition, PositionModule
from blocks.ops.toeplitz import every_distance, over_pairs
from blocks.positions.alibi import Alibi
from blocks.positions.dynamic import Dynamic, DynamicModule
from blocks.positions.fire import FIRST_THRESHOLD, Fire, FireModule
from blocks.positions.kerple import Kerple, KerpleModule
from blocks.positions.sandwich import Sandwich
from blocks.positions.sinusoidal import sinusoids

pytestmark = pytest.mark.slow

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=DeprecationWarning)
    from x_transformers import x_transformers

TOEPLITZ = [Kerple(form="log"), Kerple(form="power"), Sandwich(), Sandwich(width=32), Dynamic()]
ALL = [*TOEPLITZ, Fire()]


def bias(position: PositionModule, n_query: int, n_key: int, start: int = 0) -> Tensor:
    values = position.score_bias(n_query, n_key, start)
    assert values is not None
    return values


def test_values_of_distances_are_laid_out_over_pairs() -> None:
    distance = every_distance(3, 10, 7, CPU)
    pairs = over_pairs(distance[None].double(), 10)[0]
    expected = torch.arange(7, 10)[:, None] - torch.arange(10)
    torch.testing.assert_close(pairs, expected.double())


@pytest.mark.parametrize("config", TOEPLITZ)
@pytest.mark.parametrize("dims", [DIMS, BOTH], ids=["causal", "bidirectional"])
def test_the_bias_is_the_same_for_any_pair_at_equal_signed_distance(config: AbstractPosition, dims: object) -> None:
    values = bias(filled(config.build(BOTH if dims is BOTH else DIMS, SHAPE)), 30, 30)
    torch.testing.assert_close(values[:, 1:, 1:], values[:, :-1, :-1], rtol=1e-12, atol=1e-12)
    assert (values[:, 5:] - values[:, :-5]).abs().max() > 1e-3


@pytest.mark.parametrize("config", ALL)
@pytest.mark.parametrize("start", [1, 7, 15])
def test_rows_from_a_start_equal_the_same_rows_of_the_whole(config: AbstractPosition, start: int) -> None:
    position = filled(config.build(DIMS, SHAPE))
    torch.testing.assert_close(bias(position, 16 - start, 16, start), bias(position, 16, 16)[:, start:])


@pytest.mark.parametrize("config", ALL)
def test_every_bias_is_finite_far_past_the_training_length(config: AbstractPosition) -> None:
    for module in (config.build(DIMS, SHAPE), config.build(DIMS, SHAPE).bfloat16()):
        assert bias(module, 1, 5000, 4999).isfinite().all()


def test_power_kerple_starts_as_alibi_at_exponent_one_and_log_kerple_below_it() -> None:
    alibi = bias(Alibi().build(DIMS, SHAPE), 64, 64)
    torch.testing.assert_close(bias(Kerple(form="power").build(DIMS, SHAPE), 64, 64), alibi, rtol=1e-5, atol=1e-5)
    distance = (torch.arange(64)[:, None] - torch.arange(64)).abs()
    slopes = -alibi[:, 1, 0]
    log = bias(Kerple(form="log").build(DIMS, SHAPE), 64, 64)
    torch.testing.assert_close(log, -slopes[:, None, None] * torch.log1p(distance), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["log", "power"])
def test_kerple_is_its_formula_and_its_exponent_stays_below_two(form: str) -> None:
    position = filled(Kerple(form=form).build(DIMS, SHAPE))
    assert isinstance(position, KerpleModule)
    position.raw_shape.data = torch.tensor([-30.0, -1.0, 0.5, 30.0]).double()
    rate = torch.nn.functional.softplus(position.raw_rate)
    values = bias(position, 50, 50)
    for head in range(4):
        raw = position.raw_shape[head]
        for distance in (0, 1, 2, 49):
            curve = (
                torch.log1p(torch.nn.functional.softplus(raw) * distance)
                if form == "log"
                else (torch.tensor(float(distance)).double() ** (2 * raw.sigmoid()) if distance else raw * 0)
            )
            torch.testing.assert_close(values[head, 49, 49 - distance], -rate[head] * curve)
    values.sum().backward()
    assert position.raw_shape.grad is not None
    assert position.raw_shape.grad.isfinite().all()
    assert (rate > 0).all()
    if form == "power":
        assert values[3, 49, 0] >= -rate[3] * 49**2 * (1 + 1e-9)


@pytest.mark.parametrize("width", [32, 128])
def test_sandwich_is_the_product_of_sinusoidal_positions_up_to_a_constant_per_head(width: int) -> None:
    values = bias(Sandwich(width=width).build(DIMS, SHAPE).double(), 40, 40)
    table = sinusoids(0, 40, width, CPU, torch.float64)
    compression = torch.tensor([2.0, 4.0, 6.0, 8.0]).double()
    expected = (table @ table.T)[None] / compression[:, None, None]
    torch.testing.assert_close(values + (width / 2 / compression)[:, None, None], expected, rtol=1e-10, atol=1e-10)
    assert (values.diagonal(dim1=1, dim2=2) == 0).all()


def test_dynamic_bias_equals_x_transformers(compared: Compare) -> None:
    ours = Dynamic(hidden=16).build(DIMS, SHAPE)
    assert isinstance(ours, DynamicModule)
    theirs = x_transformers.DynamicPositionBias(16, heads=4, depth=1, log_distance=True)
    first, last = theirs.mlp[0][0], theirs.mlp[1]
    first.weight.data, first.bias.data = ours.curve.hidden.weight.data, ours.curve.hidden.bias.data
    last.weight.data, last.bias.data = ours.curve.out.weight.data, torch.zeros(4)
    compared(
        "position.dynamic",
        "x-transformers DynamicPositionBias",
        bias(ours, 37, 37),
        theirs(37, 37),
        rtol=1e-5,
        atol=1e-6,
    )
    compared(
        "position.dynamic",
        "x-transformers DynamicPositionBias",
        bias(ours, 5, 37, 32),
        theirs(5, 37),
        rtol=1e-5,
        atol=1e-6,
    )


def fire_with(threshold: float, steepness: float) -> FireModule:
    position = filled(Fire().build(DIMS, SHAPE))
    assert isinstance(position, FireModule)
    position.threshold.data.fill_(threshold / FIRST_THRESHOLD)
    position.steepness.data.fill_(steepness)
    return position


@pytest.mark.parametrize("length", [1, 7, 300, 3000])
@pytest.mark.parametrize(("threshold", "steepness"), [(1.0, 0.1), (20.0, 5.0), (512.0, -0.1), (0.0, 0.0)])
def test_fire_reads_numbers_from_zero_to_one_at_any_length(length: int, threshold: float, steepness: float) -> None:
    position = fire_with(threshold, steepness)
    progress = position.progress(1, length, length - 1)
    assert progress.isfinite().all()
    assert progress.min() >= 0
    assert progress.max() <= 1
    assert progress[0, -1] == 0
    if steepness and length > threshold + 1:
        assert progress[0, 0] == 1


def test_fire_is_its_formula_and_learns_its_threshold() -> None:
    position = fire_with(10.0, 0.3)
    progress = position.progress(30, 30)
    for query, key in ((4, 1), (9, 9), (25, 0), (29, 12)):
        ratio = math.log(0.3 * (query - key) + 1) / math.log(0.3 * max(query, 10.0) + 1)
        assert progress[query, key].item() == pytest.approx(ratio, rel=1e-12)
    weight, shift, out = position.curve.hidden.weight[:, 0], position.curve.hidden.bias, position.curve.out.weight
    expected = out @ (weight * progress[25, 3] + shift).relu()
    torch.testing.assert_close(bias(position, 30, 30)[:, 25, 3], expected)
    (gradient,) = torch.autograd.grad(bias(position, 8, 8).square().sum(), position.threshold)
    assert gradient.abs() > 0


def test_fire_is_refused_where_old_keys_are_dropped_and_documents_packed() -> None:
    assert not Fire.relative
    values = bias(fire_with(10.0, 0.3), 30, 30)
    assert (values[:, 29, 19] - values[:, 20, 10]).abs().max() > 1e-6


@pytest.mark.parametrize("config", ALL)
def test_one_head_and_many_are_served(config: AbstractPosition) -> None:
    for heads in (1, 5, 12):
        shape = dataclasses.replace(SHAPE, heads=heads)
        assert bias(config.build(DIMS, shape), 3, 5, 2).shape == (heads, 3, 5)


def test_drawn_scores_move_with_the_bias_of_their_own_head_alone() -> None:
    position = filled(Kerple().build(DIMS, SHAPE))
    assert isinstance(position, KerpleModule)
    before = bias(position, 9, 9)
    position.raw_rate.data[2] += draw(1)[0].abs() + 0.5
    changed = (bias(position, 9, 9) - before).abs().amax((1, 2)) > 0
    assert changed.tolist() == [False, False, True, False]
