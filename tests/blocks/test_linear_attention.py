"""Linear attention: three forms of one function, its bounds, its empty denominators, and its sums."""

from collections.abc import Callable

import pytest
import torch
from drawn_heads import BATCH, KEY_DIM, heads, with_gradients
from torch import Tensor
from torch.nn import functional as F

from blocks.ops.linear_attention import (
    LinearNeeds,
    choose_linear_attention,
    chunked,
    empty_sums,
    over_all,
    packed,
    quadratic,
    recurrent,
)


def features(length: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Numerator features, values and denominator features of linear attention."""
    q, k, v = heads(length, seed=seed, dtype=dtype)
    a, b = F.elu(q) + 1, F.elu(k) + 1
    return [a.roll(1, -1), b.roll(1, -1), v, a, b]


def from_nothing(form: Callable[..., tuple[Tensor, object]], **options: int) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        sums = empty_sums(v.shape[0], v.shape[2], q.shape[3], v.shape[3], v.device, v.dtype)
        return form(q, k, v, a, b, sums, **options)[0]

    return run


@pytest.mark.parametrize("length", [1, 63, 100])
@pytest.mark.parametrize("chunk", [7, 16, 64])
def test_quadratic_chunked_and_recurrent_forms_agree_with_gradients(length: int, chunk: int) -> None:
    inputs = features(length)
    expected = with_gradients(quadratic, *inputs)
    for form in (from_nothing(chunked, chunk=chunk), from_nothing(recurrent)):
        for ours, reference in zip(with_gradients(form, *inputs), expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-10)


def test_quadratic_form_passes_gradcheck_in_float64() -> None:
    assert torch.autograd.gradcheck(quadratic, [x.requires_grad_() for x in features(4)])


@pytest.mark.parametrize("split", [1, 5, 64, 69])
def test_sums_carry_over_any_split(split: int) -> None:
    inputs = features(70)
    whole, (sum_kv, sum_b) = chunked(
        *inputs, empty_sums(BATCH, 4, KEY_DIM, KEY_DIM, torch.device("cpu"), torch.float64)
    )
    first, sums = recurrent(
        *(x[:, :split] for x in inputs), empty_sums(BATCH, 4, KEY_DIM, KEY_DIM, torch.device("cpu"), torch.float64)
    )
    second, (rest_kv, rest_b) = chunked(*(x[:, split:] for x in inputs), sums)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    torch.testing.assert_close(rest_kv, sum_kv)
    torch.testing.assert_close(rest_b, sum_b)


def test_elu_features_keep_the_output_in_the_convex_hull_of_the_values() -> None:
    _, _, v, a, b = features(50)
    y = quadratic(a, b, v, a, b)
    lowest, highest = v.cummin(1).values, v.cummax(1).values
    assert (y >= lowest - 1e-12).all()
    assert (y <= highest + 1e-12).all()


def test_an_empty_denominator_gives_zero_and_finite_gradients() -> None:
    _, _, v, a, b = features(6)
    a[:, :3, :, ::2], a[:, :3, :, 1::2], b[:, :3, :, 1::2] = 0, 1, 0
    for form in (quadratic, from_nothing(chunked, chunk=4), from_nothing(recurrent)):
        y, *gradients = with_gradients(form, a, b, v, a, b)
        assert y[:, :3].eq(0).all()
        assert y[:, 3:].ne(0).all()
        assert all(gradient.isfinite().all() for gradient in gradients)


SEGMENTS = torch.tensor([[0] * 5 + [1] * 4]).expand(BATCH, 9)
FORMS: dict[str, Callable[..., Tensor]] = {
    "quadratic": quadratic,
    "chunked": from_nothing(chunked, chunk=4),
    "recurrent": from_nothing(recurrent),
    "packed": lambda *inputs: packed(*inputs, SEGMENTS, chunk=4),
    "over_all": over_all,
    "over_all packed": lambda *inputs: over_all(*inputs, SEGMENTS),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_common_factor_on_queries_or_keys_changes_nothing(form: str) -> None:
    """A power of two is exact. Rectified features of a small model at its start are as small as this."""
    q, k, v = heads(9)
    a, b = F.relu(q), F.relu(k)
    expected = FORMS[form](a, b, v, a, b)
    assert expected.ne(0).any()
    small_a, small_b = a * 2.0**-40, b * 2.0**-40
    assert torch.equal(FORMS[form](small_a, small_b, v, small_a, small_b), expected)


def test_the_first_token_reads_its_own_value_however_small_its_weight() -> None:
    """Products of signed features cancel: the query is orthogonal to the key up to a thousandth."""
    a, b = torch.tensor([1.0, 1.0, -1.0, -0.999]), torch.tensor([0.9, 1.1, 1.3, 0.7])
    v = torch.randn(1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    q, k = a[None, None, None] / 3, b[None, None, None] / 7
    for form in (quadratic, from_nothing(chunked), from_nothing(recurrent)):
        torch.testing.assert_close(form(q, k, v, q, k), v, rtol=1e-6, atol=0)


def test_sums_are_float32_under_bfloat16_values() -> None:
    inputs = features(300, dtype=torch.float32)
    exact = quadratic(*(x.double() for x in inputs))
    inputs[2] = inputs[2].bfloat16()
    sums = empty_sums(BATCH, 4, KEY_DIM, KEY_DIM, torch.device("cpu"), torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y, (sum_kv, sum_b) = chunked(*inputs, sums)
    assert (y.dtype, sum_kv.dtype, sum_b.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert (y.double() - exact).abs().max() < 2e-2


def test_the_choice_of_linear_attention_is_recorded() -> None:
    assert choose_linear_attention(LinearNeeds()).record == "chunked (not quadratic: chunked comes first)"
    assert choose_linear_attention(LinearNeeds(), "quadratic").run is quadratic
