"""Ops: every backend against its reference, outputs and gradients; masks, padding, extremes, choice of backend."""

import math
from collections.abc import Callable

import pytest
import torch
from drawn_heads import BATCH, KEY_DIM, heads, with_gradients
from reference_table import Compare
from torch import Tensor
from torch.nn import functional as F

from blocks.ops.attention import (
    AttentionNeeds,
    attention_weights,
    choose_attention,
    entropy,
    reference_attention,
    sdpa_attention,
)
from blocks.ops.backends import Backend, BackendError, choose
from blocks.ops.short_convolution import short_convolution


def padding(length: int, left: int, right: int) -> Tensor:
    live = torch.ones(BATCH, length, dtype=torch.bool)
    live[0, :left] = False
    live[1, length - right :] = False
    return live


@pytest.mark.parametrize("length", [1, 63, 100])
@pytest.mark.parametrize("n_kv", [1, 2, 4])
@pytest.mark.parametrize("case", ["plain", "window", "bias", "padding", "all"])
def test_sdpa_equals_the_reference_with_gradients(length: int, n_kv: int, case: str) -> None:
    window = 7 if case in ("window", "all") else None
    live = padding(length, left=length // 3, right=length // 4) if case in ("padding", "all") else None
    q, k, v = heads(length, 4, n_kv)
    biased = [torch.randn(4, length, length, generator=torch.Generator().manual_seed(1))]
    inputs = [q, k, v, *(biased if case in ("bias", "all") else [])]

    def run(op: Callable[..., Tensor]) -> list[Tensor]:
        return with_gradients(
            lambda q, k, v, bias=None: op(q, k, v, scale=0.3, window=window, bias=bias, live=live), *inputs
        )

    for ours, reference in zip(run(sdpa_attention), run(reference_attention), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", [reference_attention, sdpa_attention])
@pytest.mark.parametrize("window", [None, 5])
def test_last_queries_alone_equal_the_last_rows_of_the_full_pass(op: Callable[..., Tensor], window: int | None) -> None:
    q, k, v = heads(20, 4, 2)
    full = op(q, k, v, scale=0.3, window=window)
    for n_query in (1, 3, 19):
        part = op(q[:, -n_query:], k, v, scale=0.3, window=window)
        torch.testing.assert_close(part, full[:, -n_query:], rtol=1e-5, atol=1e-6)


def test_reference_passes_gradcheck_in_float64() -> None:
    q, k, v = heads(6, 4, 2, dtype=torch.float64)
    bias = torch.randn(4, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    live = padding(6, left=2, right=1)
    inputs = [x.requires_grad_() for x in (q, k, v, bias)]
    assert torch.autograd.gradcheck(
        lambda q, k, v, bias: reference_attention(q, k, v, scale=0.3, window=4, bias=bias, live=live), inputs
    )


def test_weights_sum_to_one_and_see_the_window_only() -> None:
    q, k, _ = heads(12)
    weights = attention_weights(q, k, scale=0.3, window=4)
    torch.testing.assert_close(weights.sum(-1), torch.ones(BATCH, 4, 12))
    seen = (weights[0, 0] > 0).sum(-1)
    assert seen.tolist() == [1, 2, 3] + [4] * 9


@pytest.mark.parametrize("op", [reference_attention, sdpa_attention])
def test_query_head_is_served_by_the_floor_of_its_share(op: Callable[..., Tensor]) -> None:
    q, k, v = heads(10, 4, 2)
    grouped = op(q, k, v, scale=0.3)
    spread = op(q, k.repeat_interleave(2, dim=2), v.repeat_interleave(2, dim=2), scale=0.3)
    tiled = op(q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1), scale=0.3)
    torch.testing.assert_close(grouped, spread, rtol=1e-5, atol=1e-6)
    assert (grouped - tiled).abs().max() > 0.5


@pytest.mark.parametrize("op", [reference_attention, sdpa_attention])
def test_padding_gives_zero_rows_and_finite_gradients(op: Callable[..., Tensor]) -> None:
    live = padding(9, left=9, right=2)
    y, *gradients = with_gradients(lambda q, k, v: op(q, k, v, scale=0.3, live=live), *heads(9))
    assert y[0].eq(0).all()
    assert y[1, -2:].eq(0).all()
    assert y[1, :-2].ne(0).any(-1).all()
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("op", [reference_attention, sdpa_attention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", [False, True])
def test_logits_of_ten_thousand_stay_finite(op: Callable[..., Tensor], dtype: torch.dtype, masked: bool) -> None:
    q, k, v = heads(16, dtype=dtype)
    q, k = 35 * q.sign(), 35 * k.sign()
    assert (torch.einsum("bthk,bshk->bhts", q.float(), k.float())).abs().max() >= 9800
    live = padding(16, left=3, right=3) if masked else None
    y, *gradients = with_gradients(
        lambda q, k, v: op(q, k, v, scale=1.0, window=5 if masked else None, live=live), q, k, v
    )
    assert y.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_reference_in_bfloat16_errs_no_more_than_three_times_sdpa() -> None:
    wide = heads(64, 4, 2, dtype=torch.float64)
    exact = reference_attention(*wide, scale=KEY_DIM**-0.5)
    narrow = [x.bfloat16() for x in wide]
    errors = [
        (op(*narrow, scale=KEY_DIM**-0.5).double() - exact).abs().max() for op in (reference_attention, sdpa_attention)
    ]
    assert errors[0] <= 3 * errors[1]


def test_dropout_drops_the_asked_share_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    q, k, _ = heads(200)
    v = torch.ones(BATCH, 200, 4, KEY_DIM)
    y = reference_attention(q * 0, k, v, scale=1.0, dropout=0.25)
    assert abs(y[:, 100:].mean().item() - 1.0) < 0.01
    first = y[:, 0, :, 0]
    torch.testing.assert_close(first.unique(), torch.tensor([0.0, 4 / 3]))
    assert not y[:, 50:].eq(1).all()


def test_entropy_of_uniform_rows_is_the_log_of_their_count_and_has_a_finite_gradient() -> None:
    q, k, _ = heads(8)
    q = (q * 0).requires_grad_()
    rows = entropy(attention_weights(q, k, scale=1.0))
    torch.testing.assert_close(rows[0, 0], torch.arange(1, 9).float().log())
    sharp = q + 1e4
    (gradient,) = torch.autograd.grad(entropy(attention_weights(sharp, k, scale=1.0)).sum(), q)
    assert gradient.isfinite().all()


def test_entropy_gradient_passes_gradcheck_next_to_masked_zeros() -> None:
    q, k, _ = heads(5, dtype=torch.float64)
    inputs = [q.requires_grad_(), k.requires_grad_()]
    assert torch.autograd.gradcheck(lambda q, k: entropy(attention_weights(q, k, scale=0.3)), inputs)


def test_the_choice_of_attention_is_recorded_with_its_reasons() -> None:
    assert choose_attention(AttentionNeeds()).record == "sdpa (not reference: sdpa comes first)"
    chosen = choose_attention(AttentionNeeds(weights=True))
    assert chosen.record == "reference (not sdpa: fused kernels return no attention weights)"
    assert chosen.run is reference_attention
    assert choose_attention(AttentionNeeds(), "reference").passed_over == {"sdpa": "reference was named"}


def test_a_named_backend_that_cannot_run_is_refused() -> None:
    with pytest.raises(BackendError, match=r"'sdpa' cannot be used: fused kernels .*backends that can: reference"):
        choose_attention(AttentionNeeds(weights=True), "sdpa")
    with pytest.raises(BackendError, match=r"'spda' is no known backend; did you mean 'sdpa'"):
        choose_attention(AttentionNeeds(), "spda")


def test_an_op_that_nothing_can_run_says_why() -> None:
    backends = [Backend(name=name, run=heads, refuses=lambda needs: f"no {needs}") for name in ("fast", "slow")]
    with pytest.raises(BackendError, match="mixing: no backend can run: fast: no GPU; slow: no GPU"):
        choose("mixing", backends, "GPU")


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 33])
def test_short_convolution_equals_a_depthwise_convolution(compared: Compare, width: int, length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, taps, history = (
        torch.randn(*shape, generator=generator) for shape in ((2, length, 6), (6, width), (2, width - 1, 6))
    )
    ours = with_gradients(short_convolution, x, taps, history)

    def conv1d(x: Tensor, taps: Tensor, history: Tensor) -> Tensor:
        joined = torch.cat([history, x], dim=1).transpose(1, 2)
        return F.conv1d(joined, taps[:, None], groups=6).transpose(1, 2)

    for a, b in zip(ours, with_gradients(conv1d, x, taps, history), strict=True):
        compared("premixer.short_conv", "torch conv1d(groups=channels), with gradients", a, b, rtol=1e-5, atol=1e-5)


def test_short_convolution_of_one_tap_of_one_is_the_identity() -> None:
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    assert short_convolution(x, torch.ones(3, 1), x[:, :0]).equal(x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", ["plain", "window", "bias", "padding"])
@pytest.mark.parametrize("n_kv", [1, 4])
@pytest.mark.parametrize("length", [63, 256])
def test_sdpa_on_cuda_equals_the_reference_in_float64(case: str, n_kv: int, length: int) -> None:
    wide = [x.cuda() for x in heads(length, 4, n_kv, dtype=torch.float64)]
    bias = torch.randn(4, length, length, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).cuda()
    options = {
        "plain": {},
        "window": {"window": 17},
        "bias": {"bias": bias},
        "padding": {"live": padding(length, left=length // 3, right=5).cuda()},
    }[case]
    scale = 1 / math.sqrt(KEY_DIM)
    exact = with_gradients(lambda q, k, v: reference_attention(q, k, v, scale=scale, **options), *wide)
    narrow = [x.bfloat16() for x in wide]
    ours = with_gradients(lambda q, k, v: sdpa_attention(q, k, v, scale=scale, **options), *narrow)
    for a, b in zip(ours, exact, strict=True):
        assert (a.double() - b).norm() / b.norm() < 2e-2
