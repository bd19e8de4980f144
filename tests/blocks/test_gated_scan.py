"""Decayed linear attention: three forms of one function, its reductions, its extremes, and its references."""

from collections.abc import Callable

import pytest
import torch
from drawn_heads import BATCH, heads, with_gradients
from fla_naive import fla_naive
from reference_table import Compare
from torch import Tensor
from torch.nn import functional as F

from blocks.ops.gated_scan import (
    ScanNeeds,
    choose_gated_scan,
    chunked,
    empty_state,
    quadratic,
    recurrent,
)
from blocks.ops.linear_attention import quadratic as linear_quadratic

pytestmark = pytest.mark.slow

VALUE_DIM = 6


def scanned(length: int, channels: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values of another width, and log decays per head (channels 1) or per channel."""
    q, k, v = heads(length, seed=seed, dtype=dtype)
    draws = torch.randn(BATCH, length, 4, channels, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    return [q, k, v[..., :VALUE_DIM], F.logsigmoid(2 * draws)]


def from_nothing(form: Callable[..., tuple[Tensor, Tensor]], **options: int) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return form(q, k, v, g, empty_state(BATCH, 4, q.shape[3], v.shape[3], v.device, v.dtype), **options)[0]

    return run


@pytest.mark.parametrize("channels", [1, 8])
@pytest.mark.parametrize("length", [1, 37, 70])
def test_quadratic_chunked_and_recurrent_forms_agree_with_gradients(length: int, channels: int) -> None:
    inputs = scanned(length, channels)
    expected = with_gradients(from_nothing(recurrent), *inputs)
    for form in (quadratic, *(from_nothing(chunked, chunk=chunk) for chunk in (7, 16, 64))):
        for ours, reference in zip(with_gradients(form, *inputs), expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("channels", [1, 8])
def test_quadratic_form_passes_gradcheck_in_float64(channels: int) -> None:
    assert torch.autograd.gradcheck(quadratic, [x[:1, :, :1].clone().requires_grad_() for x in scanned(4, channels)])


@pytest.mark.parametrize("channels", [1, 8])
@pytest.mark.parametrize("split", [1, 5, 64, 69])
def test_the_state_carries_over_any_split(split: int, channels: int) -> None:
    inputs = scanned(70, channels)
    nothing = empty_state(BATCH, 4, 8, VALUE_DIM, torch.device("cpu"), torch.float64)
    whole, final = chunked(*inputs, nothing)
    first, state = recurrent(*(x[:, :split] for x in inputs), nothing)
    second, rest = chunked(*(x[:, split:] for x in inputs), state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    torch.testing.assert_close(rest, final)


@pytest.mark.parametrize("channels", [1, 8])
def test_decays_of_one_give_linear_attention_without_denominator(channels: int) -> None:
    q, k, v, g = scanned(50, channels)
    y = _CHOSEN(q, k, v, torch.zeros_like(g))
    visible = torch.ones(50, 50, dtype=torch.float64).tril()
    torch.testing.assert_close(y, torch.einsum("bthk,bshk,ts,bshv->bthv", q, k, visible, v))
    ones = torch.full_like(q, q.shape[-1] ** -0.5)
    counts = torch.arange(1, 51, dtype=q.dtype)[None, :, None, None]
    torch.testing.assert_close(y, linear_quadratic(q, k, v, ones, ones) * counts)


def test_decays_equal_over_channels_are_decays_per_head() -> None:
    q, k, v, g = scanned(50, 1)
    torch.testing.assert_close(_CHOSEN(q, k, v, g.expand_as(q)), _CHOSEN(q, k, v, g))


def test_a_decay_of_zero_forgets_everything() -> None:
    q, k, v, g = scanned(50, 8)
    g[:, 20] = -1e4
    whole, rest = _CHOSEN(q, k, v, g), _CHOSEN(q[:, 20:], k[:, 20:], v[:, 20:], g[:, 20:])
    torch.testing.assert_close(whole[:, 20:], rest)


@pytest.mark.parametrize("channels", [1, 8])
@pytest.mark.parametrize("log_decay", [-1e-6, -5.0, -200.0, -1e4])
def test_extreme_decays_neither_overflow_nor_lose_gradients(log_decay: float, channels: int) -> None:
    q, k, v, g = scanned(200, channels, dtype=torch.float32)
    inputs = [q, k, v, torch.full_like(g, log_decay)]
    exact = with_gradients(from_nothing(recurrent), *(x.double() for x in inputs))
    for ours, reference in zip(with_gradients(_CHOSEN, *inputs), exact, strict=True):
        assert ours.isfinite().all()
        assert (ours.double() - reference).abs().max() < 1e-5 * (1 + reference.abs().max())


@pytest.mark.parametrize("channels", [1, 8])
def test_a_clean_slate_costs_no_digits_afterwards(channels: int) -> None:
    """Running sums of -1e4 would leave three digits of the slow decays that follow."""
    q, k, v, g = scanned(60, channels, dtype=torch.float32)
    g = 1e-3 * g
    g[:, 3::16] = -1e4
    exact = from_nothing(recurrent)(*(x.double() for x in (q, k, v, g)))
    for form in (quadratic, _CHOSEN):
        assert (form(q, k, v, g).double() - exact).abs().max() < 1e-6 * exact.abs().max()


@pytest.mark.parametrize("length", [1, 63, 100])
def test_retention_equals_flash_linear_attention(compared: Compare, length: int) -> None:
    q, k, v = heads(length)
    theirs = fla_naive("retention").naive_retention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    log_decay = torch.log1p(-(2.0 ** (-5 - torch.arange(4.0))))[None, None, :, None].expand(BATCH, length, 4, 1)
    compared(
        "mixer.retention",
        "flash-linear-attention naive_retention",
        _CHOSEN(q * 8**-0.5, k, v, log_decay),
        theirs,
        rtol=1e-4,
        atol=1e-5,
    )


def test_decays_per_head_equal_simple_gla_of_flash_linear_attention(compared: Compare) -> None:
    q, k, v, g = scanned(100, 1, dtype=torch.float32)
    naive = fla_naive("simple_gla")
    ours = _CHOSEN(q * 8**-0.5, k, v, g)
    for theirs in (naive.naive_recurrent_simple_gla, naive.naive_parallel_simple_gla, naive.naive_chunk_simple_gla):
        compared(
            "mixer.mamba2",
            f"flash-linear-attention {theirs.__name__}",
            ours,
            theirs(q, k, v, g[..., 0])[0],
            rtol=1e-4,
            atol=1e-5,
        )


def test_decays_per_channel_equal_gla_of_flash_linear_attention(compared: Compare) -> None:
    q, k, v, g = scanned(100, 8, dtype=torch.float32)
    theirs, _ = fla_naive("gla").naive_recurrent_gla(q, k, v, g)
    compared(
        "mixer.gla",
        "flash-linear-attention naive_recurrent_gla",
        _CHOSEN(q * 8**-0.5, k, v, g),
        theirs,
        rtol=1e-4,
        atol=1e-5,
    )


def test_the_state_is_float32_under_bfloat16_values() -> None:
    q, k, v, g = scanned(300, 8, dtype=torch.float32)
    exact = quadratic(*(x.double() for x in (q, k, v, g)))
    state = empty_state(BATCH, 4, 8, VALUE_DIM, v.device, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = chunked(q, k, v.bfloat16(), g, state)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert (y.double() - exact).norm() < 1e-2 * exact.norm()


def test_the_choice_of_gated_scan_is_recorded() -> None:
    assert choose_gated_scan(ScanNeeds()).record == "chunked (not quadratic: chunked comes first)"
    assert choose_gated_scan(ScanNeeds(), "quadratic").run is quadratic


_CHOSEN = choose_gated_scan(ScanNeeds()).run
