"""The diagonal plus rank-one scan and RWKV-7: forms, reductions and references."""

from collections.abc import Callable

import pytest
import torch
from drawn_heads import BATCH, heads, with_gradients
from fla_naive import fla_naive
from reference_table import Compare
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from blocks.families import Context, Dims, PositionModule
from blocks.mixers.rwkv7 import FASTEST, Rwkv7, Rwkv7Module
from blocks.ops.delta_rule import dense as delta_dense
from blocks.ops.gated_scan import empty_state
from blocks.ops.gated_scan import quadratic as scan
from blocks.ops.rank_one_scan import CHUNK, RankOneNeeds, choose_rank_one_scan, chunked, recurrent

pytestmark = pytest.mark.slow

VALUE_DIM = 6
DIMS = Dims(d_model=24, d_ff=48, layers=1, train_len=128, max_len=128)
PLAIN = PositionModule()
RWKV7 = Rwkv7(heads=2, head_dim=8, rank=8)
_CHOSEN = choose_rank_one_scan(RankOneNeeds()).run


def drawn_scan(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values, removal keys a, b = rate * -a with rates in (0, 1), and log decays as RWKV-7 has them."""
    q, k, v = heads(length, dtype=dtype)
    removal, logits, rates = heads(length, seed=1, dtype=dtype)
    unit = F.normalize(removal, dim=-1)
    return [q, k, v[..., :VALUE_DIM], -unit, unit * rates.sigmoid(), -FASTEST * logits.sigmoid()]


def from_nothing(form: Callable[..., tuple[Tensor, Tensor]], **options: int) -> Callable[..., Tensor]:
    def run(*inputs: Tensor) -> Tensor:
        key_dim, v = inputs[0].shape[3], inputs[2]
        return form(*inputs, empty_state(v.shape[0], v.shape[2], key_dim, v.shape[3], v.device, v.dtype), **options)[0]

    return run


@pytest.mark.parametrize("length", [1, 37, 70])
def test_chunked_and_recurrent_forms_agree_with_gradients(length: int) -> None:
    inputs = drawn_scan(length)
    expected = with_gradients(from_nothing(recurrent), *inputs)
    for chunk in (7, 16, 64):
        for ours, reference in zip(with_gradients(from_nothing(chunked, chunk=chunk), *inputs), expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-8, atol=1e-9)


@pytest.mark.slow
def test_a_single_chunk_passes_gradcheck_in_float64() -> None:
    assert torch.autograd.gradcheck(
        from_nothing(chunked), [x[:1, :, :1].clone().requires_grad_() for x in drawn_scan(4)]
    )


@pytest.mark.parametrize("split", [1, 16, 69])
def test_the_state_carries_over_any_split(split: int) -> None:
    inputs = drawn_scan(70)
    nothing = empty_state(BATCH, 4, 8, VALUE_DIM, torch.device("cpu"), torch.float64)
    whole, final = chunked(*inputs, nothing)
    first, state = recurrent(*(x[:, :split] for x in inputs), nothing)
    second, rest = chunked(*(x[:, split:] for x in inputs), state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    torch.testing.assert_close(rest, final)


def test_nothing_removed_is_a_gated_scan() -> None:
    q, k, v, a, b, g = drawn_scan(50)
    torch.testing.assert_close(_CHOSEN(q, k, v, a, 0 * b, g), scan(q, k, v, g))


def test_no_decay_and_one_key_is_the_delta_rule() -> None:
    q, _, v, a, b, g = drawn_scan(50)
    unit, beta = -a, b[..., :1].abs().clamp(max=1)
    ours = _CHOSEN(q, beta * unit, v, a, beta * unit, 0 * g)
    torch.testing.assert_close(ours, delta_dense(q, unit, v, beta[..., 0], 0 * g))


@pytest.mark.parametrize("length", [32, 96])
def test_the_scan_equals_flash_linear_attention(compared: Compare, length: int) -> None:
    inputs = drawn_scan(length, dtype=torch.float32)
    naive = fla_naive("generalized_delta_rule/dplr")
    ours = _CHOSEN(inputs[0] * 8**-0.5, *inputs[1:])
    theirs = [x.transpose(1, 2) for x in inputs]
    for form in (naive.dplr_recurrence, naive.dplr_chunkwise):
        compared(
            "mixer.rwkv7",
            f"flash-linear-attention {form.__name__}",
            ours,
            form(*theirs)[0].transpose(1, 2),
            rtol=1e-4,
            atol=1e-5,
        )


def built() -> Rwkv7Module:
    module = RWKV7.build(DIMS)
    assert isinstance(module, Rwkv7Module)
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
    return module


def test_rwkv7_is_its_equations() -> None:
    """Peng et al. 2025, eq. 3-20, written out token by token in the paper's row-vector form."""
    module = built()
    x = torch.randn(1, 20, 24, generator=torch.Generator().manual_seed(0))
    previous = F.pad(x, (0, 0, 1, 0))[:, :-1]
    r_in, w_in, k_in, v_in, a_in, g_in = (torch.lerp(x, previous, mix) for mix in module.mix)
    r, key, v = module.query(r_in), module.key(k_in), module.value(v_in)
    w = torch.exp(-FASTEST * torch.sigmoid(module.decay_start + module.decay_up(module.decay_down(w_in).tanh())))
    a = torch.sigmoid(module.rate.up(module.rate.down(a_in)))
    gate = module.gate_up(module.gate_down(g_in).sigmoid())
    removal = key * module.removal
    replacement = torch.lerp(key, key * a, module.replacement)
    outputs = []
    for head in range(2):
        part = slice(8 * head, 8 * head + 8)
        state = torch.zeros(8, 8)
        rows = []
        for t in range(20):
            unit = F.normalize(removal[0, t, part], dim=0)
            transition = torch.diag(w[0, t, part]) - torch.outer(unit, a[0, t, part] * unit)
            state = state @ transition + torch.outer(v[0, t, part], replacement[0, t, part])
            rows.append(state @ r[0, t, part])
        y = torch.stack(rows)
        normed = F.layer_norm(y, (8,), module.norm.gain[head], module.shift[head], eps=1e-5)
        bonus = (r[0, :, part] * module.bonus[head] * replacement[0, :, part]).sum(-1, keepdim=True)
        outputs.append(normed + bonus * v[0, :, part])
    expected = module.out(gate * torch.cat(outputs, dim=-1)[None])
    torch.testing.assert_close(module(x, PLAIN, Context()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [64, 128])
def test_declared_flops_are_the_counted_products_and_the_solve(length: int) -> None:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        RWKV7.build(DIMS)(torch.ones(1, length, 24), PLAIN, Context())
    solve = 2.0 * (CHUNK - 1) * (8 + 8)
    assert RWKV7.flops_per_token(DIMS, length, causal=False) - solve == counter.get_total_flops() / length
    assert RWKV7.flops_per_token(DIMS, length, causal=True) < RWKV7.flops_per_token(DIMS, length, causal=False)
