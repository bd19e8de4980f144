"""Mixers with tokens that all see, and mixers for encoders: reductions, padding, other implementations."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from reference_table import Compare
from small_mixers import CPU, DIMS, LENGTH, PLAIN, SMALL_SOFTMAX, SMALL_WINDOW, build, decode, draw, drawn
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import BigBirdConfig, LongformerConfig, NystromformerConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

from blocks.families import AbstractMixer, Context, Direction, InfeasibleArchitecture, MixerModule
from blocks.mixers.bigbird import BigBird, BigBirdRule
from blocks.mixers.heads import AttentionModule
from blocks.mixers.linformer import Linformer, LinformerModule
from blocks.mixers.longformer import Longformer, LongformerModule
from blocks.mixers.nystrom import Nystrom, nystrom_attention, pseudo_inverse, shares
from blocks.mixers.projections import WeighedAttention, join_heads, split_heads
from blocks.ops.attention import attention_weights, reference_attention, weighted_values
from blocks.ops.patterns import blocks_in_view, random_blocks
from blocks.ops.scores import masked_softmax, scaled_logits

pytestmark = pytest.mark.slow

BOTH = dataclasses.replace(DIMS, direction=Direction.BIDIRECTIONAL)
LONGFORMER = Longformer(kv_heads=2, queries_per_kv=2, head_dim=8, window=5, first=3)
BIGBIRD = BigBird(kv_heads=2, queries_per_kv=2, head_dim=8, block=4, first=1, drawn=1)
LINFORMER = Linformer(kv_heads=2, queries_per_kv=2, head_dim=8, rank=8)
NYSTROM = Nystrom(kv_heads=2, queries_per_kv=2, head_dim=8, landmarks=4)
CAUSAL = (LONGFORMER, BIGBIRD)
ENCODERS = (LONGFORMER, BIGBIRD, LINFORMER, NYSTROM)


def encoder(mixer: AbstractMixer) -> MixerModule:
    module = mixer.build(BOTH)
    drawn(module)
    return module


def plain_twin(module: MixerModule, mixer: AbstractMixer = SMALL_SOFTMAX, direction: str = "causal") -> AttentionModule:
    """Softmax attention with the projections of another mixer."""
    twin = mixer.build(dataclasses.replace(DIMS, direction=Direction(direction)))
    assert isinstance(twin, AttentionModule)
    for name in ("query", "key", "value", "out"):
        twin.get_submodule(name).weight = module.get_submodule(name).weight
    return twin


@pytest.mark.parametrize("mixer", CAUSAL)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 9, 21])
def test_global_tokens_of_a_decoder_see_nothing_later(mixer: AbstractMixer, length: int) -> None:
    module, position = build(mixer, "rotary")
    x = draw(1, length, 24).requires_grad_()
    y = module(x, position, Context())
    for t in range(length):
        (gradient,) = torch.autograd.grad(y[:, t].sum(), x, retain_graph=True)
        assert gradient[:, t + 1 :].eq(0).all()
        assert gradient[:, t].ne(0).any()
        assert gradient[:, : min(t + 1, 3)].abs().sum((0, 2)).ne(0).all(), "the first tokens are seen by all"


@pytest.mark.parametrize("mixer", CAUSAL)
@pytest.mark.parametrize("position", ["rotary", "xpos", "t5_bias"])
@pytest.mark.parametrize("cuts", [(), tuple(range(1, LENGTH)), (2, 5, 11), (1,), (LENGTH - 1,)])
def test_decoding_equals_the_full_pass(mixer: AbstractMixer, position: str, cuts: tuple[int, ...]) -> None:
    module, scheme = build(mixer, position)
    x = draw(2, LENGTH, 24)
    torch.testing.assert_close(decode(module, x, scheme, cuts), module(x, scheme, Context()), rtol=1e-4, atol=1e-5)


def padded(mixer_output: Tensor, module: MixerModule, x: Tensor, before: int) -> None:
    around = torch.cat([draw(2, before, 24, seed=1), x, draw(2, 3, 24, seed=2)], dim=1)
    live = torch.zeros(2, around.shape[1], dtype=torch.bool)
    live[:, before : before + x.shape[1]] = True
    y = module(around, PLAIN, Context(live=live))
    torch.testing.assert_close(y[:, before : before + x.shape[1]], mixer_output, rtol=1e-4, atol=1e-5)
    assert y[~live].eq(0).all()


@pytest.mark.parametrize("before", [0, 1, 4])
@pytest.mark.parametrize("mixer", CAUSAL)
def test_padding_changes_no_decoder(mixer: AbstractMixer, before: int) -> None:
    module, _ = build(mixer)
    x = draw(2, LENGTH, 24)
    padded(module(x, PLAIN, Context()), module, x, before)


@pytest.mark.parametrize("before", [0, 1, 4])
@pytest.mark.parametrize("length", [1, 3, LENGTH])
@pytest.mark.parametrize("mixer", ENCODERS)
def test_padding_changes_no_encoder(mixer: AbstractMixer, length: int, before: int) -> None:
    module = encoder(mixer)
    x = draw(2, length, 24)
    padded(module(x, PLAIN, Context()), module, x, before)


@pytest.mark.parametrize("mixer", ENCODERS)
def test_dead_rows_and_holes_stay_finite(mixer: AbstractMixer) -> None:
    module, x = encoder(mixer), draw(3, LENGTH, 24).requires_grad_()
    live = torch.ones(3, LENGTH, dtype=torch.bool)
    live[0], live[1, 5:9] = False, False
    module(x, PLAIN, Context(live=live)).square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("mixer", ENCODERS)
def test_every_parameter_of_an_encoder_is_trained(mixer: AbstractMixer) -> None:
    module = encoder(mixer)
    (module(draw(2, LENGTH, 24), PLAIN, Context()) * draw(2, LENGTH, 24, seed=5)).sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.ne(0).any(), name


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_longformer_without_global_tokens_is_a_window(direction: str) -> None:
    module = LongformerModule(
        d_model=24, shape=LONGFORMER.head_shape(), window=5, n_global=0, causal=direction == "causal"
    )
    drawn(module)
    x = draw(2, LENGTH, 24)
    twin = plain_twin(module, SMALL_WINDOW, direction)
    torch.testing.assert_close(module(x, PLAIN, Context()), twin(x, PLAIN, Context()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_longformer_with_global_tokens_only_is_softmax_attention_by_their_projections(direction: str) -> None:
    module = LongformerModule(
        d_model=24, shape=LONGFORMER.head_shape(), window=5, n_global=LENGTH, causal=direction == "causal"
    )
    drawn(module)
    twin = plain_twin(module, direction=direction)
    for name in ("query", "key", "value"):
        twin.get_submodule(name).weight = module.get_submodule(f"gathering_{name}").weight
    x = draw(2, LENGTH, 24)
    torch.testing.assert_close(module(x, PLAIN, Context()), twin(x, PLAIN, Context()), rtol=1e-5, atol=1e-5)


def test_longformer_as_an_encoder_equals_transformers(compared: Compare) -> None:
    """Theirs counts the window on both sides: eight there is five here, the token itself included."""
    mixer = dataclasses.replace(LONGFORMER, kv_heads=3, queries_per_kv=1)
    module = encoder(mixer)
    config = LongformerConfig(hidden_size=24, num_attention_heads=3, attention_window=[8])
    theirs = LongformerSelfAttention(config, 0).eval()
    pairs = {"query": "query", "key": "key", "value": "value"}
    pairs |= {f"{name}_global": f"gathering_{name}" for name in ("query", "key", "value")}
    weights = {f"{name}.weight": module.get_submodule(ours).weight for name, ours in pairs.items()}
    theirs.load_state_dict({**weights, **{f"{name}.bias": torch.zeros(24) for name in pairs}})
    x = draw(2, 24, 24)
    mask = torch.zeros(2, 24)
    mask[:, :3] = 10000.0
    mixed = theirs(
        x, attention_mask=mask, is_index_masked=mask < 0, is_index_global_attn=mask > 0, is_global_attn=True
    )[0]
    expected = module.get_submodule("out")(mixed)
    compared(
        "mixer.longformer",
        "transformers LongformerSelfAttention",
        module(x, PLAIN, Context()),
        expected,
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("first", [1, 64])
def test_too_few_or_too_many_global_tokens_are_refused(first: int) -> None:
    with pytest.raises(
        InfeasibleArchitecture, match=f"first must be at least 2.*below the training length 64; got {first}"
    ):
        dataclasses.replace(LONGFORMER, first=first).check(DIMS)


def test_a_window_past_the_longest_text_has_one_id() -> None:
    wide = dataclasses.replace(LONGFORMER, window=128)
    assert wide.canonical(DIMS) == dataclasses.replace(LONGFORMER, window=64)
    x = draw(2, 64, 24)
    torch.testing.assert_close(build(wide)[0](x, PLAIN, Context()), build(wide.canonical(DIMS))[0](x, PLAIN, Context()))


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_bigbird_with_every_block_in_view_is_softmax_attention(direction: str) -> None:
    dims = dataclasses.replace(DIMS, direction=Direction(direction))
    for mixer in (dataclasses.replace(BIGBIRD, block=16), dataclasses.replace(BIGBIRD, block=16, first=2)):
        assert mixer.canonical(dims) == SMALL_SOFTMAX
        module = mixer.build(dims)
        drawn(module)
        x = draw(2, 64, 24)
        twin = plain_twin(module, direction=direction)
        torch.testing.assert_close(module(x, PLAIN, Context()), twin(x, PLAIN, Context()), rtol=1e-5, atol=1e-5)
    assert BIGBIRD.canonical(dims) is BIGBIRD


@pytest.mark.parametrize("causal", [True, False])
def test_bigbird_sees_its_neighbours_the_first_block_and_as_many_others_as_it_draws(causal: bool) -> None:
    table = torch.tensor(random_blocks(12, 2, 4, 1, causal))
    seen = blocks_in_view(table, 48, 48, 4, 1, causal)
    assert seen[:, :, :4].equal(torch.ones(4, 48, 4, dtype=torch.bool).tril() if causal else torch.ones(4, 48, 4) > 0)
    own = torch.arange(48) // 4
    near = (own[:, None] - own[None, :]).abs() <= 1
    assert (seen | ~(near.tril() if causal else near)).all()
    last = seen[:, 47].unflatten(1, (12, 4)).any(-1).sum(-1)
    assert last.eq(2 + 1 + 2).all()
    assert not seen[0].equal(seen[1]), "heads draw apart"
    assert random_blocks(12, 2, 4, 1, causal) == random_blocks(12, 2, 4, 1, causal)
    if causal:
        assert not seen.triu(1).any()
        assert [rows[:6] for rows in random_blocks(12, 2, 4, 1, True)] == random_blocks(6, 2, 4, 1, True)


def test_bigbird_is_softmax_under_its_pattern() -> None:
    module, _ = build(BIGBIRD)
    x = draw(2, LENGTH, 24)
    q, k, v = split_heads(module, x, SMALL_SOFTMAX.head_shape())  # type: ignore[arg-type]
    seen = blocks_in_view(torch.tensor(random_blocks(16, 1, 4, 1, True)), LENGTH, LENGTH, 4, 1, True)
    mixed = weighted_values(masked_softmax(scaled_logits(q, k, 8**-0.5), seen), v)
    torch.testing.assert_close(module(x, PLAIN, Context()), join_heads(module, mixed))  # type: ignore[arg-type]


def their_table(theirs: BigBirdBlockSparseAttention, n_blocks: int, drawn_blocks: int) -> Tensor:
    """What BigBird of transformers sees beyond neighbours and the first block: its draw, and the last block.

    There the last block is one of those that all see and that see all; only in training it draws at all.
    """
    length, heads = n_blocks * 4, theirs.num_attention_heads
    plan, counts = theirs._get_rand_attn_plan(length, 4, drawn_blocks)
    np.random.seed(theirs.seed)
    draws = theirs._bigbird_block_rand_mask_with_head(length, length, 4, 4, heads, plan, counts)
    table = torch.empty(heads, n_blocks, n_blocks, dtype=torch.int64)
    for head, block in itertools.product(range(heads), range(n_blocks)):
        inner = 0 < block < n_blocks - 1
        drawn_here = draws[head][block - 1].tolist() if inner else []
        assert not {0, n_blocks - 1, block - 1, block, block + 1}.intersection(drawn_here)
        row = [*drawn_here, n_blocks - 1] if block < n_blocks - 1 else list(range(n_blocks))
        table[head, block] = torch.tensor(row + [block] * (n_blocks - len(row)))
    return table


@pytest.mark.parametrize(("n_blocks", "drawn_blocks"), [(12, 1), (16, 2)])
@pytest.mark.parametrize("padded", [0, 6])
def test_bigbird_equals_transformers_under_their_draw(
    compared: Compare, n_blocks: int, drawn_blocks: int, padded: int
) -> None:
    length = 4 * n_blocks
    dims = dataclasses.replace(BOTH, d_model=32, max_len=length)
    module = dataclasses.replace(BIGBIRD, kv_heads=4, queries_per_kv=1, drawn=drawn_blocks).build(dims)
    drawn(module)
    config = BigBirdConfig(
        hidden_size=32, num_attention_heads=4, num_random_blocks=drawn_blocks, block_size=4, use_bias=False
    )
    theirs = BigBirdBlockSparseAttention(config, seed=3).train()
    theirs.load_state_dict({f"{name}.weight": module.get_submodule(name).weight for name in ("query", "key", "value")})
    assert isinstance(module, WeighedAttention)
    assert isinstance(module.weigh, BigBirdRule)
    module.weigh.table = their_table(theirs, n_blocks, drawn_blocks)
    live = torch.arange(length)[None].expand(2, -1) < length - padded
    blocked, band, from_mask, to_mask = BigBirdModel.create_masks_for_block_sparse_attn(live.float(), 4)
    x = draw(2, length, 32)
    mixed, _ = theirs(x, band, from_mask, to_mask, blocked, blocked)
    compared(
        "mixer.bigbird",
        "transformers BigBirdBlockSparseAttention",
        module(x, PLAIN, Context(live=live))[live],
        module.out(mixed)[live],
        rtol=1e-5,
        atol=1e-5,
    )


def test_linformer_with_a_row_per_place_is_softmax_attention() -> None:
    module = encoder(dataclasses.replace(LINFORMER, rank=64))
    assert isinstance(module, LinformerModule)
    for along in (module.along_k, module.along_v):
        along.data = torch.eye(64)
    x = draw(2, 64, 24)
    twin = plain_twin(module, direction="bidirectional")
    torch.testing.assert_close(module(x, PLAIN, Context()), twin(x, PLAIN, Context()), rtol=1e-5, atol=1e-5)


def test_linformer_is_softmax_over_projected_rows() -> None:
    module = encoder(LINFORMER)
    assert isinstance(module, LinformerModule)
    x = draw(2, 64, 24)
    q, k, v = split_heads(module, x, module.shape)
    k, v = (torch.einsum("rt,btgk->brgk", along, rows) for along, rows in ((module.along_k, k), (module.along_v, v)))
    mixed = reference_attention(q, k, v, scale=8**-0.5, causal=False)
    torch.testing.assert_close(module(x, PLAIN, Context()), join_heads(module, mixed), rtol=1e-4, atol=1e-5)


def test_linformer_runs_at_one_length() -> None:
    with pytest.raises(InfeasibleArchitecture, match=r"64 training places.*to run on 65"):
        LINFORMER.check(dataclasses.replace(BOTH, max_len=65))
    with pytest.raises(InfeasibleArchitecture, match="64 places and was run on 65"):
        encoder(LINFORMER)(draw(1, 65, 24), PLAIN, Context())


@pytest.mark.parametrize("mixer", [LINFORMER, NYSTROM])
def test_mixers_that_mix_all_places_are_for_encoders_only(mixer: AbstractMixer) -> None:
    assert mixer.directions == {Direction.BIDIRECTIONAL}


def test_nystrom_with_a_landmark_per_token_is_softmax_attention() -> None:
    q, k, v = (draw(2, LENGTH, 2, 8, seed=seed, dtype=torch.float64) for seed in range(3))
    live = torch.ones(2, LENGTH, dtype=torch.bool)
    expected = weighted_values(attention_weights(q, k, scale=1.0, causal=False), v)
    errors = [
        (nystrom_attention(q, k, v, live, scale=1.0, landmarks=LENGTH, iterations=n) - expected).abs().max().item()
        for n in (6, 12, 40)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-6


def test_the_pseudo_inverse_is_that_of_linear_algebra() -> None:
    full = torch.softmax(draw(3, 8, 8, dtype=torch.float64), dim=-1)
    torch.testing.assert_close(pseudo_inverse(full, 40), torch.linalg.pinv(full), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(pseudo_inverse(torch.eye(8) * 3, 6), torch.eye(8) / 3)
    flat = torch.ones(4, 4, dtype=torch.float64)
    torch.testing.assert_close(pseudo_inverse(flat, 10), flat / 16)


@pytest.mark.parametrize("count", [1, 3, 8, 21])
def test_segments_share_out_the_live_tokens(count: int) -> None:
    live = torch.zeros(1, 24, dtype=torch.bool)
    live[0, 2 : 2 + count] = True
    share = shares(live, 8)
    assert share[~live].eq(0).all()
    torch.testing.assert_close(share.sum(1)[0, share.any(1)[0]], torch.ones(min(count, 8)))
    assert (share[0] > 0).sum(0).max() - (share[0] > 0).sum(0)[share.any(1)[0]].min() <= 1


def test_nystrom_equals_transformers(compared: Compare) -> None:
    """Theirs starts its iteration from the largest sum of all rows and heads; one row of one head leaves no choice."""
    mixer = dataclasses.replace(NYSTROM, kv_heads=1, queries_per_kv=1)
    module = encoder(mixer)
    config = NystromformerConfig(
        hidden_size=8, num_attention_heads=1, num_landmarks=4, segment_means_seq_len=24, conv_kernel_size=1
    )
    theirs = NystromformerSelfAttention(config).eval()
    x = draw(1, 24, 24)
    theirs.conv.weight.data.zero_()
    q, k, v = split_heads(module, x, mixer.head_shape())  # type: ignore[arg-type]
    theirs.query, theirs.key, theirs.value = (Fixed(rows[:, :, 0]) for rows in (q, k, v))
    mixed = theirs(torch.zeros(1, 24, 8))[0]
    expected = module.get_submodule("out")(mixed)
    compared(
        "mixer.nystrom",
        "transformers NystromformerSelfAttention",
        module(x, PLAIN, Context()),
        expected,
        rtol=1e-3,
        atol=1e-4,
    )


class Fixed(torch.nn.Module):
    """Returns the same rows whatever it is given."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        return self.rows


@pytest.mark.parametrize("mixer", [LINFORMER, NYSTROM])
def test_flops_equal_the_counted(mixer: AbstractMixer) -> None:
    module = encoder(mixer)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(draw(1, 24, 24), PLAIN, Context())
    assert mixer.flops_per_token(BOTH, 24, causal=False) == pytest.approx(counter.get_total_flops() / 24)


def test_causal_flops_count_the_scores_in_view() -> None:
    query, key = torch.arange(33)[:, None], torch.arange(33)[None, :]
    window = (key <= query) & ((query - key < 5) | (key < 3) | (query < 3))
    table = torch.tensor(random_blocks(16, 1, 1, 1, True))
    for mixer, pairs, more in (
        (LONGFORMER, window.sum().item(), 2 * 24 * 8 * (4 + 2 * 2) * 3 / 33),
        (BIGBIRD, blocks_in_view(table, 33, 33, 4, 1, True).sum().item(), 0.0),
    ):
        projections = 2 * 24 * 8 * (2 * 4 + 2 * 2)
        expected = projections + 4 * 4 * 8 * pairs / 33 + more
        assert mixer.flops_per_token(DIMS, 33, causal=True) == pytest.approx(expected)


def test_states_hold_what_later_tokens_can_see() -> None:
    module, position = build(LONGFORMER, "rotary")
    sizes = set()
    for length in (1, 5, 40):
        _, state = module.step(draw(1, length, 24), module.empty_state(1, CPU, torch.float32), position, 0)
        sizes.add(sum(tensor.numel() for tensor in state.values()))
    assert sizes == {2 * 2 * 8 * (4 + 3 + 3)}
