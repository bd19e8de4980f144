"""Long convolutions and Hyena: three forms of one function, causality to the last bit, reductions, references."""

import itertools
import math

import pytest
import torch
from drawn_heads import with_gradients
from reference_table import Compare
from torch import Tensor
from torch.nn import functional as F

from blocks.families import Context, Dims, PositionModule
from blocks.mixers.hyena import Hyena, HyenaModule
from blocks.ops.backends import BackendError
from blocks.ops.long_convolution import (
    ConvolutionNeeds,
    blocked,
    choose_long_convolution,
    direct,
    transformed,
)

pytestmark = pytest.mark.slow

DIMS = Dims(d_model=24, d_ff=48, layers=1, train_len=256, max_len=256)
PLAIN = PositionModule()
HYENA = Hyena(width=16, filter_width=16)


def drawn(length: int, width: int = 5, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, length, width, generator=generator).to(dtype),
        torch.randn(length, width, generator=generator).to(dtype),
    ]


@pytest.mark.parametrize("length", [1, 31, 32, 33, 100, 200])
def test_forms_equal_a_direct_convolution_with_gradients(length: int) -> None:
    inputs = drawn(length)

    def grouped(u: Tensor, taps: Tensor) -> Tensor:
        padded = F.pad(u.transpose(1, 2), (length - 1, 0))
        return F.conv1d(padded, taps.flip(0).T[:, None], groups=u.shape[2]).transpose(1, 2)

    expected = with_gradients(grouped, *inputs)
    forms = [direct, transformed, *(lambda u, taps, block=block: blocked(u, taps, block) for block in (1, 8, 32))]
    for form in forms:
        for ours, reference in zip(with_gradients(form, *inputs), expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)


def test_the_direct_form_passes_gradcheck_in_float64() -> None:
    assert torch.autograd.gradcheck(direct, [x.requires_grad_() for x in drawn(5, 2)])


def test_without_padding_to_twice_the_length_a_transform_wraps_around() -> None:
    u, taps = drawn(50)
    wrapped = torch.fft.irfft(torch.fft.rfft(u, dim=1) * torch.fft.rfft(taps, dim=0), n=50, dim=1)
    assert (wrapped - direct(u, taps)).abs().max() > 1
    assert (transformed(u, taps) - direct(u, taps)).abs().max() < 1e-12


def test_blocks_are_causal_to_the_last_bit_and_one_transform_is_not() -> None:
    u, taps = drawn(200, dtype=torch.float32)
    later = u.clone()
    later[:, 77] += 100
    assert torch.equal(blocked(u, taps)[:, :77], blocked(later, taps)[:, :77])
    assert not torch.equal(transformed(u, taps)[:, :77], transformed(later, taps)[:, :77])


def test_the_choice_of_long_convolution_is_recorded_and_a_leaking_one_refused() -> None:
    record = choose_long_convolution(ConvolutionNeeds()).record
    assert record == "blocked (not transformed: its rounding is not causal; not direct: blocked comes first)"
    assert choose_long_convolution(ConvolutionNeeds(exactly_causal=False)).run is transformed
    with pytest.raises(BackendError, match="its rounding is not causal"):
        choose_long_convolution(ConvolutionNeeds(), "transformed")


def built() -> HyenaModule:
    module = HYENA.build(DIMS)
    assert isinstance(module, HyenaModule)
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
    return module


@pytest.mark.parametrize("length", [1, 63, 256])
def test_hyena_is_a_gated_direct_convolution(compared: Compare, length: int) -> None:
    module = built()
    x = torch.randn(2, length, 24, generator=torch.Generator().manual_seed(0))
    projected = torch.cat([module.query(x), module.key(x), module.value(x)], dim=-1).transpose(1, 2)
    outer, inner, value = F.conv1d(F.pad(projected, (2, 0)), module.taps[:, None], groups=48).chunk(3, dim=1)
    u = inner * value
    taps = module.filter(length).T[:, None].flip(-1)
    mixed = F.conv1d(F.pad(u, (length - 1, 0)), taps, groups=16) + module.skip[:, None] * u
    expected = module.out((outer * mixed).transpose(1, 2))
    compared("mixer.hyena", "torch conv1d", module(x, PLAIN, Context()), expected, rtol=1e-4, atol=1e-5)


def test_hyena_without_a_filter_is_pure_gating() -> None:
    module = built()
    module.filter.leave.weight.data.zero_()
    module.taps.data = F.pad(torch.ones(48, 1), (2, 0))
    x = torch.randn(2, 63, 24, generator=torch.Generator().manual_seed(0))
    expected = module.out(module.query(x) * module.key(x) * module.value(x) * module.skip)
    torch.testing.assert_close(module(x, PLAIN, Context()), expected, rtol=1e-5, atol=1e-6)


def test_the_filter_fades_and_does_not_depend_on_how_many_taps_are_asked_for() -> None:
    filters = built().filter
    torch.testing.assert_close(filters(256)[:40], filters(40))
    fade = torch.exp(-filters.rates())
    assert fade.max().item() == pytest.approx(0.01 ** (1 / 1.5))
    assert fade.min().item() == pytest.approx(0.01 ** (1 / 0.3))


def test_decoding_keeps_one_row_per_token() -> None:
    module = built()
    state = module.empty_state(1, torch.device("cpu"), torch.float32)
    for start in range(4):
        _, state = module.step(torch.ones(1, 1, 24), state, PLAIN, start)
        assert sum(tensor.numel() for tensor in state.values()) == 2 * 48 + 16 * (start + 1)


def test_flops_per_token_grow_with_the_square_of_the_logarithm_of_the_length() -> None:
    per_token = [HYENA.flops_per_token(DIMS, length, True) for length in (256, 1024, 4096, 16384)]
    steps = [after - before for before, after in itertools.pairwise(per_token)]
    assert steps[0] < steps[1] < steps[2]
    assert steps[2] - steps[1] == pytest.approx(steps[1] - steps[0])
    assert steps[2] < 16 * (2 * 5 * math.log2(2 * 16384) + 12)
