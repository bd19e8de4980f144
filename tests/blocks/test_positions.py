"""Position schemes: the identities that define them, offsets in decoding, and what they refuse."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blocks.families import AbstractPosition, Dims, HeadShape, InfeasibleArchitecture, PositionModule
from blocks.model import ModelConfig
from blocks.ops.attention import reference_attention
from blocks.positions.alibi import Alibi, slopes
from blocks.positions.learned import Learned, LearnedModule
from blocks.positions.none import NoPosition
from blocks.positions.rotary import Rotary
from blocks.positions.sinusoidal import Sinusoidal, sinusoids
from blocks.positions.t5_bias import T5Bias, T5BiasModule, buckets
from blocks.positions.xpos import Xpos
from blocks.registry import variants

Make = Callable[..., ModelConfig]
CPU = torch.device("cpu")
DIMS = Dims(d_model=32, d_ff=64, layers=2, train_len=16, max_len=16)
SHAPE = HeadShape(heads=4, kv_heads=4, head_dim=16)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled(position: PositionModule) -> PositionModule:
    """The module with every parameter drawn."""
    for index, parameter in enumerate(position.parameters()):
        parameter.data = draw(*parameter.shape, seed=index).float()
    return position


def scores_of_one_pair(position: PositionModule, distance: int, at: int, q: Tensor, k: Tensor) -> Tensor:
    """The dot product of one query at position `at` with one key `distance` earlier."""
    rotated_q, rotated_k = position.rotate(q.expand(1, at + 1, 1, -1), k.expand(1, at + 1, 1, -1))
    return (rotated_q[0, at, 0] * rotated_k[0, at - distance, 0]).sum()


@pytest.mark.parametrize("kind", ["rotary", "xpos"])
def test_scores_depend_on_distance_only(kind: str) -> None:
    position = variants(AbstractPosition)[kind]().build(DIMS, SHAPE)
    q, k = draw(1, 1, 1, 16), draw(1, 1, 1, 16, seed=1)
    for distance in (0, 1, 7):
        expected = scores_of_one_pair(position, distance, distance, q, k)
        for at in (distance + 1, 40, 333):
            torch.testing.assert_close(
                scores_of_one_pair(position, distance, at, q, k), expected, rtol=1e-10, atol=1e-11
            )
    assert not torch.isclose(scores_of_one_pair(position, 1, 9, q, k), scores_of_one_pair(position, 2, 9, q, k))


def test_rotation_keeps_the_norm_and_turns_pairs_by_the_declared_angle() -> None:
    position = Rotary().build(DIMS, SHAPE)
    q = draw(2, 50, 4, 16)
    rotated, _ = position.rotate(q, q)
    torch.testing.assert_close(rotated.norm(dim=-1), q.norm(dim=-1), rtol=1e-14, atol=1e-14)
    for pair in range(8):
        turned = torch.complex(q[..., pair], q[..., pair + 8])
        angle = torch.arange(50, dtype=torch.float64)[:, None] * 10000.0 ** (-2 * pair / 16)
        expected = turned * torch.polar(torch.ones_like(angle), angle)
        torch.testing.assert_close(torch.complex(rotated[..., pair], rotated[..., pair + 8]), expected)


def test_a_larger_rotary_base_turns_slower() -> None:
    ones = torch.ones(1, 100, 1, 16)
    slow, fast = (Rotary(base=base).build(DIMS, SHAPE).rotate(ones, ones)[0] for base in (500000.0, 1000.0))
    assert (slow[0, 99, 0, 7] - 1).abs() < (fast[0, 99, 0, 7] - 1).abs()


def test_rotary_in_bfloat16_keeps_its_dtype_and_computes_angles_in_float32() -> None:
    position = Rotary().build(DIMS, SHAPE)
    q = draw(1, 4000, 1, 16)
    exact, _ = position.rotate(q, q)
    narrow, _ = position.rotate(q.bfloat16(), q.bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert (narrow.double() - exact).abs().max() < 0.05


def test_xpos_self_score_of_ones_fades_as_published() -> None:
    position = Xpos().build(DIMS, SHAPE)
    ones = torch.ones(1, 1, 1, 64, dtype=torch.float64)
    scores = [scores_of_one_pair(position, d, 1024, ones, ones).item() / 64 for d in (0, 1, 8, 64, 256, 1024)]
    assert scores == pytest.approx([1, 0.965, 0.697, 0.428, 0.324, 0.182], abs=6e-4)


def test_xpos_without_its_decay_is_rotary() -> None:
    q, k = draw(1, 1, 1, 16), draw(1, 1, 1, 16, seed=1)
    decay = torch.tensor([(2 * i / 16 + 0.4) / 1.4 for i in range(8)], dtype=torch.float64) ** (5 / 512)
    xpos = scores_of_one_pair(Xpos().build(DIMS, SHAPE), 5, 9, q, k)
    rotary = scores_of_one_pair(Rotary().build(DIMS, SHAPE), 5, 9, q * torch.cat([decay, decay]), k)
    torch.testing.assert_close(xpos, rotary)


def test_xpos_stays_finite_and_exact_at_its_longest() -> None:
    position = Xpos().build(DIMS, SHAPE)
    ones = torch.ones(1, 65536, 1, 8)
    q, k = position.rotate(ones, ones)
    assert q.isfinite().all()
    assert k.isfinite().all()
    ends = ((q[0, at, 0] * k[0, at, 0]).sum().item() for at in (0, 30000, 65535))
    assert list(ends) == pytest.approx([8.0] * 3, rel=1e-4)


@pytest.mark.parametrize("kind", ["rotary", "xpos"])
def test_odd_head_dim_is_refused(kind: str) -> None:
    with pytest.raises(InfeasibleArchitecture, match="needs an even head_dim; the mixer has head_dim 15"):
        variants(AbstractPosition)[kind]().check(DIMS, dataclasses.replace(SHAPE, head_dim=15))


def test_xpos_refuses_lengths_out_of_range() -> None:
    with pytest.raises(InfeasibleArchitecture, match="65536"):
        Xpos().check(dataclasses.replace(DIMS, max_len=65537), SHAPE)


def test_alibi_slopes_of_eight_and_of_twelve_heads() -> None:
    eight = [2.0**-power for power in range(1, 9)]
    assert slopes(8, CPU).tolist() == pytest.approx(eight)
    assert slopes(12, CPU).tolist() == pytest.approx([*eight, 0.7071, 0.3536, 0.1768, 0.0884], abs=5e-5)
    assert [len(slopes(heads, CPU)) for heads in range(1, 65)] == list(range(1, 65))


def test_alibi_penalises_by_slope_times_distance_whatever_the_offset() -> None:
    position = Alibi().build(DIMS, SHAPE)
    bias = position.score_bias(3, 10, start=7)
    assert bias is not None
    for query, key in ((0, 0), (1, 5), (2, 9)):
        expected = -slopes(4, CPU) * (7 + query - key)
        torch.testing.assert_close(bias[:, query, key], expected)


def test_alibi_is_left_alone_by_a_shift_of_a_row() -> None:
    q, k, v = draw(1, 6, 4, 16).float(), draw(1, 6, 4, 16, seed=1).float(), draw(1, 6, 4, 16, seed=2).float()
    bias = Alibi().build(DIMS, SHAPE).score_bias(6, 6)
    assert bias is not None
    shifted = bias + torch.arange(6.0)[:, None]
    torch.testing.assert_close(
        reference_attention(q, k, v, scale=0.25, bias=bias), reference_attention(q, k, v, scale=0.25, bias=shifted)
    )


def test_t5_buckets_are_exact_to_fifteen_then_logarithmic() -> None:
    bucket = buckets(torch.arange(-3, 400)[:, None])[:, 0].tolist()
    past = bucket[3:]
    assert bucket[:3] == [0, 0, 0]
    assert past[:17] == list(range(17))
    assert set(past) == set(range(32))
    assert past == sorted(past)
    assert past[112] == 30
    assert set(past[113:]) == {31}


def test_t5_bias_reads_one_row_per_bucket() -> None:
    position = filled(T5Bias().build(DIMS, SHAPE))
    assert isinstance(position, T5BiasModule)
    bias = position.score_bias(2, 200, start=198)
    torch.testing.assert_close(bias[:, 0, 198], position.table[0])
    torch.testing.assert_close(bias[:, 1, 183], position.table[16])
    torch.testing.assert_close(bias[:, 1, 0], position.table[31])


def test_sinusoids_have_constant_norm_and_a_product_that_knows_the_distance() -> None:
    table = sinusoids(0, 300, 64, CPU, torch.float64)
    torch.testing.assert_close(table.square().sum(-1), torch.full((300,), 32.0, dtype=torch.float64))
    frequency = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    for distance in (1, 6, 44, 250):
        expected = (frequency * distance).cos().sum()
        products = (table[: 300 - distance] * table[distance:]).sum(-1)
        torch.testing.assert_close(products, expected.expand_as(products), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("changes", [{"position.kind": "sinusoidal"}, {"position.kind": "randomized"}])
def test_a_width_found_by_size_may_be_odd(small: Make, changes: dict[str, str]) -> None:
    assert sinusoids(0, 8, 7, CPU, torch.float64).shape == (8, 7)
    model = dataclasses.replace(small(changes), d_model=33).build(seed=0)
    assert model(torch.arange(12)[None])[0].isfinite().all()


@pytest.mark.parametrize("amplitude", [0.02, 1.0])
def test_sinusoids_are_added_at_their_amplitude(amplitude: float) -> None:
    x = draw(2, 16, 32).float()
    added = Sinusoidal(amplitude=amplitude).build(DIMS, SHAPE).embed(x) - x
    torch.testing.assert_close(
        added, amplitude * sinusoids(0, 16, 32, CPU, torch.float32).expand(2, -1, -1), rtol=1e-4, atol=1e-6
    )


def test_learned_rows_are_the_rows_of_the_table() -> None:
    position = filled(Learned().build(DIMS, SHAPE))
    assert isinstance(position, LearnedModule)
    x = draw(2, 16, 32).float()
    torch.testing.assert_close(position.embed(x) - x, position.table.expand(2, -1, -1))


def test_learned_refuses_to_run_past_its_table() -> None:
    longer = dataclasses.replace(DIMS, max_len=17)
    with pytest.raises(InfeasibleArchitecture, match="'clamp'"):
        Learned().check(longer, SHAPE)
    Learned(beyond="clamp").check(longer, SHAPE)
    position = Learned().build(longer, SHAPE).eval()
    with pytest.raises(InfeasibleArchitecture, match="has 16 rows and was run on 17 positions"):
        position.embed(torch.zeros(1, 17, 32))
    with pytest.raises(InfeasibleArchitecture, match="run on 17 positions"):
        position.embed(torch.zeros(1, 1, 32), start=16)


def test_clamped_learned_positions_repeat_the_last_row_in_evaluation_only() -> None:
    position = filled(Learned(beyond="clamp").build(DIMS, SHAPE))
    assert isinstance(position, LearnedModule)
    with pytest.raises(InfeasibleArchitecture):
        position.embed(torch.zeros(1, 20, 32))
    rows = position.eval().embed(torch.zeros(1, 20, 32))[0]
    torch.testing.assert_close(rows[:16], position.table)
    torch.testing.assert_close(rows[16:], position.table[-1:].expand(4, -1))


def test_clamp_is_one_with_refuse_where_no_position_lies_beyond() -> None:
    assert Learned(beyond="clamp").canonical(DIMS) == Learned()
    longer = dataclasses.replace(DIMS, max_len=17)
    assert Learned(beyond="clamp").canonical(longer) == Learned(beyond="clamp")


@pytest.mark.parametrize("config", [Sinusoidal(), Learned(), NoPosition(), Rotary(), Alibi(), T5Bias(), Xpos()])
@pytest.mark.parametrize("start", [1, 7, 15])
def test_rows_from_a_start_equal_the_same_rows_of_the_whole(config: AbstractPosition, start: int) -> None:
    position = filled(config.build(DIMS, SHAPE)).eval()
    x = draw(2, 16, 32).float()
    torch.testing.assert_close(position.embed(x[:, start:], start), position.embed(x)[:, start:])
    q, k = draw(2, 16, 4, 16), draw(2, 16, 2, 16, seed=1)
    whole_q, whole_k = position.rotate(q, k)
    part_q, part_k = position.rotate(q[:, start:], k, start)
    torch.testing.assert_close(part_q, whole_q[:, start:])
    torch.testing.assert_close(part_k, whole_k)
    whole, part = position.score_bias(16, 16), position.score_bias(16 - start, 16, start)
    assert (whole is None) == (part is None)
    if whole is not None and part is not None:
        torch.testing.assert_close(part, whole[:, start:])


@pytest.mark.parametrize("config", [Sinusoidal(), Learned()])
def test_added_positions_count_from_the_first_column_padding_included(config: AbstractPosition) -> None:
    position = filled(config.build(DIMS, SHAPE))
    padded = torch.cat([torch.zeros(1, 4, 32), draw(1, 6, 32).float()], dim=1)
    added = position.embed(padded) - padded
    torch.testing.assert_close(added[:, 4:], position.embed(torch.zeros(1, 16, 32))[:, 4:10], rtol=1e-5, atol=1e-6)


def test_schemes_without_tables_run_far_past_the_training_length() -> None:
    x = torch.zeros(1, 5000, 32)
    assert Sinusoidal().build(DIMS, SHAPE).embed(x).isfinite().all()
    for config in (Alibi(), T5Bias()):
        bias = config.build(DIMS, SHAPE).score_bias(1, 5000, 4999)
        assert bias is not None
        assert bias.isfinite().all()
    q = torch.ones(1, 5000, 1, 16)
    for config in (Rotary(), Xpos()):
        assert all(x.isfinite().all() for x in config.build(DIMS, SHAPE).rotate(q, q))


def test_without_positions_a_causal_layer_sees_a_set_and_two_layers_do_not() -> None:
    x = draw(1, 6, 1, 8)
    shuffled = torch.cat([x[:, [2, 0, 1]], x[:, 3:]], dim=1)

    def layer(x: Tensor) -> Tensor:
        return reference_attention(x, x, x, scale=1 / math.sqrt(8))

    torch.testing.assert_close(layer(x)[:, 3:], layer(shuffled)[:, 3:])
    assert (layer(layer(x)) - layer(layer(shuffled)))[:, 3:].abs().max() > 1e-3
