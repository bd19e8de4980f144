"""Biases on logits that depend on content: relative keys, Transformer-XL, contextual positions, disentangled."""

import dataclasses
import warnings
from collections.abc import Callable

import pytest
import torch
from einops import rearrange
from placed import BOTH, DIMS, LENGTH, SHAPE, filled, logits, past, queries_and_keys
from reference_table import Compare
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from blocks import cost
from blocks.families import AbstractPosition, Dims, Direction
from blocks.model import ModelConfig
from blocks.positions.cope import Cope, CopeModule, counted_positions, interpolated
from blocks.positions.disentangled import Disentangled, DisentangledModule
from blocks.positions.none import NoPosition
from blocks.positions.shaw import Shaw, ShawModule
from blocks.positions.sinusoidal import sinusoids
from blocks.positions.transformer_xl import TransformerXL, TransformerXLModule

pytestmark = pytest.mark.slow

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=DeprecationWarning)
    from transformers import DebertaV2Config, XLNetConfig
    from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention
    from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention
    from x_transformers import x_transformers

Make = Callable[..., ModelConfig]

ALL = [Shaw(), Shaw(farthest=8), TransformerXL(), Cope(), Cope(farthest=16), Disentangled(), Disentangled(span=8)]
TWO_SIDED = [config for config in ALL if Direction.BIDIRECTIONAL in config.directions]
CASES = [(config, DIMS) for config in ALL] + [(config, BOTH) for config in TWO_SIDED]
cases = pytest.mark.parametrize(("config", "dims"), CASES)


def plain_logits() -> Tensor:
    return logits(NoPosition().build(DIMS, SHAPE), *queries_and_keys())


def visible(values: Tensor, dims: Dims = DIMS) -> Tensor:
    return values if dims.direction == Direction.BIDIRECTIONAL else values * past(values.shape[-1])


@cases
def test_a_scheme_without_its_vectors_is_no_scheme(config: AbstractPosition, dims: Dims) -> None:
    position = filled(config.build(dims, SHAPE))
    for parameter in position.parameters():
        parameter.data.zero_()
    scale = 3**-0.5 if isinstance(config, Disentangled) else 1.0
    torch.testing.assert_close(logits(position, *queries_and_keys()), plain_logits() * scale, rtol=1e-12, atol=1e-12)


@cases
@pytest.mark.parametrize("start", [1, 20, 36])
def test_rows_from_a_start_equal_the_same_rows_of_the_whole(config: AbstractPosition, dims: Dims, start: int) -> None:
    position = filled(config.build(dims, SHAPE))
    q, k = queries_and_keys()
    whole, part = position.content_bias(q, k), position.content_bias(q[:, start:], k, start)
    assert whole is not None
    assert part is not None
    assert whole.shape == (2, 4, LENGTH, LENGTH)
    causal = visible(torch.ones(LENGTH, LENGTH), dims).bool()[start:]
    torch.testing.assert_close(part[..., causal], whole[..., start:, :][..., causal], rtol=1e-10, atol=1e-10)


@cases
def test_a_pair_keeps_its_logit_when_both_move(config: AbstractPosition, dims: Dims) -> None:
    position = filled(config.build(dims, SHAPE))
    q, k = queries_and_keys()
    whole, later = (visible(logits(position, x, y), dims) for x, y in ((q, k), (q[:, 9:], k[:, 9:])))
    torch.testing.assert_close(later, whole[..., 9:, 9:], rtol=1e-10, atol=1e-10)


@cases
def test_both_heads_of_a_group_read_the_key_head_that_serves_them(config: AbstractPosition, dims: Dims) -> None:
    position = filled(config.build(dims, SHAPE))
    q, k = queries_and_keys()
    spread = k.repeat_interleave(2, dim=2)
    torch.testing.assert_close(logits(position, q, k), logits(position, q, spread), rtol=1e-12, atol=1e-12)


def test_shaw_adds_a_vector_per_clipped_distance_to_each_key() -> None:
    for dims in (DIMS, BOTH):
        position = filled(Shaw(farthest=8).build(dims, SHAPE))
        assert isinstance(position, ShawModule)
        q, k = queries_and_keys()
        both = dims is BOTH
        row = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).clamp(-8 if both else 0, 8) + (8 if both else 0)
        keys = (
            rearrange(k.repeat_interleave(2, dim=2), "B S H K -> B 1 S H K") + position.relative_keys[row][:, :, None]
        )
        expected = torch.einsum("bthk,btshk->bhts", q, keys) / 4
        torch.testing.assert_close(logits(position, q, k), expected, rtol=1e-10, atol=1e-10)


def test_transformer_xl_is_its_four_terms() -> None:
    position = filled(TransformerXL().build(DIMS, SHAPE))
    assert isinstance(position, TransformerXLModule)
    q, k = queries_and_keys()
    k = k.repeat_interleave(2, dim=2)
    rows = (sinusoids(0, LENGTH, 32, q.device, q.dtype) @ position.place.weight.T).view(LENGTH, 4, 16)
    expected = torch.zeros(2, 4, LENGTH, LENGTH).double()
    for i in range(LENGTH):
        for j in range(i + 1):
            content = ((q[:, i] + position.content_query) * k[:, j]).sum(-1)
            expected[:, :, i, j] = (content + ((q[:, i] + position.place_query) * rows[i - j]).sum(-1)) / 4
    grouped = queries_and_keys()[1]
    torch.testing.assert_close(visible(logits(position, q, grouped)), expected, rtol=1e-10, atol=1e-10)


def test_transformer_xl_equals_xlnet_in_both_directions(compared: Compare) -> None:
    shape = dataclasses.replace(SHAPE, kv_heads=4)
    position = filled(TransformerXL().build(BOTH, shape))
    assert isinstance(position, TransformerXLModule)
    q, k = queries_and_keys(shape=shape)
    theirs = XLNetRelativeAttention(XLNetConfig(d_model=64, n_head=4, d_head=16, dropout=0.0)).double().eval()
    theirs.r_w_bias.data, theirs.r_r_bias.data = position.content_query.data, position.place_query.data
    # Theirs has a row for each distance from N down to 1 - N.
    rows = sinusoids(1 - LENGTH, 2 * LENGTH, 32, q.device, q.dtype).flip(0)
    keys = rearrange(rows @ position.place.weight.T, "N (H K) -> N 1 H K", H=4).expand(-1, 2, -1, -1)
    q_first, k_first = q.transpose(0, 1), k.transpose(0, 1)
    _, weights = theirs.rel_attn_core(q_first, k_first, k_first, keys, output_attentions=True)
    ours = logits(position, q, k).softmax(-1)
    compared(
        "position.transformer_xl",
        "transformers XLNetRelativeAttention",
        ours,
        rearrange(weights, "t s b h -> b h t s"),
        rtol=1e-10,
        atol=1e-12,
    )


def test_open_gates_count_every_token_so_that_contextual_positions_are_learned_distances() -> None:
    place = counted_positions(torch.ones(2, 4, LENGTH, LENGTH).double(), 0)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH) + 1
    assert visible(place).equal(visible(distance.expand(2, 4, -1, -1)).double())
    position = filled(Cope(farthest=64).build(DIMS, SHAPE))
    assert isinstance(position, CopeModule)
    q, _ = queries_and_keys()
    scores = torch.einsum("bthk,nk->bhtn", q, position.table)
    expected = torch.einsum("bthk,tsk->bhts", q, position.table[distance.clamp_min(0)])
    assert (visible(interpolated(scores, place)) - visible(expected)).abs().max() < 1e-13


def test_half_open_gates_read_between_two_vectors_and_far_counts_read_the_last() -> None:
    scores = torch.tensor([0.0, 1.0, 10.0]).double().view(1, 1, 1, 3)
    place = torch.tensor([0.0, 0.25, 1.5, 2.0, 7.5]).double().view(1, 1, 1, 5)
    assert interpolated(scores, place).flatten().tolist() == [0.0, 0.25, 5.5, 10.0, 10.0]


@pytest.mark.parametrize("farthest", [16, 32])
def test_contextual_positions_equal_x_transformers(compared: Compare, farthest: int) -> None:
    position = filled(Cope(farthest=farthest).build(DIMS, SHAPE))
    assert isinstance(position, CopeModule)
    q, k = queries_and_keys()
    theirs = x_transformers.CoPE(16, 4, farthest + 1).double()
    theirs.pos_emb.data = position.table.data
    masked = plain_logits().masked_fill(~past(), -torch.finfo(torch.float64).max)
    expected = theirs(q.transpose(1, 2), masked)
    ours = position.content_bias(q, k)
    assert ours is not None
    compared("position.cope", "x-transformers CoPE", visible(ours), visible(expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("span", [8, 64])
@pytest.mark.parametrize("dims", [DIMS, BOTH], ids=["causal", "bidirectional"])
def test_disentangled_attention_equals_deberta(compared: Compare, span: int, dims: Dims) -> None:
    shape = dataclasses.replace(SHAPE, heads=2, kv_heads=2)
    position = filled(Disentangled(span=span).build(dims, shape))
    assert isinstance(position, DisentangledModule)
    config = DebertaV2Config(
        hidden_size=32, num_attention_heads=2, relative_attention=True, max_relative_positions=span,
        position_buckets=-1, pos_att_type=["c2p", "p2c"], hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = DisentangledSelfAttention(config).double().eval()
    theirs.pos_key_proj.weight.data, theirs.pos_query_proj.weight.data = position.key.weight, position.query.weight
    for bias in (theirs.query_proj.bias, theirs.key_proj.bias, theirs.pos_key_proj.bias, theirs.pos_query_proj.bias):
        bias.data.zero_()
    x = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(5)).double()
    q, k = (rearrange(part(x), "B T (H K) -> B T H K", H=2) for part in (theirs.query_proj, theirs.key_proj))
    # Theirs has the rows of both directions; a causal model has the second half of them.
    rows = position.vectors.data
    both = rows if dims is BOTH else torch.cat([torch.zeros(span, 32).double(), rows])
    mask = torch.ones(1, 1, LENGTH, LENGTH) if dims is BOTH else past()[None, None]
    _, weights = theirs(x, mask, output_attentions=True, rel_embeddings=both)
    hidden = torch.finfo(torch.float64).min
    ours = logits(position, q, k).masked_fill(~mask.bool(), hidden).softmax(-1)
    # Theirs takes sqrt(3 K) in float32.
    compared(
        "position.disentangled",
        "transformers DisentangledSelfAttention of DeBERTa v2",
        ours,
        weights,
        rtol=1e-6,
        atol=1e-7,
    )


@pytest.mark.parametrize("config", ALL)
def test_distances_that_never_occur_are_cut_off(config: AbstractPosition) -> None:
    short = dataclasses.replace(DIMS, train_len=5, max_len=5)
    canonical = config.canonical(short)
    one, other = (sum(p.numel() for p in scheme.build(short, SHAPE).parameters()) for scheme in (config, canonical))
    assert one == other
    if config != TransformerXL():
        assert canonical != config
        assert config.canonical(DIMS) == config


@pytest.mark.parametrize("kind", ["shaw", "transformer_xl", "cope", "disentangled", "dynamic", "fire"])
@pytest.mark.parametrize("length", [24, 33])
def test_flops_of_a_position_scheme_equal_the_counted(small: Make, kind: str, length: int) -> None:
    config = small({"position.kind": kind, "mixer.softmax.entropy_weight": 0.01})
    model = config.build(seed=0).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.int64))
    assert cost.flops_per_token(config, length, causal=False) == pytest.approx(
        counter.get_total_flops() / length, rel=1e-12
    )


@pytest.mark.parametrize("kind", ["shaw", "transformer_xl", "cope", "disentangled"])
def test_a_window_reads_the_same_content_biases_whatever_it_has_dropped(small: Make, kind: str) -> None:
    changes = {"position.kind": kind, "mixer.kind": "sliding_window", "mixer.sliding_window.window": 8}
    model = small(changes).build(seed=0).eval()
    for index, parameter in enumerate(model.positions.parameters()):
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
    tokens = torch.randint(48, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, _ = model(tokens)
        state, parts = model.empty_state(2), []
        for first, last in ((0, 3), (3, 4), (4, 30), (30, 31), (31, 40)):
            part, state = model.step(tokens[:, first:last], state, first)
            parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-5, atol=1e-5)
