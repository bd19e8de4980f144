"""The gated delta rule: three forms of one function, its reductions, its extremes, and its references."""

from collections.abc import Callable

import pytest
import torch
from drawn_heads import BATCH, heads, with_gradients
from fla_naive import fla_naive
from reference_table import Compare
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from blocks.ops.delta_rule import DeltaNeeds, choose_delta_rule, chunked, dense, recurrent
from blocks.ops.gated_scan import empty_state
from blocks.ops.gated_scan import quadratic as scan

pytestmark = pytest.mark.slow

VALUE_DIM = 6
_CHOSEN = choose_delta_rule(DeltaNeeds()).run


def drawn_rule(length: int, channels: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, unit keys, values of another width, strengths in (0, 2), log decays per head or per channel."""
    q, k, v = heads(length, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    draws = torch.randn(BATCH, length, 4, channels + 1, generator=generator).to(dtype)
    unit = F.normalize(k, dim=-1)
    return [q, unit, v[..., :VALUE_DIM], 2 * draws[..., 0].sigmoid(), F.logsigmoid(2 * draws[..., 1:])]


def from_nothing(form: Callable[..., tuple[Tensor, Tensor]], **options: int) -> Callable[..., Tensor]:
    def run(*inputs: Tensor) -> Tensor:
        key_dim, v = inputs[0].shape[3], inputs[2]
        return form(*inputs, empty_state(v.shape[0], v.shape[2], key_dim, v.shape[3], v.device, v.dtype), **options)[0]

    return run


@pytest.mark.parametrize("channels", [1, 8])
@pytest.mark.parametrize("length", [1, 37, 70])
def test_dense_chunked_and_recurrent_forms_agree_with_gradients(length: int, channels: int) -> None:
    inputs = drawn_rule(length, channels)
    expected = with_gradients(from_nothing(recurrent), *inputs)
    for form in (dense, *(from_nothing(chunked, chunk=chunk) for chunk in (7, 16, 64))):
        for ours, reference in zip(with_gradients(form, *inputs), expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("channels", [1, 8])
def test_dense_form_passes_gradcheck_in_float64(channels: int) -> None:
    assert torch.autograd.gradcheck(dense, [x[:1, :, :1].clone().requires_grad_() for x in drawn_rule(4, channels)])


@pytest.mark.parametrize("channels", [1, 8])
@pytest.mark.parametrize("split", [1, 5, 64, 69])
def test_the_state_carries_over_any_split(split: int, channels: int) -> None:
    inputs = drawn_rule(70, channels)
    nothing = empty_state(BATCH, 4, 8, VALUE_DIM, torch.device("cpu"), torch.float64)
    whole, final = chunked(*inputs, nothing)
    first, state = recurrent(*(x[:, :split] for x in inputs), nothing)
    second, rest = chunked(*(x[:, split:] for x in inputs), state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    torch.testing.assert_close(rest, final)


def test_reading_the_key_just_written_at_full_strength_returns_the_value() -> None:
    _, k, v, beta, g = drawn_rule(50, 8)
    torch.testing.assert_close(_CHOSEN(k, k, v, torch.ones_like(beta), g), v)


def test_orthonormal_keys_without_decay_give_linear_attention() -> None:
    q, _, v, beta, g = drawn_rule(8, 1)
    k = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64)).Q[None, :, None].expand(BATCH, 8, 4, 8)
    none = torch.zeros_like(g)
    torch.testing.assert_close(_CHOSEN(q, k, v, torch.ones_like(beta), none), scan(q, k, v, none))


def test_a_strength_of_zero_writes_nothing() -> None:
    q, k, v, beta, g = drawn_rule(50, 8)
    beta[:, ::2], g[:, ::2] = 0, 0
    y = _CHOSEN(q, k, v, beta, g)[:, 1::2]
    torch.testing.assert_close(y, _CHOSEN(*(x[:, 1::2] for x in (q, k, v, beta, g))))


def test_decays_equal_over_channels_are_decays_per_head() -> None:
    q, k, v, beta, g = drawn_rule(50, 1)
    torch.testing.assert_close(_CHOSEN(q, k, v, beta, g.expand_as(q)), _CHOSEN(q, k, v, beta, g))


@pytest.mark.parametrize("strength", [0.01, 1.0, 2.0])
def test_unit_keys_never_make_a_state_grow(strength: float) -> None:
    q, k, v, beta, g = drawn_rule(500, 1, dtype=torch.float32)
    v[:, 1:] = 0
    state = empty_state(BATCH, 4, 8, VALUE_DIM, v.device, v.dtype)
    _, first = chunked(*(x[:, :1] for x in (q, k, v, torch.ones_like(beta), g)), state)
    _, last = chunked(q[:, 1:], k[:, 1:], v[:, 1:], torch.full_like(beta[:, 1:], strength), 0 * g[:, 1:], first)
    largest = [torch.linalg.matrix_norm(x, ord=2) for x in (first, last)]
    assert (largest[1] <= largest[0] * (1 + 1e-4)).all()


@pytest.mark.parametrize("channels", [1, 8])
@pytest.mark.parametrize("log_decay", [-1e-6, -5.0, -200.0, -1e4])
def test_extreme_decays_neither_overflow_nor_lose_gradients(log_decay: float, channels: int) -> None:
    q, k, v, beta, g = drawn_rule(200, channels, dtype=torch.float32)
    inputs = [q, k, v, beta, torch.full_like(g, log_decay)]
    exact = with_gradients(from_nothing(recurrent), *(x.double() for x in inputs))
    for ours, reference in zip(with_gradients(_CHOSEN, *inputs), exact, strict=True):
        assert ours.isfinite().all()
        assert (ours.double() - reference).abs().max() < 1e-5 * (1 + reference.abs().max())


def test_one_key_again_and_again_stays_exact() -> None:
    """The overlaps within a chunk are then all one: the hardest triangular system."""
    q, k, v, beta, g = drawn_rule(128, 1, dtype=torch.float32)
    inputs = [q, k[:, :1].expand_as(k), v, beta, 0 * g]
    exact = from_nothing(recurrent)(*(x.double() for x in inputs))
    assert (_CHOSEN(*inputs).double() - exact).abs().max() < 1e-5 * exact.abs().max()


def test_no_decay_equals_the_delta_rule_of_flash_linear_attention(compared: Compare) -> None:
    q, k, v, beta, g = drawn_rule(64, 1, dtype=torch.float32)
    naive = fla_naive("delta_rule")
    ours = _CHOSEN(q * 8**-0.5, k, v, beta, 0 * g)
    theirs = [x.transpose(1, 2) for x in (q, k, v, beta)]
    for form in (naive.delta_rule_recurrence, naive.delta_rule_chunkwise):
        compared(
            "mixer.deltanet",
            f"flash-linear-attention {form.__name__}",
            ours,
            form(*theirs)[0].transpose(1, 2),
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.parametrize("length", [1, 63, 100])
def test_decays_per_head_equal_flash_linear_attention_and_qwen3_next(compared: Compare, length: int) -> None:
    q, k, v, beta, g = drawn_rule(length, 1, dtype=torch.float32)
    naive = fla_naive("gated_delta_rule")
    ours = _CHOSEN(q * 8**-0.5, k, v, beta, g)
    theirs = {
        "flash-linear-attention naive_recurrent_gated_delta_rule": naive.naive_recurrent_gated_delta_rule(
            q, k, v, beta, g[..., 0]
        ),
        "flash-linear-attention naive_chunk_gated_delta_rule": naive.naive_chunk_gated_delta_rule(
            q, k, v, g[..., 0], beta
        ),
        "transformers torch_recurrent_gated_delta_rule of Qwen3-Next": torch_recurrent_gated_delta_rule(
            q, k, v, g[..., 0], beta, None, False
        ),
        "transformers torch_chunk_gated_delta_rule of Qwen3-Next": torch_chunk_gated_delta_rule(
            q, k, v, g[..., 0], beta
        ),
    }
    for name, (other, *_) in theirs.items():
        compared("mixer.gated_deltanet", name, ours, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [63, 128])
def test_decays_per_channel_equal_kda_of_flash_linear_attention(compared: Compare, length: int) -> None:
    q, k, v, beta, g = drawn_rule(length, 8, dtype=torch.float32)
    naive = fla_naive("kda")
    ours = _CHOSEN(q * 8**-0.5, k, v, beta, g)
    compared(
        "mixer.kda",
        "flash-linear-attention naive_recurrent_kda",
        ours,
        naive.naive_recurrent_kda(q, k, v, g, beta)[0],
        rtol=1e-4,
        atol=1e-5,
    )
    if length % 64 == 0:
        compared(
            "mixer.kda",
            "flash-linear-attention naive_chunk_kda",
            ours,
            naive.naive_chunk_kda(q, k, v, g, beta)[0],
            rtol=1e-4,
            atol=1e-5,
        )


def test_the_state_is_float32_under_bfloat16_values() -> None:
    q, k, v, beta, g = drawn_rule(300, 8, dtype=torch.float32)
    exact = dense(*(x.double() for x in (q, k, v, beta, g)))
    state = empty_state(BATCH, 4, 8, VALUE_DIM, v.device, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = chunked(q, k, v.bfloat16(), beta, g, state)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert (y.double() - exact).norm() < 1e-2 * exact.norm()


def test_the_choice_of_delta_rule_is_recorded() -> None:
    assert choose_delta_rule(DeltaNeeds()).record == "chunked (not dense: chunked comes first)"
    assert choose_delta_rule(DeltaNeeds(), "dense").run is dense
