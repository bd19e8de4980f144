"""Latent attention: absorbed decoding, its cache, where positions act, and DeepSeek-V3's own module."""

import pytest
import torch
from reference_table import Compare
from small_mixers import CPU, DIMS, LENGTH, PLAIN, build, decode, draw
from torch.utils.flop_counter import FlopCounterMode
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from blocks.families import Context, Hook, PositionModule
from blocks.mixers.mla import Mla, MlaModule
from blocks.ops.attention import reference_attention, visible_keys

pytestmark = pytest.mark.slow

SMALL = Mla(heads=2, head_dim=8, latent=16, rope_dim=4)


def latent(position: str = "rotary") -> tuple[MlaModule, PositionModule]:
    module, built = build(SMALL, position)
    assert isinstance(module, MlaModule)
    return module, built


@pytest.mark.parametrize("position", ["none", "rotary", "xpos", "alibi"])
@pytest.mark.parametrize("cuts", [(), tuple(range(1, LENGTH)), (1, 7, 20)])
def test_absorbed_decoding_equals_expanded_attention(position: str, cuts: tuple[int, ...]) -> None:
    module, scheme = latent(position)
    module, scheme = module.double(), scheme.double()
    x = draw(2, LENGTH, 24, dtype=torch.float64)
    torch.testing.assert_close(decode(module, x, scheme, cuts), module(x, scheme, Context()), rtol=1e-6, atol=1e-6)


def test_the_cache_holds_one_latent_and_one_rotated_key_per_token() -> None:
    module, position = latent()
    _, state = module.step(draw(1, 9, 24), module.empty_state(1, CPU, torch.float32), position, 0)
    assert sum(tensor.numel() for tensor in state.values()) == 9 * (16 + 4)
    for heads in (1, 8):
        wider = Mla(heads=heads, head_dim=8, latent=16, rope_dim=4).build(DIMS)
        _, state = wider.step(draw(1, 9, 24), wider.empty_state(1, CPU, torch.float32), PLAIN, 0)
        assert sum(tensor.numel() for tensor in state.values()) == 9 * (16 + 4)


def test_only_the_decoupled_channels_move_with_position() -> None:
    module, position = latent("rotary")
    x = draw(1, LENGTH, 24)
    assert (module(x, position, Context()) - module(x, PLAIN, Context())).abs().max() > 1e-3
    module.rotated_key.weight.data.zero_()
    torch.testing.assert_close(module(x, position, Context()), module(x, PLAIN, Context()))


def test_a_scheme_is_given_the_decoupled_channels_alone() -> None:
    """Rotating the latent would forbid absorption; a bias on the logits does not."""
    shape = SMALL.head_shape()
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (2, 1, 4)
    assert SMALL.offers == {Hook.EMBEDDING, Hook.ROTATE, Hook.SCALE, Hook.SCORE_BIAS}


def test_flops_equal_the_counted() -> None:
    module = SMALL.build(DIMS)
    assert isinstance(module, MlaModule)
    module.attend = reference_attention
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(draw(1, 24, 24), PLAIN, Context())
    assert SMALL.flops_per_token(DIMS, 24, causal=False) == counter.get_total_flops() / 24


def test_latent_attention_equals_deepseek_v3(compared: Compare) -> None:
    module, position = latent("rotary")
    config = DeepseekV3Config(
        hidden_size=24,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        rope_interleave=False,
        attn_implementation="eager",
    )
    theirs = DeepseekV3Attention(config, layer_idx=0)
    query = torch.cat([module.query.weight.view(2, 8, 24), module.rotated_query.weight.view(2, 4, 24)], dim=1)
    expand = torch.cat([module.key.weight.view(2, 8, 16), module.value.weight.view(2, 8, 16)], dim=1)
    theirs.load_state_dict(
        {
            "q_proj.weight": query.flatten(0, 1),
            "kv_a_proj_with_mqa.weight": torch.cat([module.latent.weight, module.rotated_key.weight]),
            "kv_a_layernorm.weight": module.latent_norm.weight,
            "kv_b_proj.weight": expand.flatten(0, 1),
            "o_proj.weight": module.out.weight,
        }
    )
    x = draw(2, LENGTH, 24)
    mask = torch.zeros(LENGTH, LENGTH).masked_fill(~visible_keys(LENGTH, LENGTH, None, None, CPU)[0, 0], -torch.inf)
    places = torch.arange(LENGTH)[None]
    rotary = DeepseekV3RotaryEmbedding(config)(x, places)
    expected = theirs(x, position_embeddings=rotary, attention_mask=mask[None, None])[0]
    compared(
        "mixer.mla", "transformers DeepseekV3Attention", module(x, position, Context()), expected, rtol=1e-5, atol=1e-5
    )
