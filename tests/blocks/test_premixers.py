"""Premixers: a short convolution starts as the identity, decodes as it trains, and never looks at padding."""

import dataclasses

import pytest
import torch

from blocks.families import Context, Dims, Direction, MixerModule, PositionModule
from blocks.premixers.none import NoPremixer
from blocks.premixers.short_conv import ShortConv, ShortConvModule
from blocks.premixers.token_shift import TokenShift, TokenShiftModule

DIMS = Dims(d_model=6, d_ff=8, layers=1, train_len=16, max_len=16)
BOTH = dataclasses.replace(DIMS, direction=Direction.BIDIRECTIONAL)
CPU = torch.device("cpu")
POSITION = PositionModule()


def inputs(length: int = 11, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, length, 6, generator=torch.Generator().manual_seed(seed))


def trained(width: int) -> MixerModule:
    """A convolution with taps other than those it starts with."""
    module = ShortConv(width=width).build(DIMS)
    assert isinstance(module, ShortConvModule)
    torch.nn.init.normal_(module.taps, generator=torch.Generator().manual_seed(width))
    return module


def test_no_premixer_passes_its_input() -> None:
    x = inputs()
    module = NoPremixer().build(DIMS)
    assert module(x, POSITION, Context()) is x
    assert module.step(x, {}, POSITION, 0) == (x, {})


def test_convolution_starts_as_the_identity_with_every_tap_trainable() -> None:
    module = ShortConv(width=4).build(DIMS)
    y = module(inputs(), POSITION, Context())
    assert y.equal(inputs())
    (taps,) = module.parameters()
    (gradient,) = torch.autograd.grad((y * inputs(seed=1)).sum(), taps)
    assert gradient.shape == (6, 4)
    assert gradient.ne(0).all()


@pytest.mark.parametrize("width", [2, 3, 4])
def test_output_depends_on_the_last_tokens_of_its_width_only(width: int) -> None:
    x = inputs().requires_grad_()
    y = trained(width)(x, POSITION, Context())
    (gradient,) = torch.autograd.grad(y[:, 6].sum(), x)
    assert gradient.abs().sum((0, 2)).nonzero()[:, 0].tolist() == list(range(7 - width, 7))


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("cuts", [(1, 2, 3), (4,), (10,), tuple(range(1, 11))])
def test_decoding_from_any_split_equals_the_full_pass(width: int, cuts: tuple[int, ...]) -> None:
    module, x = trained(width), inputs()
    state, parts = module.empty_state(2, CPU, torch.float32), []
    for start, end in zip((0, *cuts), (*cuts, 11), strict=True):
        y, state = module.step(x[:, start:end], state, POSITION, start)
        parts.append(y)
        assert state["inputs"].shape == (2, width - 1, 6)
    torch.testing.assert_close(torch.cat(parts, dim=1), module(x, POSITION, Context()))


def test_padding_reads_as_nothing() -> None:
    module, x = trained(4), inputs()
    alone = module(x, POSITION, Context())
    padded = torch.cat([inputs(3, seed=2), x, inputs(2, seed=3)], dim=1)
    live = torch.zeros(2, 16, dtype=torch.bool)
    live[:, 3:14] = True
    assert module(padded, POSITION, Context(live=live))[:, 3:14].equal(alone)


def both_ways(width: int) -> MixerModule:
    """A symmetric convolution of a width, or at width 0 a symmetric shift, away from its start."""
    module = (ShortConv(width=width) if width else TokenShift()).build(BOTH)
    assert isinstance(module, ShortConvModule | TokenShiftModule)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(width))
    return module


@pytest.mark.parametrize("width", [2, 3, 4])
def test_a_symmetric_convolution_equals_torch(width: int) -> None:
    module, x = both_ways(width), inputs()
    (taps,) = module.parameters()
    expected = torch.nn.functional.conv1d(x.transpose(1, 2), taps[:, None], padding=width - 1, groups=6)
    torch.testing.assert_close(module(x, POSITION, Context()), expected.transpose(1, 2))


def test_a_symmetric_shift_mixes_in_the_mean_of_both_neighbours() -> None:
    module, x = both_ways(0), inputs()
    (mix,) = module.parameters()
    y = module(x, POSITION, Context())
    for t in range(11):
        sides = [x[:, s] for s in (t - 1, t + 1) if 0 <= s < 11]
        beside = torch.stack(sides).sum(0) / 2
        torch.testing.assert_close(y[:, t], x[:, t] * (1 - mix) + beside * mix)


@pytest.mark.parametrize("width", [0, 2, 4])
def test_a_text_read_backwards_is_mixed_backwards(width: int) -> None:
    """Left counts as right: a convolution with its taps turned round, a shift as it is."""
    module, x = both_ways(width), inputs()
    y = module(x, POSITION, Context())
    (parameter,) = module.parameters()
    if width:
        parameter.data = parameter.data.flip(1)
    torch.testing.assert_close(module(x.flip(1), POSITION, Context()), y.flip(1))


@pytest.mark.parametrize("width", [0, 2, 4])
def test_symmetric_premixers_start_as_the_identity_and_read_padding_on_either_side_as_nothing(width: int) -> None:
    start = (ShortConv(width=width) if width else TokenShift()).build(BOTH)
    assert start(inputs(), POSITION, Context()).equal(inputs())
    module, x = both_ways(width), inputs()
    alone = module(x, POSITION, Context())
    padded = torch.cat([inputs(3, seed=2), x, inputs(2, seed=3)], dim=1)
    live = torch.zeros(2, 16, dtype=torch.bool)
    live[:, 3:14] = True
    torch.testing.assert_close(module(padded, POSITION, Context(live=live))[:, 3:14], alone)


def test_a_symmetric_shift_keeps_packed_documents_apart() -> None:
    module, one, other = both_ways(0), inputs(4), inputs(7, seed=1)
    segments = torch.tensor([[0] * 4 + [1] * 7]).expand(2, -1)
    packed = module(torch.cat([one, other], dim=1), POSITION, Context(segments=segments))
    assert packed.equal(torch.cat([module(x, POSITION, Context()) for x in (one, other)], dim=1))


def test_flops_are_two_per_tap() -> None:
    assert ShortConv(width=3).flops_per_token(DIMS) == 2 * 6 * 3
    assert ShortConv(width=3).flops_per_token(BOTH) == 2 * 6 * 5
    assert NoPremixer().flops_per_token(DIMS) == 0
