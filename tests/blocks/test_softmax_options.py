"""Options of softmax attention: each is nothing at its neutral value, bounded by what it says, and decodes alike."""

import dataclasses
import warnings

import pytest
import torch
from reference_table import Compare
from small_mixers import CPU, DIMS, LENGTH, PLAIN, SMALL_SOFTMAX, SMALL_WINDOW, build, decode, draw
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from blocks import registry
from blocks.families import AbstractMixer, Context, PositionModule
from blocks.mixers.attention_options import OutputGate, ShapedSoftmax
from blocks.mixers.heads import AttentionModule
from blocks.ops.attention import visible_keys

pytestmark = pytest.mark.slow

with warnings.catch_warnings():
    # x-transformers compiles helpers with torch.jit.script at import, which newer torch versions deprecate.
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=DeprecationWarning)
    from transformers import Gemma2Config, GptOssConfig
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
    from x_transformers.x_transformers import Attention

OPTIONS: tuple[dict[str, object], ...] = (
    {"gate": "head"},
    {"gate": "channel"},
    {"sink": "zero"},
    {"sink": "learned"},
    {"softcap": 20.0},
    {"memory": 4},
    {"gate": "channel", "sink": "learned", "softcap": 30.0, "memory": 1, "qk_norm": "rms"},
)


def attention(
    mixer: AbstractMixer, position: str = "none", **options: object
) -> tuple[AttentionModule, PositionModule]:
    module, built = build(dataclasses.replace(mixer, **options), position)
    assert isinstance(module, AttentionModule)
    return module, built


def plain_twin(module: AttentionModule, mixer: AbstractMixer = SMALL_SOFTMAX) -> AttentionModule:
    twin, _ = attention(mixer)
    for name in ("query", "key", "value", "out"):
        twin.get_submodule(name).weight = module.get_submodule(name).weight
    return twin


def shaped(module: AttentionModule) -> ShapedSoftmax:
    assert isinstance(module.shaped, ShapedSoftmax)
    return module.shaped


@pytest.mark.parametrize("mixer", [SMALL_SOFTMAX, SMALL_WINDOW])
def test_ids_of_plain_attention_do_not_know_the_options(mixer: AbstractMixer) -> None:
    assert not {"gate", "sink", "softcap", "memory"} & set(registry.identity(mixer))
    for options in OPTIONS:
        changed = dataclasses.replace(mixer, **options)
        assert registry.config_id(changed) != registry.config_id(mixer)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mixer", [SMALL_SOFTMAX, SMALL_WINDOW])
@pytest.mark.parametrize("position", ["rotary", "alibi"])
def test_decoding_and_padding(mixer: AbstractMixer, position: str, options: dict[str, object]) -> None:
    module, scheme = attention(mixer, position, **options)
    x = draw(2, LENGTH, 24)
    whole = module(x, scheme, Context())
    for cuts in ((), tuple(range(1, LENGTH)), (4, 5, 17)):
        torch.testing.assert_close(decode(module, x, scheme, cuts), whole, rtol=1e-4, atol=1e-5)
    padded = torch.cat([draw(2, 4, 24, seed=1), x, draw(2, 3, 24, seed=2)], dim=1)
    live = torch.zeros(2, LENGTH + 7, dtype=torch.bool)
    live[:, 4 : LENGTH + 4] = True
    y = module(padded, scheme, Context(live=live))
    torch.testing.assert_close(y[:, 4 : LENGTH + 4], whole, rtol=1e-4, atol=1e-5)
    assert y[~live].eq(0).all()


@pytest.mark.parametrize("options", OPTIONS)
def test_no_output_has_a_gradient_from_a_later_input(options: dict[str, object]) -> None:
    module, position = attention(SMALL_SOFTMAX, "rotary", **options)
    x = draw(1, LENGTH, 24).requires_grad_()
    for t in (0, 7, LENGTH - 1):
        (gradient,) = torch.autograd.grad(module(x, position, Context())[:, t].sum(), x)
        assert gradient[:, t + 1 :].eq(0).all()
        assert gradient[:, t].ne(0).any()


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_a_gate_of_zero_halves_attention_and_an_open_one_passes_it(gate: str) -> None:
    module, _ = attention(SMALL_SOFTMAX, gate=gate)
    assert isinstance(module.gate, OutputGate)
    x = torch.cat([draw(2, LENGTH, 23), torch.ones(2, LENGTH, 1)], dim=-1)
    expected = plain_twin(module)(x, PLAIN, Context())
    module.gate.gate.weight.data.zero_()
    torch.testing.assert_close(module(x, PLAIN, Context()), 0.5 * expected)
    module.gate.gate.weight.data[:, -1] = 40.0
    torch.testing.assert_close(module(x, PLAIN, Context()), expected)


def test_a_sink_without_weight_is_softmax_attention() -> None:
    module, _ = attention(SMALL_SOFTMAX, sink="learned")
    shaped(module).sink_logit.data.fill_(-1e9)
    x = draw(2, LENGTH, 24)
    torch.testing.assert_close(module(x, PLAIN, Context()), plain_twin(module)(x, PLAIN, Context()))


@pytest.mark.parametrize("sink", ["zero", "learned"])
def test_a_sink_takes_its_share_of_the_weights(sink: str) -> None:
    module, _ = attention(SMALL_SOFTMAX, sink=sink)
    q, k, v = module._project(draw(1, LENGTH, 24))
    seen = visible_keys(LENGTH, LENGTH, None, None, CPU)
    _, weights = shaped(module)(q, q, k, v, scale=0.1, bias=None, seen=seen, dropout=0.0)
    logits = 0.1 * torch.einsum("bthk,bshk->bhts", q, k.repeat_interleave(2, 2))
    mass = logits.exp().tril()
    logit = shaped(module).sink_logit[:, None] if sink == "learned" else torch.zeros(4, 1)
    torch.testing.assert_close(weights.sum(-1), mass.sum(-1) / (mass.sum(-1) + logit.exp()), rtol=1e-4, atol=1e-5)
    assert (weights.sum(-1) < 1).all()


def test_a_learned_sink_equals_gpt_oss(compared: Compare) -> None:
    module, _ = attention(SMALL_SOFTMAX, sink="learned")
    config = GptOssConfig(
        hidden_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=8, attn_implementation="eager"
    )
    theirs = GptOssAttention(config, layer_idx=1)
    names = {"query": "q", "key": "k", "value": "v", "out": "o"}
    weights = {f"{short}_proj.weight": module.get_submodule(name).weight for name, short in names.items()}
    biases = {f"{short}_proj.bias": torch.zeros(len(weights[f"{short}_proj.weight"])) for short in names.values()}
    theirs.load_state_dict({**weights, **biases, "sinks": shaped(module).sink_logit})
    x = draw(2, LENGTH, 24)
    still = torch.ones(1, LENGTH, 4), torch.zeros(1, LENGTH, 4)
    hidden = ~visible_keys(LENGTH, LENGTH, None, None, CPU)
    mask = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(hidden, -torch.inf)
    expected = theirs(x, position_embeddings=still, attention_mask=mask)[0]
    compared(
        "mixer.softmax", "transformers GptOssAttention", module(x, PLAIN, Context()), expected, rtol=1e-5, atol=1e-5
    )


def strong(module: AttentionModule) -> AttentionModule:
    module.query.weight.data *= 30
    return module


def test_a_cap_bounds_logits_before_they_are_biased() -> None:
    rule = shaped(attention(SMALL_SOFTMAX, softcap=20.0)[0])
    logits = 1000 * draw(1, 4, 5, 5)
    assert rule._capped(logits).abs().max() <= 20
    assert rule._capped(0.01 * draw(1, 4, 5, 5)).sub(0.01 * draw(1, 4, 5, 5)).abs().max() < 1e-6
    module, position = attention(SMALL_SOFTMAX, "alibi", softcap=20.0)
    x = draw(1, LENGTH, 24)
    q, k, v = strong(module)._project(x)
    logits = torch.einsum("bthk,bshk->bhts", q, k.repeat_interleave(2, 2)) * 8**-0.5
    biased = 20 * torch.tanh(logits / 20) + position.score_bias(LENGTH, LENGTH)
    hidden = ~visible_keys(LENGTH, LENGTH, None, None, CPU)
    weights = biased.masked_fill(hidden, -torch.inf).softmax(-1)
    expected = torch.einsum("bhts,bshv->bthv", weights, v.repeat_interleave(2, 2))
    torch.testing.assert_close(module(x, position, Context()), module._join(expected), rtol=1e-4, atol=1e-5)


def test_a_cap_far_away_is_softmax_attention() -> None:
    module, _ = attention(SMALL_SOFTMAX, softcap=1e4)
    x = draw(2, LENGTH, 24)
    torch.testing.assert_close(module(x, PLAIN, Context()), plain_twin(module)(x, PLAIN, Context()))


def test_capped_attention_equals_gemma2(compared: Compare) -> None:
    module, _ = attention(SMALL_SOFTMAX, softcap=20.0)
    x = draw(2, LENGTH, 24)
    q, k, v = (rows.transpose(1, 2) for rows in strong(module)._project(x))

    class Holder(torch.nn.Module):
        config = Gemma2Config(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
        num_key_value_groups = 2

    hidden = ~visible_keys(LENGTH, LENGTH, None, None, CPU)
    mask = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(hidden, -torch.inf)
    expected, _ = gemma2_attention(Holder(), q, k, v, mask, scaling=8**-0.5, softcap=20.0)
    ours = module(x, PLAIN, Context())
    compared("mixer.softmax", "transformers Gemma2 attention", ours, module._join(expected), rtol=1e-4, atol=1e-5)


def test_memory_equals_x_transformers(compared: Compare) -> None:
    module, _ = attention(dataclasses.replace(SMALL_SOFTMAX, kv_heads=2, queries_per_kv=1), memory=4)
    theirs = Attention(dim=24, dim_head=8, heads=2, causal=True, num_mem_kv=4)
    for name in ("q", "k", "v", "out"):
        ours = {"q": "query", "k": "key", "v": "value", "out": "out"}[name]
        theirs.get_submodule(f"to_{name}").weight.data = module.get_submodule(ours).weight
    theirs.mem_k.data, theirs.mem_v.data = (kept.transpose(0, 1) for kept in memory_of(module))
    x = draw(2, LENGTH, 24)
    compared(
        "mixer.softmax",
        "x-transformers Attention(num_mem_kv=4)",
        module(x, PLAIN, Context()),
        theirs(x),
        rtol=1e-5,
        atol=1e-5,
    )


def memory_of(module: AttentionModule) -> tuple[Tensor, Tensor]:
    return shaped(module).memory_k, shaped(module).memory_v


def test_memory_is_met_alike_at_every_place() -> None:
    """With keys of the text out of reach, what a query gets is a matter of its content, not of its position."""
    one_head = dataclasses.replace(SMALL_SOFTMAX, kv_heads=1, queries_per_kv=1)
    module, position = attention(one_head, "rotary", memory=4)
    module.value.weight.data.zero_()
    module.key.weight.data.zero_()
    y = module(draw(1, 1, 24).expand(1, LENGTH, 24), position, Context())
    share = y / y[:, :1]
    torch.testing.assert_close(share, share[..., :1].expand_as(share), rtol=1e-3, atol=1e-3)
    assert 0 < share[0, -1, 0] < 0.9


@pytest.mark.parametrize("options", [options for options in OPTIONS if "gate" not in options])
def test_shaped_attention_says_why_no_fused_kernel_runs(options: dict[str, object]) -> None:
    module, _ = attention(SMALL_SOFTMAX, **options)
    assert module.backends["attention"] == "reference (not sdpa: fused kernels take no cap, sink or memory)"


def test_a_gate_leaves_the_kernel_alone() -> None:
    module, _ = attention(SMALL_SOFTMAX, gate="head")
    assert module.backends["attention"].startswith("sdpa")


@pytest.mark.parametrize("options", OPTIONS)
def test_the_entropy_term_reaches_shaped_attention(options: dict[str, object]) -> None:
    module, position = attention(SMALL_SOFTMAX, entropy_weight=0.05, **options)
    context = Context()
    module(draw(2, LENGTH, 24), position, context)
    (loss,) = context.losses
    assert 0 < loss < 0.05 * 4


@pytest.mark.parametrize("options", OPTIONS)
def test_flops_equal_the_counted(options: dict[str, object]) -> None:
    mixer = dataclasses.replace(SMALL_SOFTMAX, entropy_weight=0.01, **options)
    module = mixer.build(DIMS)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(draw(1, 24, 24), PLAIN, Context())
    assert mixer.flops_per_token(DIMS, 24, causal=False) == counter.get_total_flops() / 24


def test_a_window_as_long_as_the_text_keeps_its_options() -> None:
    wide = dataclasses.replace(SMALL_WINDOW, window=64, gate="head", sink="zero", softcap=30.0, memory=4)
    assert wide.canonical(DIMS) == dataclasses.replace(SMALL_SOFTMAX, gate="head", sink="zero", softcap=30.0, memory=4)
