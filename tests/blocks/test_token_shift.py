"""A token shift starts as nothing, reads one token back, and never across padding or documents."""

import pytest
import torch
from torch import nn

from blocks.families import Context, Dims, PositionModule
from blocks.premixers.token_shift import TokenShift, TokenShiftModule

pytestmark = pytest.mark.slow

DIMS = Dims(d_model=6, d_ff=8, layers=1, train_len=16, max_len=16)
POSITION = PositionModule()


def inputs(length: int = 11, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, length, 6, generator=torch.Generator().manual_seed(seed))


def trained() -> TokenShiftModule:
    module = TokenShift().build(DIMS)
    assert isinstance(module, TokenShiftModule)
    nn.init.uniform_(module.mix, generator=torch.Generator().manual_seed(3))
    return module


def test_it_starts_as_the_identity_with_every_channel_trainable() -> None:
    module = TokenShift().build(DIMS)
    y = module(inputs(), POSITION, Context())
    assert y.equal(inputs())
    (gradient,) = torch.autograd.grad((y * inputs(seed=1)).sum(), list(module.parameters()))
    assert gradient.ne(0).all()


def test_it_mixes_as_rwkv_does() -> None:
    module, x = trained(), inputs()
    shifted = nn.ZeroPad2d((0, 0, 1, -1))(x)
    torch.testing.assert_close(module(x, POSITION, Context()), x * (1 - module.mix) + shifted * module.mix)


def test_an_output_depends_on_its_token_and_the_one_before() -> None:
    x = inputs().requires_grad_()
    (gradient,) = torch.autograd.grad(trained()(x, POSITION, Context())[:, 6].sum(), x)
    assert gradient.abs().sum((0, 2)).nonzero()[:, 0].tolist() == [5, 6]


@pytest.mark.parametrize("cuts", [(1, 2, 3), (4,), (10,), tuple(range(1, 11))])
def test_decoding_from_any_split_equals_the_full_pass(cuts: tuple[int, ...]) -> None:
    module, x = trained(), inputs()
    state, parts = module.empty_state(2, torch.device("cpu"), torch.float32), []
    for start, end in zip((0, *cuts), (*cuts, 11), strict=True):
        y, state = module.step(x[:, start:end], state, POSITION, start)
        parts.append(y)
        assert state["last"].shape == (2, 1, 6)
    torch.testing.assert_close(torch.cat(parts, dim=1), module(x, POSITION, Context()))


def test_padding_reads_as_nothing() -> None:
    module, x = trained(), inputs()
    padded = torch.cat([inputs(3, seed=2), x, inputs(2, seed=3)], dim=1)
    live = torch.zeros(2, 16, dtype=torch.bool)
    live[:, 3:14] = True
    assert module(padded, POSITION, Context(live=live))[:, 3:14].equal(module(x, POSITION, Context()))


def test_packed_documents_are_those_alone() -> None:
    module, one, other = trained(), inputs(4), inputs(7, seed=1)
    segments = torch.tensor([[0] * 4 + [1] * 7]).expand(2, -1)
    packed = module(torch.cat([one, other], dim=1), POSITION, Context(segments=segments))
    alone = [module(x, POSITION, Context()) for x in (one, other)]
    assert packed.equal(torch.cat(alone, dim=1))
