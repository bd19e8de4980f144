"""Mixers: decoding, padding, causality, reach, reductions, state, FLOPs, extremes."""

import dataclasses

import pytest
import torch
from small_mixers import (
    CPU,
    DIMS,
    KINDS,
    LENGTH,
    MIXERS,
    PAIRS,
    PLAIN,
    SMALL_LINEAR,
    SMALL_SOFTMAX,
    SMALL_WINDOW,
    build,
    decode,
    draw,
)
from torch.utils.flop_counter import FlopCounterMode

from blocks.families import AbstractMixer, Context, Hook, MixerModule, Role
from blocks.mixers.linear import Linear
from blocks.mixers.sliding_window import SlidingWindow
from blocks.mixers.softmax import Softmax
from blocks.ops.linear_attention import CHUNK


@pytest.mark.slow
@pytest.mark.parametrize(("mixer", "kind"), PAIRS)
@pytest.mark.parametrize("cuts", [tuple(range(1, LENGTH)), (1,), (4, 5, 11), (LENGTH - 1,)])
def test_decoding_from_any_split_equals_the_full_pass(mixer: AbstractMixer, kind: str, cuts: tuple[int, ...]) -> None:
    module, position = build(mixer, kind)
    x = draw(2, LENGTH, 24)
    torch.testing.assert_close(decode(module, x, position, cuts), module(x, position, Context()), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("mixer", "kind"), [pair for pair in PAIRS if Hook.PLACE not in KINDS[pair[1]].needs])
def test_padding_on_either_side_changes_no_live_output(mixer: AbstractMixer, kind: str) -> None:
    """Left padding moves absolute positions, which are added to the embedding before any mixer is reached."""
    module, position = build(mixer, kind)
    x = draw(2, LENGTH, 24)
    alone = module(x, position, Context())
    padded = torch.cat([draw(2, 4, 24, seed=1), x, draw(2, 3, 24, seed=2)], dim=1)
    live = torch.zeros(2, LENGTH + 7, dtype=torch.bool)
    live[:, 4 : LENGTH + 4] = True
    y = module(padded, position, Context(live=live))
    torch.testing.assert_close(y[:, 4 : LENGTH + 4], alone, rtol=1e-4, atol=1e-5)
    assert y[:, :4].eq(0).all()
    assert y[:, LENGTH + 4 :].eq(0).all()


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_row_alone_equals_the_row_in_a_batch(mixer: AbstractMixer) -> None:
    module, position = build(mixer)
    x = draw(3, LENGTH, 24)
    torch.testing.assert_close(module(x, position, Context())[1:2], module(x[1:2], position, Context()))


@pytest.mark.parametrize("length", [1, 2, 15, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
@pytest.mark.parametrize("mixer", MIXERS)
def test_no_output_has_a_gradient_from_a_later_input(mixer: AbstractMixer, length: int) -> None:
    module, position = build(mixer, "rotary")
    x = draw(1, length, 24).requires_grad_()
    for t in {0, length // 2, length - 1}:
        (gradient,) = torch.autograd.grad(module(x, position, Context())[:, t].sum(), x)
        assert gradient[:, t + 1 :].eq(0).all()
        assert gradient[:, t].ne(0).any()


@pytest.mark.parametrize(("window", "layers"), [(3, 1), (3, 2), (4, 3), (1, 2)])
def test_windows_of_stacked_layers_reach_as_far_as_their_sum(window: int, layers: int) -> None:
    module, position = build(dataclasses.replace(SMALL_WINDOW, window=window))
    x = draw(1, LENGTH, 24).requires_grad_()
    y = x
    for _ in range(layers):
        y = y + module(y, position, Context())
    (gradient,) = torch.autograd.grad(y[:, -1].sum(), x)
    reached = gradient.abs().sum((0, 2)).ne(0).sum().item()
    assert reached == layers * (window - 1) + 1


def test_a_window_as_long_as_the_model_runs_is_plain_softmax() -> None:
    wide = dataclasses.replace(SMALL_WINDOW, window=64, qk_norm="rms", attention_dropout=0.1)
    assert wide.canonical(DIMS) == dataclasses.replace(SMALL_SOFTMAX, qk_norm="rms", attention_dropout=0.1)
    narrow = dataclasses.replace(wide, window=32)
    assert narrow.canonical(DIMS) is narrow
    x = draw(2, 64, 24)
    ours, position = build(wide, "rotary")
    plain, _ = build(wide.canonical(DIMS), "rotary")
    ours.eval(), plain.eval()
    torch.testing.assert_close(ours(x, position, Context()), plain(x, position, Context()))


def test_a_window_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="window must be at least 1, the token itself; got 0"):
        dataclasses.replace(SMALL_WINDOW, window=0).check(DIMS)


@pytest.mark.parametrize(
    ("mixer", "after"),
    [
        (SMALL_SOFTMAX, lambda tokens: 2 * tokens * 2 * 8),
        (SMALL_WINDOW, lambda tokens: 2 * 4 * 2 * 8),
        (SMALL_LINEAR, lambda tokens: 2 * 8 * 8 + 2 * 8),
    ],
)
def test_state_holds_just_what_decoding_needs(mixer: AbstractMixer, after: object) -> None:
    module, position = build(mixer)
    state = module.empty_state(1, CPU, torch.float32)
    for start in (0, 1, 2, 3, 4, 5, 6):
        _, state = module.step(draw(1, 1, 24), state, position, start)
        assert callable(after)
        assert sum(tensor.numel() for tensor in state.values()) == after(start + 1)


@pytest.mark.parametrize("mixer", MIXERS)
def test_bfloat16_autocast_stays_close_to_float64(mixer: AbstractMixer) -> None:
    module, position = build(mixer, "rotary")
    x = draw(2, 100, 24)
    exact = module.double()(x.double(), position, Context())
    module.float()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x, position, Context())
    assert y.dtype == torch.bfloat16
    assert (y.double() - exact).norm() / exact.norm() < 0.03


@pytest.mark.parametrize("mixer", [SMALL_SOFTMAX, SMALL_WINDOW, SMALL_LINEAR])
def test_huge_inputs_give_finite_outputs_and_gradients(mixer: AbstractMixer) -> None:
    module, position = build(mixer, "rotary")
    y = module(100 * draw(2, LENGTH, 24), position, Context())
    y.sum().backward()
    assert y.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


def counted_flops(module: MixerModule, length: int) -> float:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(draw(1, length, 24), PLAIN, Context())
    return counter.get_total_flops() / length


@pytest.mark.parametrize("length", [CHUNK, 3 * CHUNK])
def test_declared_flops_equal_the_counted_matrix_products(length: int) -> None:
    softmax = dataclasses.replace(SMALL_SOFTMAX, entropy_weight=0.01)
    assert softmax.flops_per_token(DIMS, length, causal=False) == counted_flops(softmax.build(DIMS), length)
    assert SMALL_LINEAR.flops_per_token(DIMS, length, causal=False) == counted_flops(SMALL_LINEAR.build(DIMS), length)


@pytest.mark.parametrize(
    ("mixer", "window", "products"), [(SMALL_SOFTMAX, 50, 2), (SMALL_WINDOW, 5, 2), (SMALL_LINEAR, None, 3)]
)
def test_causal_flops_count_visible_pairs_only(mixer: AbstractMixer, window: int | None, products: int) -> None:
    """Logits and weighted values are two products a pair; linear attention's normaliser is the third."""
    length = 50
    shape = mixer.head_shape()
    pairs = sum(min(t + 1, window or length) for t in range(length))
    difference = mixer.flops_per_token(DIMS, length, True) - mixer.flops_per_token(DIMS, 1, True)
    assert difference * length == pytest.approx(2 * products * shape.heads * shape.head_dim * (pairs - length))


def test_inner_width_is_free_of_the_model_width() -> None:
    module = Softmax(kv_heads=8, queries_per_kv=8, head_dim=128).build(DIMS)
    shapes = {parameter.role: tuple(parameter.shape) for parameter in module.parameters()}
    assert shapes == {
        Role.QUERY: (8192, 24),
        Role.KEY: (1024, 24),
        Role.VALUE: (1024, 24),
        Role.MIXER_OUT: (24, 8192),
    }


def test_linear_attention_offers_neither_bias_nor_scale() -> None:
    assert Linear.offers == {Hook.EMBEDDING, Hook.ROTATE}
    assert Softmax.offers == set(Hook)
    assert SlidingWindow.offers == set(Hook) - {Hook.PLACE}


def test_linear_rotation_leaves_the_denominator_alone() -> None:
    """With every value one, the output is numerator over denominator: exactly one, unless the numerator is rotated."""
    module, position = build(SMALL_LINEAR, "rotary")
    module.value.weight.data.zero_()
    x = torch.cat([draw(1, LENGTH, 23), torch.ones(1, LENGTH, 1)], dim=-1)
    module.value.weight.data[:, -1] = 1.0
    module.out.weight.data = torch.eye(24, 16)
    plain, rotated = (module(x, scheme, Context())[..., :16] for scheme in (PLAIN, position))
    torch.testing.assert_close(plain, torch.ones(1, LENGTH, 16))
    assert (rotated[:, 1:] - 1).abs().max() > 0.3
    torch.testing.assert_close(rotated[:, 0], torch.ones(1, 16))


def test_feature_maps_are_what_they_are_called() -> None:
    x = torch.tensor([-2.0, 0.0, 3.0])
    values = {
        name: dataclasses.replace(SMALL_LINEAR, feature_map=name).build(DIMS).features(x).tolist()
        for name in ("elu", "relu", "relu_squared")
    }
    assert values["elu"] == pytest.approx([0.135335, 1.0, 4.0], abs=1e-6)
    assert values["relu"] == [0.0, 0.0, 3.0]
    assert values["relu_squared"] == [0.0, 0.0, 9.0]
