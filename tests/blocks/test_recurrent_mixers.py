"""Recurrent mixers: their definitions, reductions, references, states and FLOPs."""

import dataclasses

import pytest
import torch
from einops import rearrange
from fla_naive import fla_naive
from reference_table import Compare
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from blocks.families import AbstractMixer, Context, Dims, Hook, MixerModule, PositionModule
from blocks.mixers.deltanet import Deltanet
from blocks.mixers.gated_deltanet import GatedDeltanet
from blocks.mixers.gla import TEMPERATURE, Gla
from blocks.mixers.hgrn2 import Hgrn2
from blocks.mixers.kda import Kda
from blocks.mixers.mamba2 import Mamba2
from blocks.mixers.recurrence import NORM_EPS, StepDecay
from blocks.mixers.retention import Retention
from blocks.ops.gated_scan import quadratic as scan
from blocks.positions.rotary import Rotary

pytestmark = pytest.mark.slow

DIMS = Dims(d_model=24, d_ff=48, layers=1, train_len=256, max_len=256)
PLAIN = PositionModule()
CPU = torch.device("cpu")
LENGTH = 63

RETENTION = Retention(heads=2, head_dim=8)
GLA = Gla(heads=2, head_dim=8)
HGRN2 = Hgrn2(heads=2, head_dim=8)
MAMBA2 = Mamba2(heads=4, head_dim=12, state_dim=16)
DELTANET = Deltanet(heads=2, head_dim=8)
GATED_DELTANET = GatedDeltanet(heads=2, head_dim=8)
KDA = Kda(heads=2, head_dim=8)
SCANS = (RETENTION, GLA, HGRN2, MAMBA2)
DELTAS = (DELTANET, GATED_DELTANET, KDA)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def built(mixer: AbstractMixer) -> MixerModule:
    """The module with every parameter drawn, so that nothing stays at a neutral start."""
    module = mixer.build(DIMS)
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter += 0.2 * draw(*parameter.shape, seed=index)
    return module


def test_retention_is_its_parallel_form_under_group_norm(compared: Compare) -> None:
    module = built(RETENTION)
    x = draw(2, LENGTH, 24)
    q, k, v = module.project(x)
    mixed = fla_naive("retention").naive_retention(*(y.transpose(1, 2) for y in (q, k, v)))
    norm = nn.GroupNorm(2, 16, eps=NORM_EPS, affine=False)
    normed = norm(rearrange(mixed, "B H T V -> (B T) (H V)")).view(2, LENGTH, 16) * module.output.norm.gain.flatten()
    expected = module.output.out(F.silu(module.output.gate(x)) * normed)
    compared(
        "mixer.retention",
        "flash-linear-attention naive_retention, under torch nn.GroupNorm",
        module(x, PLAIN, Context()),
        expected,
        rtol=1e-4,
        atol=1e-5,
    )


def test_gla_is_its_recurrence_under_sixteenth_root_gates(compared: Compare) -> None:
    module = built(GLA)
    x = draw(2, LENGTH, 24)
    q, k, v = module.project(x)
    gate = torch.sigmoid(module.gate.logits(x)).pow(1 / TEMPERATURE).view(2, LENGTH, 2, 8)
    mixed, _ = fla_naive("gla").naive_recurrent_gla(q, k, v[..., :8], gate.log())
    rest, _ = fla_naive("gla").naive_recurrent_gla(q, k, v[..., 8:], gate.log())
    expected = module.output(torch.cat([mixed, rest], dim=-1), x)
    compared(
        "mixer.gla",
        "flash-linear-attention naive_recurrent_gla",
        module(x, PLAIN, Context()),
        expected,
        rtol=1e-4,
        atol=1e-5,
    )


def test_gla_with_open_gates_is_linear_attention_without_denominator() -> None:
    module = built(GLA)
    module.gate.logits.up.bias.data += 1e4
    x = draw(2, LENGTH, 24)
    q, k, v = module.project(x)
    mixed = torch.einsum("bthk,bshk,ts,bshv->bthv", q * 8**-0.5, k, torch.ones(LENGTH, LENGTH).tril(), v)
    torch.testing.assert_close(module(x, PLAIN, Context()), module.output(mixed, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("floor", [0.0, 0.5])
def test_hgrn2_is_gla_with_keys_tied_to_the_gates(compared: Compare, floor: float) -> None:
    module = built(dataclasses.replace(HGRN2, forget_floor=floor))
    x = draw(2, LENGTH, 24)
    q, logits, v = module.project(x)
    keep = floor + (1 - floor) * torch.sigmoid(logits)
    mixed, _ = fla_naive("gla").naive_recurrent_gla(F.silu(q) * 8**0.5, 1 - keep, v, keep.log())
    compared(
        "mixer.hgrn2",
        "flash-linear-attention naive_recurrent_gla",
        module(x, PLAIN, Context()),
        module.output(mixed, x),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("length", [1, 63, 100])
def test_mamba2_equals_transformers(compared: Compare, length: int) -> None:
    module = built(MAMBA2)
    config = Mamba2Config(
        num_heads=4,
        head_dim=12,
        hidden_size=24,
        expand=2,
        state_size=16,
        n_groups=1,
        conv_kernel=4,
        use_conv_bias=False,
        chunk_size=16,
        layer_norm_epsilon=NORM_EPS,
        num_hidden_layers=1,
    )
    theirs = Mamba2Mixer(config, layer_idx=0).eval()
    parts = (module.gate, module.value, module.key, module.query, module.step_size)
    theirs.load_state_dict(
        {
            "in_proj.weight": torch.cat([part.weight for part in parts]),
            "conv1d.weight": module.convolve.taps[:, None],
            "dt_bias": module.decay.step_bias.flatten(),
            "A_log": module.decay.log_rate,
            "D": module.skip,
            "norm.weight": module.norm.gain.flatten(),
            "out_proj.weight": module.out.weight,
        }
    )
    x = draw(2, length, 24)
    compared("mixer.mamba2", "transformers Mamba2Mixer", module(x, PLAIN, Context()), theirs(x), rtol=1e-4, atol=1e-5)


def test_mamba2_without_decay_or_skip_is_linear_attention_of_scaled_keys() -> None:
    module = built(dataclasses.replace(MAMBA2, conv_width=1))
    module.decay.log_rate.data.fill_(-1e4)
    module.skip.data.zero_()
    x = draw(2, LENGTH, 24)
    (c, b, v, log_decay), _ = module._inputs(x, {}, None)
    assert log_decay.eq(0).all()
    mixed = torch.einsum("bthk,bshk,ts,bshv->bthv", c, b, torch.ones(LENGTH, LENGTH).tril(), v)
    torch.testing.assert_close(module(x, PLAIN, Context()), module._join(mixed, v, x), rtol=1e-4, atol=1e-5)


def test_deltanet_is_its_recurrence_over_unit_queries_and_keys(compared: Compare) -> None:
    module = built(DELTANET)
    x = draw(2, LENGTH, 24)
    projected = torch.cat(module.project.flat(x), dim=-1).transpose(1, 2)
    convolved = F.conv1d(F.pad(projected, (3, 0)), module.convolve.taps[:, None], groups=48)
    q, k, v = F.silu(convolved).transpose(1, 2).reshape(2, LENGTH, 3, 2, 8).unbind(2)
    inputs = (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, torch.sigmoid(module.strength(x))[..., None])
    mixed, _ = fla_naive("delta_rule").delta_rule_recurrence(*(y.transpose(1, 2) for y in inputs))
    compared(
        "mixer.deltanet",
        "flash-linear-attention delta_rule_recurrence",
        module(x, PLAIN, Context()),
        module.output(mixed.transpose(1, 2), x),
        rtol=1e-4,
        atol=1e-5,
    )


def test_gated_deltanet_that_forgets_nothing_is_deltanet() -> None:
    gated, plain = built(dataclasses.replace(GATED_DELTANET, value_factor=1)), built(DELTANET)
    gated.decay.decay.log_rate.data.fill_(-1e4)
    for name in ("project", "convolve", "strength"):
        setattr(gated, name, getattr(plain, name))
    x = draw(2, LENGTH, 24)
    gated.output = plain.output
    assert torch.equal(gated(x, PLAIN, Context()), plain(x, PLAIN, Context()))


def test_kda_whose_channels_fade_alike_is_gated_deltanet() -> None:
    channels, heads = built(KDA), built(dataclasses.replace(GATED_DELTANET, value_factor=1))
    with torch.no_grad():
        channels.decay.logits.up.weight.zero_()
        heads.decay.logits.weight.zero_()
        channels.decay.decay.step_bias.copy_(heads.decay.decay.step_bias.expand(2, 8))
        channels.decay.decay.log_rate.copy_(heads.decay.decay.log_rate)
    for name in ("project", "convolve", "strength", "output"):
        setattr(channels, name, getattr(heads, name))
    x = draw(2, LENGTH, 24)
    torch.testing.assert_close(channels(x, PLAIN, Context()), heads(x, PLAIN, Context()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("overshoot", "strongest"), [(False, 1.0), (True, 2.0)])
def test_negative_eigenvalues_double_the_strength(overshoot: bool, strongest: float) -> None:
    module = built(dataclasses.replace(DELTANET, negative_eigenvalues=overshoot))
    strength = module._inputs(100 * draw(2, LENGTH, 24), {}, PLAIN, 0, None)[0][3]
    assert strength.max().item() == pytest.approx(strongest)
    assert strength.min() >= 0


def test_rotation_keeps_the_keys_of_the_delta_rule_at_unit_length() -> None:
    module = built(DELTANET)
    position = Rotary().build(DIMS, DELTANET.head_shape())
    k = module._inputs(draw(2, LENGTH, 24), {}, position, 0, None)[0][1]
    torch.testing.assert_close(k.norm(dim=-1), torch.ones(2, LENGTH, 2))


@torch.no_grad()
def shifted(mixer: AbstractMixer) -> float:
    """How much rotated outputs change when the sequence starts later."""
    module, x = built(mixer), draw(1, LENGTH, 24)
    position = Rotary().build(DIMS, mixer.head_shape())
    live = torch.ones(1, LENGTH + 9, dtype=torch.bool)
    live[:, :9] = False
    late = module(torch.cat([draw(1, 9, 24, seed=1), x], dim=1), position, Context(live=live))[:, 9:]
    return float((late - module(x, position, Context())).abs().max())


def test_rotation_knows_distances_alone_only_where_a_head_has_one_decay() -> None:
    """Decays per channel do not commute with the rotation of channel pairs, so those mixers do not offer it."""
    for mixer in (RETENTION, DELTANET, GATED_DELTANET):
        assert Hook.ROTATE in mixer.offers
        assert shifted(mixer) < 1e-5
    for mixer in (GLA, HGRN2, KDA):
        assert Hook.ROTATE not in mixer.offers
        assert shifted(mixer) > 1e-3


def test_steps_start_between_a_thousandth_and_a_tenth() -> None:
    decay = StepDecay(4, 8)
    steps = decay.steps(torch.zeros(1, 1, 4, 8))
    assert steps.min().item() == pytest.approx(1e-3, rel=1e-4)
    assert steps.max().item() == pytest.approx(1e-1, rel=1e-4)
    torch.testing.assert_close(decay(torch.zeros(1, 1, 4, 8)), -steps * torch.linspace(1, 16, 4)[:, None])


@pytest.mark.parametrize(
    ("mixer", "numbers"),
    [
        (RETENTION, 2 * 8 * 8),
        (GLA, 2 * 8 * 16),
        (HGRN2, 2 * 8 * 8),
        (MAMBA2, 4 * 16 * 12 + 3 * (48 + 2 * 16)),
        (DELTANET, 2 * 8 * 8 + 3 * 48),
        (GATED_DELTANET, 2 * 8 * 16 + 3 * 64),
        (KDA, 2 * 8 * 8 + 3 * 48),
    ],
)
def test_the_state_never_grows(mixer: AbstractMixer, numbers: int) -> None:
    module = built(mixer)
    state = module.empty_state(1, CPU, torch.float32)
    for start in range(4):
        assert sum(tensor.numel() for tensor in state.values()) == numbers
        _, state = module.step(draw(1, 1, 24), state, PLAIN, start)


def counted_flops(mixer: AbstractMixer, length: int) -> float:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        mixer.build(DIMS)(draw(1, length, 24), PLAIN, Context())
    return counter.get_total_flops() / length


@pytest.mark.parametrize("length", [64, 192])
@pytest.mark.parametrize("mixer", [*SCANS, *DELTAS])
def test_declared_flops_are_the_counted_products_and_the_solve(mixer: AbstractMixer, length: int) -> None:
    """The counter sees matrix products alone: neither the taps nor the triangular solves."""
    mixer = dataclasses.replace(mixer, conv_width=1) if hasattr(mixer, "conv_width") else mixer
    solve = 0.0
    if mixer.kind in ("deltanet", "gated_deltanet", "kda"):
        chunk = 8 if mixer.kind == "kda" else 32
        value_dim = 16 if mixer.kind == "gated_deltanet" else 8
        solve = 2.0 * (chunk - 1) * (8 + value_dim)
    assert mixer.flops_per_token(DIMS, length, causal=False) - solve == counted_flops(mixer, length)


@pytest.mark.parametrize("mixer", [*SCANS, *DELTAS])
def test_flops_per_token_do_not_grow_with_length(mixer: AbstractMixer) -> None:
    assert mixer.flops_per_token(DIMS, 256, True) == mixer.flops_per_token(DIMS, 64, True)
    assert mixer.flops_per_token(DIMS, 64, True) < mixer.flops_per_token(DIMS, 64, False)


def test_mamba2_equals_its_dense_form() -> None:
    module = built(MAMBA2)
    x = draw(2, 100, 24)
    (c, b, v, log_decay), _ = module._inputs(x, {}, None)
    torch.testing.assert_close(module(x, PLAIN, Context()), module._join(scan(c, b, v, log_decay), v, x))
