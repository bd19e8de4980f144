"""Which combinations of blocks are legal: legal ones train a step and are causal, the others are refused with a remedy.

Combinations that no point of the space can name are shown to be unnameable.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from registered_cases import MIXERS, POSITIONS
from torch.nn import functional as F

from blocks import registry
from blocks.encoder_decoder import EncoderDecoder
from blocks.families import (
    AbstractFFN,
    AbstractInit,
    AbstractMixer,
    AbstractPlacement,
    AbstractPosition,
    AbstractStack,
    Context,
    Direction,
    Hook,
    InfeasibleArchitecture,
    PositionModule,
)
from blocks.model import DecoderLM, ModelConfig
from blocks.ops.attention import AttentionNeeds, choose_attention
from blocks.ops.backends import BackendError
from search_space.space import derive

pytestmark = pytest.mark.slow

Make = Callable[..., ModelConfig]
Changes = Mapping[str, Any]
TOKENS = torch.randint(48, (2, 21), generator=torch.Generator().manual_seed(0))
BIASES = {Hook.SCORE_BIAS, Hook.CONTENT_BIAS}
SPACE = derive(ModelConfig, registry.variants)


def registered(family: type, *kinds: str) -> list[str]:
    """Those of the kinds that there are."""
    return [kind for kind in kinds if kind in registry.variants(family)]


def legal(config: ModelConfig) -> DecoderLM:
    """The model of a decoder that trains a step, looks back only, decodes as it reads, and ignores padding and rows."""
    model = config.build(seed=0).train()
    torch.manual_seed(0)
    logits, auxiliary = model(TOKENS)
    (F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()) + auxiliary).backward()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            parameter -= 0.1 * parameter.grad
        before = model.eval()(TOKENS)[0]
        for place in (1, 12, 20):
            other = TOKENS.clone()
            other[:, place] = (other[:, place] + 1) % 48
            torch.testing.assert_close(model(other)[0][:, :place], before[:, :place], rtol=0, atol=1e-6)
        if isinstance(model, DecoderLM):
            first, state = model.step(TOKENS[:, :9], model.empty_state(2), 0)
            rest, _ = model.step(TOKENS[:, 9:], state, 9)
            torch.testing.assert_close(torch.cat([first, rest], dim=1), before, rtol=1e-4, atol=1e-5)
        padded, live = torch.cat([TOKENS, TOKENS[:, :4]], dim=1), torch.arange(25) < 21
        torch.testing.assert_close(model(padded, live.expand(2, -1))[0][:, :21], before, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model(TOKENS[:1])[0], before[:1], rtol=1e-4, atol=1e-5)
    return model


def refused(make: Callable[[], object], *words: str) -> str:
    """The message of a refusal, which holds all of the words."""
    with pytest.raises(InfeasibleArchitecture) as caught:
        make()
    message = str(caught.value)
    for word in words:
        assert word in message, message
    return message


def altered(config: ModelConfig, *path: str, **values: object) -> ModelConfig:
    """The config with fields set to values that its space may not hold."""
    plain = registry.encode(config)
    inner = plain
    for name in path:
        inner = inner[name]
    inner |= values
    decoded = registry.decode(ModelConfig, plain)
    assert isinstance(decoded, ModelConfig)
    return decoded


def test_row_1_biases_need_logits(small: Make) -> None:
    for position, scheme in POSITIONS.items():
        for mixer, config in MIXERS.items():
            missing = scheme.needs & BIASES - config.offers
            if missing:
                message = refused(lambda m=mixer, p=position: small({"mixer.kind": m, "position.kind": p}), *missing)
                assert "softmax" in message.partition("mixers that do: ")[2]
    assert not MIXERS["linear"].offers & BIASES


def test_row_2_the_additive_bias_on_linear_attention_is_refused_and_its_multiplicative_twin_is_there(
    small: Make,
) -> None:
    refused(lambda: small({"mixer.kind": "linear", "position.kind": "alibi"}), "'alibi'", "'linear'", "score_bias")
    legal(small({"mixer.kind": "retention", "position.kind": "rotary"}))


def test_row_3_rotation_of_linear_attention_leaves_its_denominator_alone(small: Make) -> None:
    legal(small({"mixer.kind": "linear", "position.kind": "rotary"}))
    mixer = small({"mixer.kind": "linear"}).build(seed=0).slots[0].mixer
    given: list[tuple[torch.Tensor, ...]] = []
    attend = mixer.attend
    mixer.attend = lambda *tensors: given.append(tensors) or attend(*tensors)
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    for scheme in (small().build(seed=0).positions[0], PositionModule()):
        mixer(x, scheme, Context())
    (q, k, _, plain_q, plain_k), (_, _, _, unrotated_q, unrotated_k) = given
    assert torch.equal(plain_q, unrotated_q)
    assert torch.equal(plain_k, unrotated_k)
    assert not torch.allclose(q, plain_q)
    assert not torch.allclose(k, plain_k)
    assert (plain_k >= 0).all()


@pytest.mark.parametrize("mixer", registered(AbstractMixer, "retention", "gla", "deltanet", "gated_deltanet", "kda"))
def test_row_4_rotation_of_unnormalised_recurrences_is_legal_where_channels_decay_alike(
    small: Make, mixer: str
) -> None:
    if Hook.ROTATE not in MIXERS[mixer].offers:
        assert mixer in ("gla", "kda"), "only decays of single channels do not commute with rotations"
        refused(lambda: small({"mixer.kind": mixer, "position.kind": "rotary"}), "'rotate'", f"'{mixer}'", "retention")
        return
    legal(small({"mixer.kind": mixer, "position.kind": "rotary"}))


def test_row_5_one_sided_blocks_are_refused_in_both_directions(small: Make) -> None:
    for kind in registered(AbstractPosition, "xpos", "cope"):
        refused(lambda kind=kind: small({"position.kind": kind, "stack.kind": "encoder"}), f"'{kind}'", "rotary")
    for kind in registered(AbstractMixer, "forgetting", "selective", "stick_breaking"):
        refused(lambda kind=kind: small({"mixer.kind": kind, "position.kind": "rotary", "stack.kind": "encoder"}),
                f"'{kind}'", "softmax")  # fmt: skip


def test_row_6_no_positions_are_legal_in_causal_stacks_only(small: Make) -> None:
    for mixer in registered(AbstractMixer, "softmax", "gla"):
        legal(small({"mixer.kind": mixer, "position.kind": "none"}))
    for stack in ("encoder", "encoder_decoder", "prefix_lm"):
        refused(lambda stack=stack: small({"position.kind": "none", "stack.kind": stack}), "'none'", "rotary")


def test_row_7_learned_tables_end_with_training(small: Make) -> None:
    refused(lambda: small({"position.kind": "learned"}, max_len=80), "beyond", "40", "80")
    if registered(AbstractPosition, "learned_interp"):
        config = small({"position.kind": "learned_interp"}, train_len=16, max_len=40)
        model = config.build(seed=0).eval()
        assert model(TOKENS)[0].isfinite().all()
        _, state = model.step(TOKENS[:, :16], model.empty_state(2), 0)
        refused(lambda: model.step(TOKENS[:, 16:], state, 16), "learned_interp", "decode")


def test_row_8_a_model_has_one_position_scheme() -> None:
    assert [name for name in SPACE.fields if "position" in name] == ["position"]


@pytest.mark.parametrize("family", [AbstractMixer, AbstractFFN, AbstractPosition])
def test_row_9_blocks_that_mix_all_tokens_are_refused_in_a_decoder(small: Make, family: type) -> None:
    name = {AbstractMixer: "mixer", AbstractFFN: "ffn", AbstractPosition: "position"}[family]
    whole = {"linformer", "nystrom", "fnet", "soft_moe", "expert_choice"}
    for kind, config in registry.variants(family).items():
        if Direction.CAUSAL not in config.directions:
            changes = {f"{name}.kind": kind} | ({"position.kind": "sinusoidal"} if name == "mixer" else {})
            refused(lambda changes=changes: small(changes), f"model.{name}.kind='{kind}'", "causal")
        else:
            assert kind not in whole


@pytest.mark.parametrize("mixer", registered(AbstractMixer, "longformer", "bigbird"))
def test_row_10_global_tokens_of_a_causal_model_see_the_past_only(small: Make, mixer: str) -> None:
    legal(small({"mixer.kind": mixer, "position.kind": "none"}))


def test_row_11_a_kernel_that_cannot_do_what_a_block_needs_is_passed_over_or_refused() -> None:
    needs = AttentionNeeds(weights=True)
    assert choose_attention(needs).name == "reference"
    with pytest.raises(BackendError, match=r"'sdpa'.*no attention weights.*reference"):
        choose_attention(needs, "sdpa")


def test_row_12_norms_of_queries_and_caps_on_logits_go_together(small: Make) -> None:
    legal(small({"mixer.softmax.qk_norm": "rms", "mixer.softmax.softcap": 50.0}))


def test_row_13_differential_attention_needs_pairs_of_heads(small: Make) -> None:
    config = small({"mixer.kind": "differential", "position.kind": "rotary"})
    legal(config)
    refused(lambda: altered(config, "mixer", "differential", kv_heads=3), "differential", "even", "3")


def test_row_14_heads_are_products_and_rotated_channels_are_pairs(small: Make) -> None:
    heads = small({"mixer.softmax.kv_heads": 1, "mixer.softmax.queries_per_kv": 8}).mixer.head_shape()
    assert heads.heads % heads.kv_heads == 0
    legal(small({"d_model": 48, "mixer.softmax.head_dim": 32}))
    for position in registered(AbstractPosition, "rotary", "xpos", "rope_partial"):
        config = small({"position.kind": position})
        refused(lambda config=config: altered(config, "mixer", "softmax", head_dim=7), "even", "7")


def test_row_15_values_are_shared_between_equal_layers_only(small: Make) -> None:
    pattern = {"residual.kind": "value_residual", "pattern.kind": "every_nth", "pattern.every_nth.every": 2}
    refused(lambda: small({**pattern, "pattern.every_nth.mixer.softmax.kv_heads": 1}), "kv_heads", "uniform")
    refused(lambda: small({**pattern, "pattern.every_nth.mixer.kind": "linear"}), "'linear'", "uniform")
    legal(small({"residual.kind": "value_residual", "layers": 3}))


@pytest.mark.parametrize("position", ["alibi", "rotary", "none"])
def test_row_16_latent_attention_rotates_a_part_of_its_own(small: Make, position: str) -> None:
    model = legal(small({"mixer.kind": "mla", "position.kind": position}))
    with torch.no_grad():
        state, parts = model.empty_state(2), []
        for place in range(21):
            part, state = model.step(TOKENS[:, place : place + 1], state, place)
            parts.append(part)
        torch.testing.assert_close(torch.cat(parts, dim=1), model(TOKENS)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mixer", ["mla", "hyena"])
def test_row_16_maps_whose_weights_are_applied_directly_take_no_norms(small: Make, mixer: str) -> None:
    """Decoding multiplies MLA's weights with each other, and would pass by what stands at the maps."""
    changes = {"mixer.kind": mixer, "position.kind": "none", "placement.kind": "hybridnorm"}
    message = refused(lambda: small(changes), f"'{mixer}'", "'hybridnorm'")
    assert "softmax" in message
    assert "pre" in message


@pytest.mark.parametrize(
    "changes", [{"mixer.kind": "cosformer"}, {"mixer.kind": "linear", "mixer.linear.feature_map": "relu"}]
)
def test_a_norm_that_learns_one_factor_stands_nowhere_it_is_divided_out(small: Make, changes: Changes) -> None:
    inner = {**changes, "position.kind": "none", "placement.kind": "hybridnorm"}
    legal(small({**inner, "norm.kind": "rmsnorm"}))
    refused(lambda: small({**inner, "norm.kind": "scalenorm"}), "'hybridnorm'", "'scalenorm'", "rmsnorm")


def test_row_17_a_layer_has_one_placement(small: Make) -> None:
    assert [name for name in SPACE.fields if "placement" in name] == ["placement"]
    for kind in registered(AbstractPlacement, "rezero", "layerscale", "deepnorm", "sub_ln", "normformer", "peri"):
        legal(small({"placement.kind": kind}))
        assert kind == "deepnorm" or registry.variants(AbstractPlacement)[kind].additive


@pytest.mark.parametrize("init", [kind for kind, rule in registry.variants(AbstractInit).items() if rule.needs])
def test_row_18_init_rules_made_for_a_placement_are_refused_elsewhere(small: Make, init: str) -> None:
    needs = registry.variants(AbstractInit)[init].needs
    able = [kind for kind, other in registry.variants(AbstractPlacement).items() if other.provides & needs]
    assert able
    message = refused(lambda: small({"init.kind": init}), f"model.init.kind='{init}'")
    assert all(kind in message for kind in able)
    legal(small({"init.kind": init, "placement.kind": able[0]}))


def test_row_19_width_rules_take_tied_embeddings_by_a_readout_factor(small: Make) -> None:
    for tied in (True, False):
        legal(small({"init.kind": "mup", "tied": tied}))
    narrow, wide = (small({"init.kind": "mup", "d_model": d_model}) for d_model in (64, 256))
    one, other = (config.init.logit_multiplier(config.d_model) for config in (narrow, wide))
    assert one == pytest.approx(4 * other)


def test_row_20_a_router_must_get_a_gradient_and_have_enough_experts(small: Make) -> None:
    moe = small({"ffn.kind": "moe"})
    legal(moe)
    refused(lambda: altered(moe, "ffn", "moe", top_k=1, renormalised=True), "gradient", "switch")
    refused(lambda: altered(moe, "ffn", "moe", top_k=99, experts=4), "99", "4")
    legal(altered(moe, "ffn", "moe", top_k=1, renormalised=False))


@pytest.mark.parametrize("premixer", ["short_conv", "token_shift"])
@pytest.mark.parametrize("stack", ["decoder", "encoder", "prefix_lm"])
def test_row_21_premixers_reach_as_far_to_either_side_where_layers_look_ahead(
    small: Make, premixer: str, stack: str
) -> None:
    if stack != "encoder":
        legal(small({"premixer.kind": premixer, "stack.kind": stack}))
    module = small({"premixer.kind": premixer, "stack.kind": stack}).build(seed=0).slots[0].premixer
    for parameter in module.parameters():
        torch.nn.init.uniform_(parameter, 0.1, 0.4, generator=torch.Generator().manual_seed(1))
    x = torch.randn(1, 11, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (gradient,) = torch.autograd.grad(module(x, PositionModule(), Context())[:, 5].sum(), x)
    seen = [place - 5 for place in gradient.abs().sum((0, 2)).nonzero().flatten().tolist()]
    reach = 3 if premixer == "short_conv" else 1
    assert seen == list(range(-reach, (reach if stack == "encoder" else 0) + 1))


@pytest.mark.parametrize("position", ["rotary", "alibi", "none"])
def test_row_22_windows_go_with_sinks_and_positions(small: Make, position: str) -> None:
    sink = SPACE.fields["mixer"].variants["sliding_window"].fields.get("sink")
    sinks = {"mixer.sliding_window.sink": next(kind for kind in sink.options if kind != "none")} if sink else {}
    legal(small({"mixer.kind": "sliding_window", "mixer.sliding_window.window": 8, "position.kind": position, **sinks}))


@pytest.mark.parametrize("mixer", registered(AbstractMixer, "hyena", "long_conv"))
def test_row_23_long_convolutions_cannot_pack_and_decode_by_a_fallback(small: Make, mixer: str) -> None:
    model = small({"mixer.kind": mixer, "position.kind": "none"}).build(seed=0).eval()
    refused(lambda: model(TOKENS, segments=torch.zeros_like(TOKENS)), f"'{mixer}'", "a row of its own")
    with torch.no_grad():
        _, state = model.step(TOKENS[:, :10], model.empty_state(2), 0)
        y, _ = model.step(TOKENS[:, 10:], state, 10)
        torch.testing.assert_close(y, model(TOKENS)[0][:, 10:], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_row_24_hyper_connections_take_any_layer_that_adds(small: Make) -> None:
    for kind, placement in registry.variants(AbstractPlacement).items():
        changes = {"residual.kind": "hyper_connections", "placement.kind": kind}
        if placement.additive:
            legal(small(changes))
        else:
            refused(lambda changes=changes: small(changes), f"'{kind}'", "pre")


def test_row_25_packed_documents_equal_separate_ones(small: Make) -> None:
    packing = [kind for kind, mixer in MIXERS.items() if mixer.packs]
    assert set(packing) >= {"softmax", "sliding_window", "linear"}
    for mixer in packing:
        position = "rotary" if Hook.ROTATE in MIXERS[mixer].offers else "none"
        model = small({"mixer.kind": mixer, "position.kind": position}).build(seed=0).eval()
        with torch.no_grad():
            y = model(TOKENS, segments=(torch.arange(21) >= 8).long().expand(2, -1))[0]
            torch.testing.assert_close(y[:, 8:], model(TOKENS[:, 8:])[0], rtol=1e-5, atol=1e-5)


def test_row_26_pooled_blocks_have_the_position_of_their_last_token(small: Make) -> None:
    if Hook.ROTATE in MIXERS["multiscale_pool"].offers:
        legal(small({"mixer.kind": "multiscale_pool", "position.kind": "rotary"}))
    else:
        refused(lambda: small({"mixer.kind": "multiscale_pool", "position.kind": "rotary"}), "rotate")


def test_row_27_only_a_model_with_a_source_can_copy_from_it() -> None:
    heads = [kind for kind, stack in SPACE.fields["stack"].variants.items() if "head" in stack.fields]
    assert heads == ["encoder_decoder"]
    assert "pointer_copy" in SPACE.fields["stack"].variants["encoder_decoder"].fields["head"].options
    assert registry.lookup(AbstractStack, "encoder_decoder") is EncoderDecoder
