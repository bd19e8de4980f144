"""Linear attention and random features in an encoder: full sums, no order, and where they meet the causal form."""

import dataclasses

import pytest
import torch
from drawn_heads import with_gradients
from small_mixers import DIMS, KINDS, LENGTH, PLAIN, draw, drawn
from test_linear_attention import features
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from blocks.families import AbstractMixer, Context, Direction, MixerModule
from blocks.mixers.linear import Linear
from blocks.mixers.performer import Performer, PerformerModule, log_features
from blocks.ops.linear_attention import over_all, quadratic

pytestmark = pytest.mark.slow

BOTH = dataclasses.replace(DIMS, direction=Direction.BIDIRECTIONAL)
LINEAR = Linear(heads=2, head_dim=8)
PERFORMER = Performer(heads=2, head_dim=8, features=32)
KERNELS = (LINEAR, dataclasses.replace(LINEAR, feature_map="relu"), PERFORMER)


def built(mixer: AbstractMixer, direction: Direction) -> MixerModule:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = mixer.build(dataclasses.replace(DIMS, direction=direction))
    drawn(module)
    return module


def every_pair(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    total = torch.einsum("bthk,bshk,bshv->bthv", q, k, v)
    return total / torch.einsum("bthk,bshk->bth", a, b)[..., None]


@pytest.mark.parametrize("length", [1, 63])
def test_sums_over_all_equal_every_pair_with_gradients(length: int) -> None:
    inputs = features(length)
    for ours, expected in zip(with_gradients(over_all, *inputs), with_gradients(every_pair, *inputs), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(over_all(*inputs)[:, -1], quadratic(*inputs)[:, -1])


def test_sums_over_a_document_equal_those_of_the_document_alone() -> None:
    inputs, lengths = features(29), [3, 1, 12, 13]
    segments = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).expand(inputs[0].shape[0], -1)
    parts = zip(*(x.split(lengths, dim=1) for x in inputs), strict=True)
    expected = torch.cat([over_all(*part) for part in parts], dim=1)
    torch.testing.assert_close(over_all(*inputs, segments), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("mixer", KERNELS)
@pytest.mark.parametrize("position", ["none", "rotary"])
def test_the_last_token_of_a_text_cannot_tell_an_encoder_from_a_decoder(mixer: AbstractMixer, position: str) -> None:
    if not KINDS[position].needs <= mixer.offers:
        position = "none"
    scheme = KINDS[position]().build(DIMS, mixer.head_shape())
    x = draw(2, LENGTH, 24)
    ahead, causal = (
        built(mixer, direction)(x, scheme, Context()) for direction in (Direction.BIDIRECTIONAL, Direction.CAUSAL)
    )
    torch.testing.assert_close(ahead[:, -1], causal[:, -1], rtol=1e-4, atol=1e-5)
    assert (ahead[:, :-1] - causal[:, :-1]).abs().max() > 0.01


@pytest.mark.parametrize("mixer", KERNELS)
def test_without_positions_permuted_tokens_get_permuted_outputs(mixer: AbstractMixer) -> None:
    module, x = built(mixer, Direction.BIDIRECTIONAL), draw(2, LENGTH, 24)
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        module(x[:, order], PLAIN, Context()), module(x, PLAIN, Context())[:, order], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("mixer", KERNELS)
@pytest.mark.parametrize("left", [0, 5])
def test_padding_and_neighbours_in_the_row_change_nothing(mixer: AbstractMixer, left: int) -> None:
    module, x = built(mixer, Direction.BIDIRECTIONAL), draw(2, LENGTH, 24)
    alone = module(x, PLAIN, Context())
    other = 3 * draw(2, left + 4, 24, seed=1)
    row = torch.cat([other[:, :left], x, other[:, left:]], dim=1)
    place = torch.arange(row.shape[1]).expand(2, -1)
    live = (place >= left) & (place < left + LENGTH)
    segments = (place >= left).long() + (place >= left + LENGTH).long()
    for context in (Context(live=live), Context(segments=segments)):
        y = module(row, PLAIN, context)
        torch.testing.assert_close(y[:, left : left + LENGTH], alone, rtol=1e-4, atol=1e-5)


def test_a_bidirectional_performer_is_the_quotient_of_its_features_and_near_softmax() -> None:
    module = built(dataclasses.replace(PERFORMER, features=4096), Direction.BIDIRECTIONAL)
    assert isinstance(module, PerformerModule)
    x = 0.3 * draw(2, LENGTH, 24)
    q, k, v = module.project(x)
    w = module.directions.double()
    weights = torch.einsum("bthm,bshm->bhts", log_features(q.double(), w).exp(), log_features(k.double(), w).exp())
    mixed = torch.einsum("bhts,bshv->bthv", weights / weights.sum(-1, keepdim=True), v.double())
    y = module(x, PLAIN, Context())
    torch.testing.assert_close(y, module.out(mixed.flatten(2).float()), rtol=1e-4, atol=1e-5)
    exact = torch.nn.functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)))
    exact = module.out(exact.transpose(1, 2).flatten(2)).detach()
    assert (y - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("mixer", [LINEAR, PERFORMER])
def test_flops_in_an_encoder_equal_the_counted(mixer: AbstractMixer) -> None:
    module = mixer.build(BOTH)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(draw(1, 24, 24), PLAIN, Context())
    for causal in (False, True):
        assert mixer.flops_per_token(BOTH, 24, causal=causal) == counter.get_total_flops() / 24
