"""Differential, forgetting, sigmoid and talking-heads attention: reductions, sums of weights, other implementations."""

import dataclasses
import warnings

import pytest
import torch
from fla_naive import fla_naive
from reference_table import Compare
from small_mixers import CPU, DIMS, LENGTH, PLAIN, SMALL_SOFTMAX, build, draw
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from blocks.families import AbstractMixer, Context, HeadShape, Hook, InfeasibleArchitecture, MixerModule, Role
from blocks.mixers.differential import NORM_EPS, Differential, DifferentialModule, first_lambda
from blocks.mixers.forgetting import Forgetting, ForgettingModule
from blocks.mixers.heads import AttentionModule
from blocks.mixers.projections import WeighedAttention, join_heads, split_heads
from blocks.mixers.sigmoid_attn import SigmoidAttention
from blocks.mixers.talking_heads import TalkingHeads, TalkingRule
from blocks.ops.attention import attention_weights, reference_attention, visible_keys
from blocks.positions.alibi import Alibi, slopes

pytestmark = pytest.mark.slow

with warnings.catch_warnings():
    # x-transformers compiles helpers with torch.jit.script at import, which newer torch versions deprecate.
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=DeprecationWarning)
    from transformers import DiffLlamaConfig
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention, DiffLlamaRotaryEmbedding
    from x_transformers.attend import Attend

DIFFERENTIAL = Differential(kv_heads=2, queries_per_kv=2, head_dim=8)
FORGETTING = Forgetting(kv_heads=2, queries_per_kv=2, head_dim=8)
SIGMOID = SigmoidAttention(kv_heads=2, queries_per_kv=2, head_dim=8)
TALKING = TalkingHeads(kv_heads=2, queries_per_kv=2, head_dim=8)


def plain_twin(module: MixerModule) -> AttentionModule:
    """Softmax attention with the projections of another mixer."""
    twin = SMALL_SOFTMAX.build(DIMS)
    assert isinstance(twin, AttentionModule)
    for name in ("query", "key", "value", "out"):
        twin.get_submodule(name).weight = module.get_submodule(name).weight
    return twin


def differential(position: str = "none", layer: int = 0) -> DifferentialModule:
    module = DIFFERENTIAL.build_at(DIMS, layer)
    assert isinstance(module, DifferentialModule)
    for index, parameter in enumerate(module.parameters()):
        parameter.data = 0.3 * draw(*parameter.shape, seed=index)
    return module


def test_without_its_second_map_a_differential_head_is_softmax_attention_normalised_by_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = differential()
    monkeypatch.setattr(module, "weight_of_the_second", lambda: torch.zeros(()))
    x = draw(2, LENGTH, 24)
    q, k, v = split_heads(module, x, module.shape)
    wide_values = torch.cat(v.chunk(2, dim=2), dim=-1)
    first = reference_attention(q[:, :, :2], k[:, :, :1], wide_values, scale=8**-0.5)
    normed = nn.functional.rms_norm(first, (16,), eps=NORM_EPS) * (1 - first_lambda(0))
    torch.testing.assert_close(module(x, PLAIN, Context()), join_heads(module, normed), rtol=1e-5, atol=1e-5)


def test_differential_weights_sum_to_one_minus_lambda(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every value one, a head is the sum of its weights before the norm, which is left out here."""
    module = differential()
    monkeypatch.setattr(nn.functional, "rms_norm", lambda mixed, shape, eps: mixed)
    module.value.weight.data.zero_()
    module.value.weight.data[:, -1] = 1.0
    module.out.weight.data = torch.eye(24, 32)
    x = torch.cat([draw(2, LENGTH, 23), torch.ones(2, LENGTH, 1)], dim=-1)
    expected = (1 - module.weight_of_the_second()) * (1 - first_lambda(0))
    assert abs(expected.item() - 0.64) > 0.01
    torch.testing.assert_close(module(x, PLAIN, Context()), expected.expand(2, LENGTH, 24))


def test_lambda_starts_lower_in_early_layers() -> None:
    assert first_lambda(0) == pytest.approx(0.2)
    assert first_lambda(4) == pytest.approx(0.8 - 0.6 * 0.301194, abs=1e-6)
    starts = [DIFFERENTIAL.build_at(DIMS, layer).weight_of_the_second().item() for layer in (0, 1, 5, 30)]  # type: ignore[attr-defined]
    assert starts == pytest.approx([first_lambda(layer) for layer in (0, 1, 5, 30)], abs=0.4)


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_odd_heads_cannot_be_paired(kv_heads: int) -> None:
    with pytest.raises(InfeasibleArchitecture, match=f"kv_heads must be even.*got {kv_heads}; choose {kv_heads + 1}"):
        dataclasses.replace(DIFFERENTIAL, kv_heads=kv_heads).check(DIMS)


@pytest.mark.parametrize("layer", [0, 3])
def test_differential_attention_equals_diffllama(compared: Compare, layer: int) -> None:
    module = differential(layer=layer)
    config = DiffLlamaConfig(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=NORM_EPS,
        attn_implementation="eager",
    )
    theirs = DiffLlamaAttention(config, layer_idx=layer)
    weights = {name[0]: module.get_submodule(name).weight for name in ("query", "key", "value", "out")}
    vectors = {name: module.get_parameter(name) for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")}
    theirs.load_state_dict({**{f"{name}_proj.weight": weight for name, weight in weights.items()}, **vectors})
    x = draw(2, LENGTH, 24)
    rotary = DiffLlamaRotaryEmbedding(config)(x, torch.arange(LENGTH)[None])
    hidden = ~visible_keys(LENGTH, LENGTH, None, None, CPU)
    mask = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(hidden, -torch.inf)
    expected = theirs(x, position_embeddings=rotary, attention_mask=mask)[0]
    _, position = build(DIFFERENTIAL, "rotary")
    compared(
        "mixer.differential",
        "transformers DiffLlamaAttention",
        module(x, position, Context()),
        expected,
        rtol=1e-5,
        atol=1e-5,
    )


def forgetting(position: str = "none") -> ForgettingModule:
    module, _ = build(FORGETTING, position)
    assert isinstance(module, ForgettingModule)
    return module


def test_a_gate_that_stays_open_is_softmax_attention() -> None:
    module = forgetting()
    module.gate.weight.data.zero_()
    module.gate.bias.data.fill_(200.0)
    x = draw(2, LENGTH, 24)
    torch.testing.assert_close(module(x, PLAIN, Context()), plain_twin(module)(x, PLAIN, Context()))


def test_constant_gates_are_alibi() -> None:
    module = forgetting()
    rate = slopes(4, CPU).double()
    module, x = module.double(), draw(2, LENGTH, 24, dtype=torch.float64)
    module.gate.weight.data.zero_()
    module.gate.bias.data = -torch.log(torch.expm1(rate))
    alibi = Alibi().build(DIMS, HeadShape(heads=4, kv_heads=2, head_dim=8))
    twin = plain_twin(module)
    torch.testing.assert_close(module(x, PLAIN, Context()), twin(x, alibi, Context()), rtol=1e-9, atol=1e-9)


def test_forgetting_attention_equals_flash_linear_attention(compared: Compare) -> None:
    module = forgetting()
    x = draw(2, LENGTH, 24)
    q, k, v = split_heads(module, x, module.shape)
    mixed = fla_naive("forgetting_attn").naive_forgetting_attn(q, k, v, module.log_gates(x))
    compared(
        "mixer.forgetting",
        "flash-linear-attention naive_forgetting_attn",
        module(x, PLAIN, Context()),
        join_heads(module, mixed),
        rtol=1e-5,
        atol=1e-5,
    )


def test_forgetting_takes_no_second_bias() -> None:
    assert not FORGETTING.offers & {Hook.SCORE_BIAS, Hook.CONTENT_BIAS}


def weighed(mixer: AbstractMixer) -> WeighedAttention:
    module, _ = build(mixer)
    assert isinstance(module, WeighedAttention)
    return module


def attended(module: WeighedAttention, x: Tensor, theirs: nn.Module, bias: Tensor | None = None) -> Tensor:
    """What another implementation makes of this module's heads."""
    q, k, v = (rows.transpose(1, 2) for rows in split_heads(module, x, module.shape))
    k, v = (rows.repeat_interleave(2, dim=1) for rows in (k, v))
    return join_heads(module, theirs(q, k, v, attn_bias=bias)[0].transpose(1, 2))


def test_sigmoid_attention_equals_x_transformers_with_the_shift_as_a_bias(compared: Compare) -> None:
    module, x = weighed(SIGMOID), draw(2, LENGTH, 24)
    shift = torch.full((LENGTH, LENGTH), -float(torch.tensor(64.0).log()))
    theirs = Attend(causal=True, heads=4, sigmoid=True)
    compared(
        "mixer.sigmoid_attn",
        "x-transformers Attend(sigmoid=True)",
        module(x, PLAIN, Context()),
        attended(module, x, theirs, shift),
        rtol=1e-5,
        atol=1e-5,
    )


def test_sigmoid_weights_are_decided_one_by_one() -> None:
    module, x = weighed(SIGMOID), draw(1, LENGTH, 24).double()
    module = module.double()
    q, k, v = split_heads(module, x, module.shape)
    logits = torch.einsum("bthk,bshk->bhts", q, k.repeat_interleave(2, 2)) * 8**-0.5
    weights = (1 / (1 + 64 * torch.exp(-logits))).tril()
    mixed = torch.einsum("bhts,bshv->bthv", weights, v.repeat_interleave(2, 2))
    torch.testing.assert_close(module(x, PLAIN, Context()), join_heads(module, mixed))


def talking(mixes: str) -> tuple[WeighedAttention, TalkingRule]:
    module = weighed(dataclasses.replace(TALKING, mixes=mixes))
    assert isinstance(module.weigh, TalkingRule)
    return module, module.weigh


@pytest.mark.parametrize("mixes", ["both", "logits", "weights"])
def test_heads_that_do_not_mix_are_softmax_attention(mixes: str) -> None:
    module, rule = talking(mixes)
    for parameter in rule.parameters():
        assert parameter.role == Role.SCALAR  # type: ignore[attr-defined]
        parameter.data = torch.eye(4)
    x = draw(2, LENGTH, 24)
    torch.testing.assert_close(module(x, PLAIN, Context()), plain_twin(module)(x, PLAIN, Context()))


@pytest.mark.parametrize("mixes", ["both", "logits", "weights"])
def test_talking_heads_equal_x_transformers(compared: Compare, mixes: str) -> None:
    """There a mix of logits is added to the logits, so that identity is taken off."""
    module, rule = talking(mixes)
    theirs = Attend(causal=True, heads=4, pre_talking_heads=mixes != "weights", post_talking_heads=mixes != "logits")
    if mixes != "weights":
        theirs.pre_softmax_talking_heads.weight.data = (rule.mixes["before"] - torch.eye(4))[:, :, None, None]
    if mixes != "logits":
        theirs.post_softmax_talking_heads.weight.data = rule.mixes["after"][:, :, None, None]
    x = draw(2, LENGTH, 24)
    bias = Alibi().build(DIMS, TALKING.head_shape())
    compared(
        "mixer.talking_heads",
        "x-transformers Attend(pre_talking_heads, post_talking_heads)",
        module(x, bias, Context()),
        attended(module, x, theirs, bias.score_bias(LENGTH, LENGTH)),
        rtol=1e-4,
        atol=1e-5,
    )


def test_mixed_weights_stay_zero_at_later_tokens() -> None:
    module, _ = talking("both")
    x = draw(1, LENGTH, 24).requires_grad_()
    (gradient,) = torch.autograd.grad(module(x, PLAIN, Context())[:, 5].sum(), x)
    assert gradient[:, 6:].eq(0).all()


@pytest.mark.parametrize("mixer", [FORGETTING, SIGMOID, TALKING])
def test_plain_forms_say_why_no_fused_kernel_runs(mixer: AbstractMixer) -> None:
    assert mixer.build(DIMS).backends["attention"].startswith("reference (not sdpa: ")


@pytest.mark.parametrize(
    "mixer", [DIFFERENTIAL, FORGETTING, SIGMOID, TALKING, dataclasses.replace(TALKING, mixes="logits")]
)
def test_flops_equal_the_counted(mixer: AbstractMixer) -> None:
    module = mixer.build(DIMS)
    if isinstance(module, DifferentialModule):
        module.attend = reference_attention
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(draw(1, 24, 24), PLAIN, Context())
    assert mixer.flops_per_token(DIMS, 24, causal=False) == counter.get_total_flops() / 24


def test_attention_weights_of_the_twin_are_those_of_the_reference() -> None:
    """The twin used above is plain attention over the same projections."""
    module, x = forgetting(), draw(1, LENGTH, 24)
    q, k, v = split_heads(module, x, module.shape)
    weights = attention_weights(q, k, scale=8**-0.5)
    mixed = torch.einsum("bhts,bshv->bthv", weights, v.repeat_interleave(2, 2))
    torch.testing.assert_close(plain_twin(module)(x, PLAIN, Context()), join_heads(module, mixed))
