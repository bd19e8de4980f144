"""What is added to the embedding: conditional positions, resized tables, randomized positions."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from placed import BOTH, DIMS, LONG, SHAPE, draw, filled
from reference_table import Compare
from torch import nn

from blocks import cost
from blocks.families import Dims, InfeasibleArchitecture
from blocks.model import ModelConfig
from blocks.positions.conditional import Conditional, ConditionalModule
from blocks.positions.learned import Learned, LearnedModule
from blocks.positions.learned_interp import LearnedInterp, LearnedInterpModule, resized
from blocks.positions.randomized import Randomized, RandomizedModule, ordered_sample
from blocks.positions.sinusoidal import Sinusoidal

pytestmark = pytest.mark.slow

Make = Callable[..., ModelConfig]

D = DIMS.d_model
CPU = torch.device("cpu")


def conditional(width: int, dims: Dims = DIMS) -> ConditionalModule:
    position = filled(Conditional(width=width).build(dims, SHAPE))
    assert isinstance(position, ConditionalModule)
    return position


def interp(rows: int = 64) -> LearnedInterpModule:
    position = filled(LearnedInterp().build(dataclasses.replace(LONG, train_len=rows), SHAPE))
    assert isinstance(position, LearnedInterpModule)
    return position


@pytest.mark.parametrize("width", [3, 5, 7])
@pytest.mark.parametrize("length", [1, 2, 37])
def test_conditional_positions_equal_a_depthwise_convolution_with_zeros_outside(
    compared: Compare, width: int, length: int
) -> None:
    x = draw(2, length, D)
    for dims, pads in ((DIMS, (width - 1, 0)), (BOTH, (width // 2, width // 2))):
        position = conditional(width, dims)
        theirs = nn.Conv1d(D, D, width, groups=D, bias=False).double()
        theirs.weight.data = position.kernel.data[:, None]
        expected = x + theirs(nn.functional.pad(x.transpose(1, 2), pads)).transpose(1, 2)
        compared(
            "position.conditional",
            "torch nn.Conv1d(groups=channels)",
            position.embed(x),
            expected,
            rtol=1e-12,
            atol=1e-12,
        )


@pytest.mark.parametrize("dims", [DIMS, BOTH], ids=["causal", "bidirectional"])
def test_conditional_positions_move_with_the_tokens_and_a_zero_kernel_adds_nothing(dims: Dims) -> None:
    position, x = conditional(5, dims), draw(2, 30, D)
    torch.testing.assert_close(position.embed(x)[:, 12:24], position.embed(x[:, 8:28])[:, 4:16])
    position.kernel.data.zero_()
    assert position.embed(x).equal(x)


def test_conditional_positions_look_back_only_in_a_causal_model() -> None:
    position, x = conditional(5), draw(1, 20, D)
    other = x.clone()
    other[:, 10] += 1
    changed = (position.embed(other) - position.embed(x)).abs().amax((0, 2)) > 0
    assert changed.nonzero().flatten().tolist() == [10, 11, 12, 13, 14]


def test_padding_is_no_neighbour() -> None:
    live = torch.ones(1, 20, dtype=torch.bool)
    live[:, :7] = False
    for dims in (DIMS, BOTH):
        position, x = conditional(5, dims), draw(1, 20, D)
        torch.testing.assert_close(position.embed(x, 0, live)[:, 7:], position.embed(x[:, 7:]))


@pytest.mark.parametrize("cuts", [(1, 2, 3), (10,), (1, 19), ()])
def test_conditional_positions_decode_from_any_split(cuts: tuple[int, ...]) -> None:
    position, x = conditional(7), draw(2, 20, D)
    state, parts = position.empty_state(2, CPU, torch.float64), []
    for start, end in zip((0, *cuts), (*cuts, 20), strict=True):
        part, state = position.embed_step(x[:, start:end], state, start)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=1), position.embed(x))


def test_the_state_of_conditional_positions_is_a_fixed_cost(small: Make) -> None:
    plain, placed = (cost.measure(small({"position.kind": kind}), 20) for kind in ("none", "conditional"))
    assert placed.state_bytes_per_token == plain.state_bytes_per_token
    assert placed.fixed_state_bytes == 2 * 32 * 4
    model = small({"position.kind": "conditional"}).build(seed=0)
    state = model.empty_state(1)
    assert state["position.inputs"].shape == (1, 2, 32)


def test_a_table_is_exact_within_its_length_and_stretches_linearly_past_it() -> None:
    position = interp(9)
    for length in (1, 5, 9):
        torch.testing.assert_close(
            position.embed(torch.zeros(1, length, D).double())[0], position.table[:length], rtol=0, atol=0
        )
    line = torch.arange(9.0).double()[:, None] * draw(1, D) + draw(1, D, seed=1)
    stretched = resized(line, 33)
    torch.testing.assert_close(stretched, torch.linspace(0, 8, 33).double()[:, None] * draw(1, D) + draw(1, D, seed=1))


@pytest.mark.parametrize(("rows", "length"), [(1, 2), (2, 3), (9, 10), (9, 33), (64, 100)])
def test_resizing_equals_torch_interpolate(compared: Compare, rows: int, length: int) -> None:
    table = draw(rows, D)
    expected = nn.functional.interpolate(table.T[None], size=length, mode="linear", align_corners=True)[0].T
    ours = resized(table, length)
    compared("position.learned_interp", "torch nn.functional.interpolate", ours, expected, rtol=1e-6, atol=1e-6)


def test_a_resized_row_depends_on_the_length_so_decoding_past_the_table_is_refused(small: Make) -> None:
    position = interp(8)
    rows = [position.embed(torch.zeros(1, length, D).double())[0, 3] for length in (8, 9)]
    assert (rows[0] - rows[1]).abs().max() > 0.1
    torch.testing.assert_close(position.embed(torch.zeros(1, 3, D).double(), 5)[0], position.table[5:], rtol=0, atol=0)
    with pytest.raises(InfeasibleArchitecture, match="resizes its 8 rows to the whole sequence"):
        position.embed(torch.zeros(1, 1, D).double(), 8)
    model = small({"position.kind": "learned_interp"}, train_len=8, max_len=20).build(seed=0).eval()
    tokens = torch.zeros(1, 12, dtype=torch.int64)
    assert model(tokens)[0].isfinite().all()
    _, state = model.step(tokens[:, :8], model.empty_state(1), 0)
    with pytest.raises(InfeasibleArchitecture, match="decode up to 8"):
        model.step(tokens[:, 8:9], state, 8)


def test_a_table_that_is_never_stretched_is_a_learned_table() -> None:
    assert LearnedInterp().canonical(DIMS) == Learned()
    assert LearnedInterp().canonical(LONG) == LearnedInterp()


def test_an_ordered_sample_is_ascending_without_repeats_and_uniform() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        samples = torch.stack([ordered_sample(5, 20, CPU) for _ in range(4000)])
    assert (samples.diff(dim=1) > 0).all()
    assert samples.min() == 0
    assert samples.max() == 19
    share = torch.bincount(samples.flatten(), minlength=20) / 4000
    assert (share - 0.25).abs().max() < 0.035
    assert ordered_sample(20, 20, CPU).equal(torch.arange(20))


@pytest.mark.parametrize("inside", ["sinusoidal", "learned"])
def test_evaluation_counts_from_zero_and_training_draws_anew_from_the_stream_of_dropout(inside: str) -> None:
    position = filled(Randomized(inside=inside).build(DIMS, SHAPE))
    assert isinstance(position, RandomizedModule)
    x = torch.zeros(2, 16, D).double()
    if position.table is None:
        expected = Sinusoidal().build(DIMS, SHAPE).embed(x)
    else:
        plain = Learned().build(dataclasses.replace(DIMS, train_len=256, max_len=256), SHAPE)
        assert isinstance(plain, LearnedModule)
        plain.table.data = position.table.data
        expected = plain.embed(x)
    torch.testing.assert_close(position.embed(x), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(position.embed(x[:, 9:], 9), expected[:, 9:], rtol=1e-10, atol=1e-12)
    position.train()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        one, other = position.embed(x), position.embed(x)
        torch.manual_seed(1)
        again = position.embed(x)
        torch.manual_seed(1)
        place = ordered_sample(16, 256, CPU)
    assert one.equal(again)
    assert not one.equal(other)
    assert one[0].equal(one[1])
    whole = position.eval().embed(torch.zeros(1, 256, D).double())[0]
    torch.testing.assert_close(one[0], whole[place], rtol=1e-10, atol=1e-12)


def test_randomized_positions_reach_past_the_longest_length(small: Make) -> None:
    model = small({"position.kind": "randomized", "position.randomized.inside": "learned"}, max_len=50).build(seed=0)
    assert model.positions[0].table.shape == (200, 32)
    assert model.eval()(torch.zeros(1, 50, dtype=torch.int64))[0].isfinite().all()
