"""Premixers: a short convolution starts as the identity, decodes as it trains, and never looks at padding."""

import pytest
import torch

from blocks.families import Context, Dims, MixerModule, PositionModule
from blocks.premixers.none import NoPremixer
from blocks.premixers.short_conv import ShortConv, ShortConvModule

DIMS = Dims(d_model=6, d_ff=8, layers=1, train_len=16, max_len=16)
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


def test_flops_are_two_per_tap() -> None:
    assert ShortConv(width=3).flops_per_token(DIMS) == 2 * 6 * 3
    assert NoPremixer().flops_per_token(DIMS) == 0
