"""Mixers in which content decides what is left to see: shares of a stick, tokens that hide others, chosen blocks."""

import dataclasses
import functools
import warnings
from types import ModuleType

import pytest
import torch
from fla_naive import fla_naive
from reference_table import Compare
from small_mixers import CPU, DIMS, LENGTH, PLAIN, SMALL_SOFTMAX, build, decode, draw
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from blocks.families import AbstractMixer, Context, InfeasibleArchitecture, MixerModule
from blocks.mixers.heads import AttentionModule
from blocks.mixers.nsa import NativeSparse, NativeSparseModule, best_blocks, complete_blocks
from blocks.mixers.projections import Scene, join_heads, split_heads
from blocks.mixers.selective import Selective
from blocks.mixers.sliding_window import SlidingWindow
from blocks.mixers.stick_breaking import StickBreaking, stick_breaking_rule, sum_of_later
from blocks.ops.scores import scaled_logits
from blocks.positions.alibi import Alibi

pytestmark = pytest.mark.slow

with warnings.catch_warnings():
    # x-transformers compiles helpers with torch.jit.script at import, which newer torch versions deprecate.
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=DeprecationWarning)
    from x_transformers.attend import Attend

STICK = StickBreaking(kv_heads=2, queries_per_kv=2, head_dim=8)
SELECTIVE = Selective(kv_heads=2, queries_per_kv=2, head_dim=8)
NSA = NativeSparse(kv_heads=2, queries_per_kv=2, head_dim=8, block=4, kept=4, window=8, own_kv=False)
NSA_OWN = dataclasses.replace(NSA, own_kv=True)
SELECTING = (STICK, dataclasses.replace(STICK, itself=True), SELECTIVE, NSA, NSA_OWN)


def seen_by(mixer: AbstractMixer, length: int) -> Tensor:
    """Which tokens each output depends on."""
    module, position = build(mixer)
    x = draw(1, length, 24).requires_grad_()
    y = module(x, position, Context())
    rows = [torch.autograd.grad(y[:, t].sum(), x, retain_graph=True)[0].abs().sum((0, 2)).ne(0) for t in range(length)]
    return torch.stack(rows)


@pytest.mark.parametrize("mixer", SELECTING)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 22])
def test_no_token_sees_a_later_one_at_any_length(mixer: AbstractMixer, length: int) -> None:
    seen = seen_by(mixer, length)
    assert not seen.triu(1).any()
    assert seen.diagonal().all() or (mixer == STICK and seen.diagonal()[1:].all())


@pytest.mark.parametrize("mixer", SELECTING)
@pytest.mark.parametrize("length", [1, 8, 33])
@pytest.mark.parametrize("position", ["rotary", "t5_bias"])
def test_decoding_equals_the_full_pass_over_every_edge(mixer: AbstractMixer, length: int, position: str) -> None:
    module, scheme = build(mixer, position)
    x = draw(2, length, 24)
    whole = module(x, scheme, Context())
    for cuts in ((), tuple(range(1, length)), tuple(range(3, length, 3)), tuple(range(8, length, 8))):
        torch.testing.assert_close(decode(module, x, scheme, cuts), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mixer", SELECTING)
def test_padding_on_either_side_changes_nothing(mixer: AbstractMixer) -> None:
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


@pytest.mark.parametrize("itself", [False, True])
def test_stick_breaking_equals_flash_linear_attention(compared: Compare, itself: bool) -> None:
    module, _ = build(dataclasses.replace(STICK, itself=itself))
    x = draw(2, LENGTH, 24)
    mixed, rest = fla_naive("stickbreaking_attn").naive_stickbreaking_attn(
        *split_heads(module, x, module.shape), attend_current=itself
    )
    compared(
        "mixer.stick_breaking",
        "flash-linear-attention naive_stickbreaking_attn",
        module(x, PLAIN, Context()),
        join_heads(module, mixed),
        rtol=1e-5,
        atol=1e-6,
    )
    scene = scene_of(module, x)
    weights = stick_breaking_rule(itself)(scene)
    torch.testing.assert_close(1 - weights.sum(-1), rest.transpose(1, 2), rtol=1e-5, atol=1e-6)
    assert weights.sum(-1).max() <= 1 + 1e-6


def scene_of(module: MixerModule, x: Tensor) -> Scene:
    q, k, _ = split_heads(module, x, STICK.head_shape())
    return Scene(q=q, k=k, scale=8**-0.5, bias=None, live=None)


def test_stick_breaking_weights_are_the_products_one_by_one() -> None:
    module, _ = build(STICK)
    scene = scene_of(module, draw(1, 9, 24))
    share = torch.sigmoid(scaled_logits(scene.q, scene.k, scene.scale))
    weights = stick_breaking_rule(False)(scene)
    for query in range(9):
        left = torch.ones(1, 4)
        for key in reversed(range(query)):
            torch.testing.assert_close(weights[:, :, query, key], left * share[:, :, query, key])
            left = left * (1 - share[:, :, query, key])
        assert weights[:, :, query, query:].eq(0).all()


def test_a_saturated_stick_keeps_the_digits_of_small_shares() -> None:
    """One key that takes all but e^-2000 must not blur what nearer keys take: no difference of long sums."""
    logs = torch.tensor([-2000.0, -1e-3, -0.5, -2.0]).expand(1, 1, 1, 4)
    torch.testing.assert_close(sum_of_later(logs)[0, 0, 0], torch.tensor([-2.501, -2.5, -2.0, 0.0]), rtol=0, atol=1e-6)


def attended(module: MixerModule, x: Tensor) -> Tensor:
    """What x-transformers makes of this module's heads."""
    q, k, v = (rows.transpose(1, 2) for rows in split_heads(module, x, SELECTIVE.head_shape()))
    k, v = (rows.repeat_interleave(2, dim=1) for rows in (k, v))
    return join_heads(module, Attend(causal=True, heads=4, selective=True)(q, k, v)[0].transpose(1, 2))


@pytest.mark.parametrize("length", [1, 2, 21])
def test_selective_attention_equals_x_transformers(compared: Compare, length: int) -> None:
    module, _ = build(SELECTIVE)
    x = draw(2, length, 24)
    compared(
        "mixer.selective",
        "x-transformers Attend(selective=True)",
        module(x, PLAIN, Context()),
        attended(module, x),
        rtol=1e-5,
        atol=1e-5,
    )


def plain_twin(module: MixerModule) -> AttentionModule:
    """Softmax attention with the projections of another mixer."""
    twin = SMALL_SOFTMAX.build(DIMS)
    assert isinstance(twin, AttentionModule)
    for name in ("query", "key", "value", "out"):
        twin.get_submodule(name).weight = module.get_submodule(name).weight
    return twin


def test_where_nothing_is_hidden_selective_attention_is_softmax_attention() -> None:
    module, _ = build(SELECTIVE)
    module.get_submodule("query").weight.data[:8] = 0.0
    position = Alibi().build(DIMS, SELECTIVE.head_shape())
    x = draw(2, LENGTH, 24)
    torch.testing.assert_close(module(x, position, Context()), plain_twin(module)(x, position, Context()))


def test_a_token_that_was_hidden_stays_hidden_and_the_first_never_is() -> None:
    """Head 0 of every query hides strongly whatever points its way: later queries no longer see those tokens."""
    module, _ = build(SELECTIVE)
    length, x = 6, draw(1, 6, 24)
    module.get_submodule("query").weight.data[:8] = 0.0
    module.get_submodule("query").weight.data[0, 23] = 100.0
    module.get_submodule("key").weight.data[:8] = 0.0
    module.get_submodule("key").weight.data[0, 22] = 100.0
    x[..., 22:] = 0.0
    x[:, [0, 1], 22] = 1.0
    x[:, 3, 23] = 1.0
    x = x.requires_grad_()
    y = module(x, PLAIN, Context())
    seen = [
        torch.autograd.grad(y[:, t].sum(), x, retain_graph=True)[0][0, :, :22].abs().sum(-1).ne(0)
        for t in range(length)
    ]
    assert seen[3][1]
    for later in (4, 5):
        assert not seen[later][1]
        assert seen[later][[0, 2, 3]].all()


@functools.cache
def naive_nsa() -> ModuleType:
    return fla_naive("nsa", {"fla.ops.utils": "prepare_chunk_offsets", "fla.ops.utils.pooling": "mean_pooling"})


@pytest.mark.parametrize("length", [4, 9, 21, 48])
def test_branches_equal_flash_linear_attention(compared: Compare, length: int) -> None:
    module, _ = build(NSA)
    assert isinstance(module, NativeSparseModule)
    x = draw(2, length, 24)
    q, k, v = split_heads(module, x, module.shape)
    whole = length // 4 * 4
    means_k, means_v = (rows[:, :whole].unflatten(1, (-1, 4)).mean(2) for rows in (k, v))
    coarse, _ = naive_nsa().naive_nsa_compression(q, means_k, means_v, 4, 8**-0.5)
    # There the block of a query has to exist to be chosen: its mean, which no query weighs, stands for a short one.
    last = k[:, whole:].mean(1, keepdim=True) if whole < length else k[:, :0]
    indices = naive_nsa().naive_nsa_topk(q, torch.cat([means_k, last], dim=1), 4, 4, 8**-0.5)
    picked = naive_nsa().naive_nsa_selection(q, k, v, indices, 4)
    window = SlidingWindow(kv_heads=2, queries_per_kv=2, head_dim=8, window=8).build(DIMS)
    assert isinstance(window, AttentionModule)
    recent = window.attend(q, k, v, scale=8**-0.5, window=8)
    gates = torch.sigmoid(module.gate(x)).unflatten(-1, (3, 4))[..., None]
    mixed = gates[:, :, 0] * coarse + gates[:, :, 1] * picked + gates[:, :, 2] * recent
    compared(
        "mixer.nsa",
        "flash-linear-attention naive_nsa_compression, naive_nsa_topk and naive_nsa_selection",
        module(x, PLAIN, Context()),
        join_heads(module, mixed),
        rtol=1e-5,
        atol=1e-5,
    )


def gated(mixer: NativeSparse, branch: int) -> NativeSparseModule:
    """The module with the gate of one branch open and the others shut."""
    module, _ = build(mixer)
    assert isinstance(module, NativeSparseModule)
    module.gate.weight.data.zero_()
    module.gate.bias.data = torch.full((3, 4), -200.0).index_fill(0, torch.tensor([branch]), 200.0).flatten()
    return module


@pytest.mark.parametrize("mixer", [NSA, NSA_OWN])
@pytest.mark.parametrize("branch", [1, 2])
def test_one_open_gate_leaves_full_attention_or_a_window(mixer: NativeSparse, branch: int) -> None:
    every = dataclasses.replace(mixer, kept=16)
    module = gated(every, branch)
    config = SMALL_SOFTMAX if branch == 1 else SlidingWindow(kv_heads=2, queries_per_kv=2, head_dim=8, window=8)
    twin = config.build(DIMS)
    position = Alibi().build(DIMS, every.head_shape())
    for name in ("query", "key", "value", "out"):
        weight = module.get_submodule(name).weight.data
        shared = weight.chunk(module.parts)[branch % module.parts] if name in ("key", "value") else weight
        twin.get_submodule(name).weight.data = shared.clone()
    x = draw(2, 48, 24)
    torch.testing.assert_close(module(x, position, Context()), twin(x, position, Context()), rtol=1e-5, atol=1e-5)


def test_block_means_stand_at_the_last_token_of_their_block() -> None:
    """With rotation, the coarse logits of a query are those of a mean key at the end of its block."""
    module = gated(NSA, 0)
    _, position = build(NSA, "rotary")
    x = draw(1, 12, 24)
    q, k, v = split_heads(module, x, module.shape)
    places = torch.zeros(1, 12, 2, 8)
    places[:, 3::4] = k.unflatten(1, (-1, 4)).mean(2)
    rotated_q, rotated_k = position.rotate(q, places)
    logits = scaled_logits(rotated_q, rotated_k[:, 3::4], 8**-0.5)
    complete = complete_blocks(12, 12, 3, 4, CPU)
    weights = torch.softmax(logits.masked_fill(~complete, -torch.inf), dim=-1).nan_to_num()
    mixed = torch.einsum("bhtn,bnhv->bthv", weights, v.unflatten(1, (-1, 4)).mean(2).repeat_interleave(2, 2))
    torch.testing.assert_close(module(x, position, Context()), join_heads(module, mixed), rtol=1e-5, atol=1e-5)


def test_the_chosen_blocks_are_the_forced_and_the_heaviest() -> None:
    logits = draw(1, 4, 40, 10)
    complete = complete_blocks(40, 40, 10, 4, CPU)
    chosen = best_blocks(logits, complete[None, None], 0, 4, 2, 4)
    shares = torch.softmax(logits.masked_fill(~complete, -torch.inf), dim=-1).nan_to_num()
    for group in range(2):
        importance = shares[0, 2 * group : 2 * group + 2].sum(0)
        for query in range(40):
            own = query // 4
            forced = {0, own, max(own - 1, 0)}
            others = sorted(set(range(own)) - forced, key=lambda n: -importance[query, n].item())
            expected = forced | set(others[: max(4 - 3, 0)])
            assert set(chosen[0, group, query].nonzero()[:, 0].tolist()) == expected


def test_blocks_and_windows_beyond_the_longest_text_are_cut_there() -> None:
    wide = dataclasses.replace(NSA, block=32, kept=16, window=128)
    canonical = wide.canonical(DIMS)
    assert canonical == dataclasses.replace(NSA, block=32, kept=3, window=64)
    assert canonical.canonical(DIMS) == canonical
    one, other = build(wide)[0], build(canonical)[0]
    x = draw(2, 64, 24)
    torch.testing.assert_close(one(x, PLAIN, Context()), other(x, PLAIN, Context()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block": 128}, r"nsa.block must be at most the training length 64.*got 128; choose a smaller one"),
        ({"kept": 2}, r"nsa.kept must be at least 3.*got 2 and 8; raise them"),
        ({"window": 0}, r"nsa.kept must be at least 3.*got 4 and 0; raise them"),
    ],
)
def test_what_leaves_a_branch_of_nsa_empty_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(InfeasibleArchitecture, match=message):
        dataclasses.replace(NSA, **changes).check(DIMS)


def state_numbers(mixer: AbstractMixer, length: int) -> int:
    module, position = build(mixer)
    _, state = module.step(draw(1, length, 24), module.empty_state(1, CPU, torch.float32), position, 0)
    return sum(tensor.numel() for tensor in state.values())


def test_states_hold_keys_values_and_what_was_hidden() -> None:
    per_token = 2 * 2 * 8
    assert state_numbers(STICK, 60) == state_numbers(NSA, 60) == 60 * per_token
    assert state_numbers(NSA_OWN, 60) == 3 * 60 * per_token
    assert state_numbers(SELECTIVE, 60) == 60 * (per_token + 1)


@pytest.mark.parametrize("mixer", [STICK, SELECTIVE])
def test_flops_equal_the_counted(mixer: AbstractMixer) -> None:
    module = mixer.build(DIMS)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(draw(1, 24, 24), PLAIN, Context())
    assert mixer.flops_per_token(DIMS, 24, causal=False) == counter.get_total_flops() / 24


@pytest.mark.parametrize("mixer", [NSA, NSA_OWN])
def test_causal_flops_count_what_the_three_branches_see(mixer: NativeSparse) -> None:
    length = 33
    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    chosen = best_blocks(draw(1, 1, length, 9), complete_blocks(length, length, 9, 4, CPU)[None, None], 0, 4, 1, 4)
    picked = (chosen[0, 0].repeat_interleave(4, -1)[:, :length] & (key <= query)).sum().item()
    recent = ((key <= query) & (key > query - 8)).sum().item()
    coarse = sum((t + 1) // 4 for t in range(length))
    kv_heads = 2 * (3 if mixer.own_kv else 1)
    projections = 2 * 24 * 8 * (2 * 4 + 2 * kv_heads) + 2 * 24 * 3 * 4
    expected = projections + 4 * 4 * 8 * (picked + recent + coarse) / length
    assert mixer.flops_per_token(DIMS, length, causal=True) == pytest.approx(expected)
    assert mixer.flops_per_token(DIMS, 64, causal=True) < mixer.flops_per_token(DIMS, 64, causal=False)


@pytest.mark.parametrize("mixer", SELECTING)
def test_plain_forms_say_why_no_fused_kernel_runs(mixer: AbstractMixer) -> None:
    assert mixer.build(DIMS).backends["attention"].startswith("reference (not sdpa: ")
