"""Mixers that see part of the past: what they see exactly, what they equal when they see it all, and no leak."""

import dataclasses
import warnings
from collections.abc import Callable

import pytest
import torch
from reference_table import Compare
from small_mixers import CPU, DIMS, LENGTH, PLAIN, SMALL_SOFTMAX, build, decode, draw
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from blocks import cost
from blocks.families import AbstractMixer, Context, Dims, InfeasibleArchitecture, MixerModule
from blocks.mixers.block_local import BlockLocal, BlockLocalModule
from blocks.mixers.heads import AttentionModule
from blocks.mixers.moba import Moba, chosen_blocks, mean_keys
from blocks.mixers.multiscale_pool import MultiscalePool, MultiscalePoolModule
from blocks.mixers.projections import Scene, join_heads, split_heads
from blocks.mixers.strided_sparse import StridedSparse, sparse_pattern
from blocks.mixers.topk import Topk
from blocks.model import ModelConfig
from blocks.ops.attention import reference_attention, visible_keys, weighted_values
from blocks.ops.scores import masked_softmax, scaled_logits

pytestmark = pytest.mark.slow

with warnings.catch_warnings():
    # x-transformers compiles helpers with torch.jit.script at import, which newer torch versions deprecate.
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=DeprecationWarning)
    from x_transformers.attend import Attend

TOPK = Topk(kv_heads=2, queries_per_kv=2, head_dim=8, kept=4)
STRIDED = StridedSparse(kv_heads=2, queries_per_kv=2, head_dim=8, stride=4)
FIXED = dataclasses.replace(STRIDED, form="fixed")
BLOCKS = BlockLocal(kv_heads=2, queries_per_kv=2, head_dim=8, block=8, earlier=1)
MOBA = Moba(kv_heads=2, queries_per_kv=2, head_dim=8, block=8, blocks=2)
POOL = MultiscalePool(heads=4, head_dim=8, levels=2, ratio=4)
SPARSE = (TOPK, STRIDED, FIXED, BLOCKS, MOBA, POOL)
ALL_SEEING = (
    dataclasses.replace(TOPK, kept=64),
    dataclasses.replace(BLOCKS, block=64, earlier=0),
    dataclasses.replace(BLOCKS, block=32, earlier=1),
    dataclasses.replace(MOBA, block=16, blocks=4),
)
FEW = Dims(d_model=24, d_ff=48, layers=2, train_len=40, max_len=40)


def plain_twin(module: MixerModule) -> AttentionModule:
    """Softmax attention with the projections of another mixer."""
    twin = SMALL_SOFTMAX.build(DIMS)
    assert isinstance(twin, AttentionModule)
    for name in ("query", "key", "value", "out"):
        twin.get_submodule(name).weight = module.get_submodule(name).weight
    return twin


@pytest.mark.parametrize("mixer", ALL_SEEING)
@pytest.mark.parametrize("position", ["rotary", "alibi"])
def test_a_mixer_that_sees_everything_is_softmax_attention_and_says_so(mixer: AbstractMixer, position: str) -> None:
    assert mixer.canonical(DIMS) == SMALL_SOFTMAX
    module, scheme = build(mixer, position)
    x = draw(2, 64, 24)
    torch.testing.assert_close(module(x, scheme, Context()), plain_twin(module)(x, scheme, Context()))


@pytest.mark.parametrize("mixer", SPARSE)
def test_a_mixer_that_sees_less_stays_what_it_is(mixer: AbstractMixer) -> None:
    assert mixer.canonical(DIMS) is mixer


def seen_by(mixer: AbstractMixer, length: int) -> Tensor:
    """Which tokens each output depends on."""
    module, position = build(mixer)
    x = draw(1, length, 24).requires_grad_()
    y = module(x, position, Context())
    rows = [torch.autograd.grad(y[:, t].sum(), x, retain_graph=True)[0].abs().sum((0, 2)).ne(0) for t in range(length)]
    return torch.stack(rows)


@pytest.mark.parametrize("mixer", [*SPARSE, dataclasses.replace(POOL, levels=4, ratio=2)])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 17, 22])
def test_no_token_sees_a_later_one_at_any_length(mixer: AbstractMixer, length: int) -> None:
    seen = seen_by(mixer, length)
    assert not seen.triu(1).any()
    assert seen.diagonal().all()


@pytest.mark.parametrize("mixer", SPARSE)
@pytest.mark.parametrize("length", [1, 8, 33])
@pytest.mark.parametrize("position", ["rotary", "t5_bias"])
def test_decoding_equals_the_full_pass_over_every_edge(mixer: AbstractMixer, length: int, position: str) -> None:
    module, scheme = build(mixer, position)
    x = draw(2, length, 24)
    whole = module(x, scheme, Context())
    for cuts in ((), tuple(range(1, length)), tuple(range(3, length, 3)), tuple(range(8, length, 8))):
        torch.testing.assert_close(decode(module, x, scheme, cuts), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mixer", SPARSE)
def test_padding_moves_no_block(mixer: AbstractMixer) -> None:
    module, scheme = build(mixer, "rotary")
    x = draw(2, LENGTH, 24)
    alone = module(x, scheme, Context())
    for before in (1, 3, 4, 8):
        padded = torch.cat([draw(2, before, 24, seed=1), x, draw(2, 3, 24, seed=2)], dim=1)
        live = torch.zeros(2, padded.shape[1], dtype=torch.bool)
        live[:, before : before + LENGTH] = True
        y = module(padded, scheme, Context(live=live))
        torch.testing.assert_close(y[:, before : before + LENGTH], alone, rtol=1e-4, atol=1e-5)
        assert y[~live].eq(0).all()


def test_topk_equals_x_transformers(compared: Compare) -> None:
    module, _ = build(TOPK)
    x = draw(2, LENGTH, 24)
    q, k, v = (rows.transpose(1, 2) for rows in split_heads(module, x, module.shape))
    k, v = (rows.repeat_interleave(2, dim=1) for rows in (k, v))
    mixed, _ = Attend(causal=True, heads=4, sparse_topk=4)(q, k, v)
    expected = join_heads(module, mixed.transpose(1, 2))
    compared(
        "mixer.topk",
        "x-transformers Attend(sparse_topk=4)",
        module(x, PLAIN, Context()),
        expected,
        rtol=1e-5,
        atol=1e-5,
    )


def test_topk_keeps_as_many_keys_as_it_says() -> None:
    weigh = Topk(kept=4).build(DIMS).weigh  # type: ignore[attr-defined]
    weights = weigh(Scene(q=draw(1, LENGTH, 4, 8), k=draw(1, LENGTH, 4, 8, seed=1), scale=1.0, bias=None, live=None))
    kept = weights.gt(0).sum(-1)
    assert kept.eq(torch.arange(1, LENGTH + 1).clamp_max(4)).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, LENGTH))


@pytest.mark.parametrize("form", ["strided", "fixed"])
def test_two_sparse_layers_reach_every_earlier_token(form: str) -> None:
    near, far = sparse_pattern(100, 100, 10, form, CPU).float()
    everything = torch.ones(100, 100).tril()
    assert ((near @ far + far @ near) > 0).equal(everything > 0)
    assert not (near > 0).equal(everything > 0)
    assert near.sum() + far.sum() < 2 * 100 * 11


@pytest.mark.parametrize("form", ["strided", "fixed"])
def test_sparse_attention_is_softmax_under_its_pattern(form: str) -> None:
    module, _ = build(dataclasses.replace(STRIDED, form=form))
    x = draw(2, LENGTH, 24)
    q, k, v = split_heads(module, x, module.shape)
    query, key = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None, :]
    if form == "strided":
        near, far = (query - key) < 4, (query - key) % 4 == 0
    else:
        near, far = query // 4 == key // 4, (key % 4 == 3) | (key == query)
    pattern = torch.stack([near, far, near, far]) & (key <= query)
    weights = masked_softmax(scaled_logits(q, k, 8**-0.5), pattern)
    expected = join_heads(module, weighted_values(weights, v))
    torch.testing.assert_close(module(x, PLAIN, Context()), expected)


def test_a_stride_beyond_the_longest_text_has_one_form() -> None:
    long = dataclasses.replace(FIXED, stride=64)
    canonical = long.canonical(FEW)
    assert canonical == dataclasses.replace(STRIDED, stride=40)
    one, other = build(long)[0], build(canonical)[0]
    x = draw(2, 40, 24)
    torch.testing.assert_close(one(x, PLAIN, Context()), other(x, PLAIN, Context()))


@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_a_block_sees_itself_and_the_blocks_before(earlier: int) -> None:
    query, key = torch.arange(33)[:, None], torch.arange(33)[None, :]
    expected = (key <= query) & (key // 8 >= query // 8 - earlier)
    assert seen_by(dataclasses.replace(BLOCKS, earlier=earlier), 33).equal(expected)


def test_blocks_equal_attention_under_a_dense_mask() -> None:
    module, position = build(BLOCKS, "rotary")
    x = draw(2, 37, 24)
    q, k, v = split_heads(module, x, module.shape)
    q, k = position.rotate(q, k)
    block = torch.arange(37) // 8
    near = block[:, None] - block[None, :] <= 1
    weights = masked_softmax(scaled_logits(q, k, 8**-0.5), visible_keys(37, 37, None, None, CPU) & near)
    expected = join_heads(module, weighted_values(weights, v))
    torch.testing.assert_close(module(x, position, Context()), expected, rtol=1e-5, atol=1e-5)


def test_moba_chooses_the_best_blocks_and_its_own() -> None:
    q, k = draw(2, LENGTH, 4, 8), draw(2, LENGTH, 2, 8, seed=1)
    chosen = chosen_blocks(q, mean_keys(k, None, 4), 0, 4, 3)
    for row, head, t in ((0, 0, 2), (1, 3, 13), (0, 2, 20)):
        own = t // 4
        affinity = [(q[row, t, head] @ k[row, 4 * b : 4 * b + 4, head // 2].mean(0)).item() for b in range(own)]
        best = sorted(range(own), key=lambda b: -affinity[b])[:2]
        assert chosen[row, head, t].nonzero()[:, 0].tolist() == sorted([*best, own])


def test_the_mean_key_of_a_block_leaves_padding_out() -> None:
    k, live = draw(1, 10, 2, 8), torch.ones(1, 10, dtype=torch.bool)
    live[0, 5:7] = False
    means = mean_keys(k, live, 4)
    torch.testing.assert_close(means[0, 1], k[0, [4, 7]].mean(0))
    torch.testing.assert_close(means[0, 2], k[0, 8:].mean(0))


def dense_pool(module: MultiscalePoolModule, x: Tensor) -> Tensor:
    """The definition, row by row: complete blocks by their mean, the tokens after them one by one."""
    q, k, v = split_heads(module, x, module.shape)
    mixed = torch.zeros_like(q)
    for (heads, scale), t in ((group, t) for group in module._groups() for t in range(x.shape[1])):
        complete = (t + 1) // scale * scale
        keys, values = (
            torch.cat(
                [
                    rows[:, :complete, heads].unflatten(1, (-1, scale)).mean(2),
                    rows[:, complete : t + 1, heads],
                ],
                dim=1,
            )
            for rows in (k, v)
        )
        mixed[:, t : t + 1, heads] = reference_attention(q[:, t : t + 1, heads], keys, values, scale=8**-0.5)
    return join_heads(module, mixed)


@pytest.mark.parametrize("ratio", [2, 4, 8])
@pytest.mark.parametrize("length", [1, 5, 8, 21, 32])
def test_pooled_attention_equals_its_definition(ratio: int, length: int) -> None:
    module, _ = build(dataclasses.replace(POOL, ratio=ratio))
    assert isinstance(module, MultiscalePoolModule)
    x = draw(2, length, 24)
    torch.testing.assert_close(module(x, PLAIN, Context()), dense_pool(module, x), rtol=1e-5, atol=1e-5)


def test_one_level_of_pooling_is_softmax_attention() -> None:
    module, position = build(dataclasses.replace(POOL, levels=1), "rotary")
    twin = AttentionModule(
        d_model=24,
        shape=POOL.head_shape(),
        window=None,
        qk_norm="none",
        train_len=64,
        attention_dropout=0.0,
        entropy_weight=0.0,
    )
    for name in ("query", "key", "value", "out"):
        twin.get_submodule(name).weight = module.get_submodule(name).weight
    x = draw(2, LENGTH, 24)
    torch.testing.assert_close(module(x, position, Context()), twin(x, position, Context()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ratio", [2, 4, 8])
def test_pooling_a_constant_input_gives_a_constant_output(ratio: int) -> None:
    module, _ = build(dataclasses.replace(POOL, ratio=ratio))
    y = module(draw(1, 1, 24).expand(1, LENGTH, 24), PLAIN, Context())
    torch.testing.assert_close(y, y[:, :1].expand_as(y))


def test_a_pooled_block_stands_at_its_last_token() -> None:
    """Rotation after pooling, at the place of the block's last token, leaves the outputs free of a shift."""
    module, position = build(POOL, "rotary")
    q, k, _ = split_heads(module, draw(1, 16, 24), module.shape)
    mean = k[:, 8:12].mean(1, keepdim=True)
    logit = (position.rotate(q, q)[0][:, 15] * position.rotate(mean.expand(1, 16, 4, 8), mean)[0][:, 11]).sum(-1)
    shifted = (position.rotate(q, q, 7)[0][:, 15] * position.rotate(mean.expand(1, 16, 4, 8), mean, 7)[0][:, 11]).sum(
        -1
    )
    torch.testing.assert_close(logit, shifted, rtol=1e-4, atol=1e-5)


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(
        InfeasibleArchitecture, match="heads must be a multiple of its levels; got 6 heads and 4 levels"
    ):
        dataclasses.replace(POOL, heads=6, levels=4).check(DIMS)


def state_numbers(mixer: AbstractMixer, length: int) -> int:
    module, position = build(mixer)
    _, state = module.step(draw(1, length, 24), module.empty_state(1, CPU, torch.float32), position, 0)
    return sum(tensor.numel() for tensor in state.values())


def test_states_hold_what_later_tokens_can_see() -> None:
    assert state_numbers(BLOCKS, 5) == state_numbers(BLOCKS, 60) == 2 * 2 * 8 * 15
    per_token = 2 * 2 * 8
    assert state_numbers(POOL, 60) == 60 * per_token + (60 // 4 + 3) * per_token
    for mixer in (TOPK, STRIDED, MOBA):
        assert state_numbers(mixer, 60) == 60 * 2 * 2 * 8


@pytest.mark.parametrize("length", [1, 31, 32, 33, 40])
def test_a_state_that_grows_by_blocks_is_measured_over_many_tokens(
    small: Callable[..., ModelConfig], length: int
) -> None:
    config = small({"mixer.kind": "multiscale_pool", "mixer.multiscale_pool.ratio": 4})
    measured, per_head = cost.measure(config, length), 2 * 4 * 8 * config.layers
    rows = 2 * length + 2 * (length // 4) + 2 * 3
    assert measured.state_bytes(length) == pytest.approx(rows * per_head)
    if length > 1:
        assert measured.state_bytes_per_token == pytest.approx(2.5 * per_head, rel=0.05)
        assert measured.fixed_state_bytes > 0


@pytest.mark.parametrize("mixer", [TOPK, BLOCKS])
def test_flops_equal_the_counted(mixer: AbstractMixer) -> None:
    module = mixer.build(DIMS)
    if isinstance(module, BlockLocalModule):
        module.attend = reference_attention
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(draw(1, 24, 24), PLAIN, Context())
    assert mixer.flops_per_token(DIMS, 24, causal=False) == counter.get_total_flops() / 24


def test_pooled_flops_equal_the_counted() -> None:
    module = POOL.build(DIMS)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(draw(1, 24, 24), PLAIN, Context())
    assert POOL.flops_per_token(DIMS, 24, causal=False) == counter.get_total_flops() / 24


@pytest.mark.parametrize("mixer", [STRIDED, FIXED, MOBA, POOL, BLOCKS])
def test_causal_flops_count_the_scores_in_view(mixer: AbstractMixer) -> None:
    length, query, key = 33, torch.arange(33)[:, None], torch.arange(33)[None, :]
    shape = mixer.head_shape()
    pairs: float
    if isinstance(mixer, StridedSparse):
        pairs = sparse_pattern(length, length, 4, mixer.form, CPU).sum().item() / 2
    elif isinstance(mixer, BlockLocal):
        pairs = ((key <= query) & (key // 8 >= query // 8 - 1)).sum().item()
    elif isinstance(mixer, MultiscalePool):
        pairs = sum((t + 1) + (t + 1) // 4 + (t + 1) % 4 for t in range(length)) / 2
    else:
        chosen = chosen_blocks(draw(1, length, 1, 8), mean_keys(draw(1, length, 1, 8, seed=1), None, 8), 0, 8, 2)
        inside = chosen.repeat_interleave(8, -1)[..., :length] & (key <= query)
        pairs = inside.sum().item() + sum(t // 8 + 1 for t in range(length)) / 2
    projections = 2 * 24 * 8 * (2 * shape.heads + 2 * shape.kv_heads)
    expected = projections + 4 * shape.heads * 8 * pairs / length
    assert mixer.flops_per_token(DIMS, length, causal=True) == pytest.approx(expected)
