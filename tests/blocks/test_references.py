"""Blocks against other people's implementations: transformers, x-transformers, flash-linear-attention, torch."""

import dataclasses
import importlib.util
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from einops import rearrange
from reference_table import Compare
from torch import Tensor, nn

from blocks.families import Context, Dims, HeadShape, PositionModule
from blocks.mixers.heads import AttentionModule
from blocks.mixers.linear import Linear, LinearModule
from blocks.mixers.softmax import Softmax
from blocks.ops.attention import visible_keys
from blocks.positions.alibi import Alibi, slopes
from blocks.positions.rotary import Rotary
from blocks.positions.sinusoidal import sinusoids
from blocks.positions.t5_bias import T5Bias, T5BiasModule, buckets
from blocks.positions.xpos import Xpos

with warnings.catch_warnings():
    # x-transformers compiles helpers with torch.jit.script at import, which newer torch versions deprecate.
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=DeprecationWarning)
    from transformers import LlamaConfig, MarianConfig, Qwen3Config
    from transformers.masking_utils import causal_mask_function, sliding_window_overlay
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding
    from transformers.models.t5.modeling_t5 import T5Attention
    from x_transformers import x_transformers

CPU = torch.device("cpu")
DIMS = Dims(d_model=48, d_ff=96, layers=1, train_len=64, max_len=64)
PLAIN = PositionModule()
LENGTH = 63


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn(module: nn.Module) -> None:
    for index, parameter in enumerate(module.parameters()):
        parameter.data = 0.2 * draw(*parameter.shape, seed=index) + (parameter.dim() == 1)


def causal_bias(length: int) -> Tensor:
    return torch.zeros(length, length).masked_fill(~visible_keys(length, length, None, None, CPU)[0, 0], -torch.inf)


def fla_naive(op: str) -> ModuleType:
    """A plain torch file of flash-linear-attention, loaded alone: its packages import triton."""
    package = importlib.util.find_spec("fla")
    assert package is not None
    assert package.submodule_search_locations is not None
    file = next(Path(place) / "ops" / op / "naive.py" for place in package.submodule_search_locations)
    spec = importlib.util.spec_from_file_location(f"fla_naive_{op}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_softmax_equals_torch_multihead_attention(compared: Compare) -> None:
    ours = Softmax(kv_heads=4, head_dim=12).build(DIMS)
    assert isinstance(ours, AttentionModule)
    theirs = nn.MultiheadAttention(48, 4, bias=False, batch_first=True)
    theirs.in_proj_weight.data = torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]).detach()
    theirs.out_proj.weight.data = ours.out.weight.detach()
    x = draw(2, LENGTH, 48)
    expected, _ = theirs(x, x, x, attn_mask=causal_bias(LENGTH), need_weights=False)
    compared("mixer.softmax", "torch nn.MultiheadAttention", ours(x, PLAIN, Context()), expected, rtol=1e-4, atol=1e-6)


def test_grouped_rotary_attention_with_rms_norm_equals_qwen3(compared: Compare) -> None:
    ours = Softmax(kv_heads=2, queries_per_kv=2, head_dim=16, qk_norm="rms").build(DIMS)
    assert isinstance(ours, AttentionModule)
    drawn(ours)
    config = Qwen3Config(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16, attn_implementation="eager"
    )
    theirs = Qwen3Attention(config, layer_idx=0)
    pairs = {
        "q_proj": ours.query.weight,
        "k_proj": ours.key.weight,
        "v_proj": ours.value.weight,
        "o_proj": ours.out.weight,
        "q_norm": ours.query_norm.norm.weight,
        "k_norm": ours.key_norm.norm.weight,
    }
    theirs.load_state_dict({f"{name}.weight": weight for name, weight in pairs.items()})
    x = draw(2, LENGTH, 48)
    rotary = Qwen3RotaryEmbedding(config)(x, torch.arange(LENGTH)[None])
    expected, _ = theirs(x, position_embeddings=rotary, attention_mask=causal_bias(LENGTH)[None, None])
    position = Rotary().build(DIMS, HeadShape(heads=4, kv_heads=2, head_dim=16))
    compared(
        "mixer.softmax", "transformers Qwen3Attention", ours(x, position, Context()), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_rotary_equals_llama(compared: Compare, base: float) -> None:
    q, k = draw(2, 4, LENGTH, 16), draw(2, 2, LENGTH, 16, seed=1)
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": base}
    )
    cos, sin = LlamaRotaryEmbedding(config)(q, torch.arange(LENGTH)[None])
    theirs = apply_rotary_pos_emb(q, k, cos, sin)
    position = Rotary(base=base).build(DIMS, HeadShape(heads=4, kv_heads=2, head_dim=16))
    ours = position.rotate(q.transpose(1, 2), k.transpose(1, 2))
    for a, b in zip(ours, theirs, strict=True):
        compared(
            "position.rotary", "transformers apply_rotary_pos_emb of Llama", a.transpose(1, 2), b, rtol=1e-5, atol=1e-5
        )


def halves(x: Tensor) -> Tensor:
    """Channels 0, 2, ..., 1, 3, ...: interleaved pairs brought to half-split order."""
    return rearrange(x, "... (pair two) -> ... (two pair)", two=2)


def test_rotary_equals_x_transformers_up_to_the_order_of_channels(compared: Compare) -> None:
    q = draw(2, 4, LENGTH, 16)
    frequencies, _ = x_transformers.RotaryEmbedding(16).forward_from_seq_len(LENGTH)
    theirs = halves(x_transformers.apply_rotary_pos_emb(q, frequencies))
    split = halves(q).transpose(1, 2)
    ours, _ = Rotary().build(DIMS, HeadShape(heads=4, kv_heads=4, head_dim=16)).rotate(split, split)
    compared("position.rotary", "x-transformers RotaryEmbedding", ours.transpose(1, 2), theirs, rtol=1e-5, atol=1e-5)


def test_xpos_scores_equal_x_transformers(compared: Compare) -> None:
    q, k = draw(2, 4, LENGTH, 16), draw(2, 4, LENGTH, 16, seed=1)
    frequencies, scale = x_transformers.RotaryEmbedding(16, use_xpos=True).forward_from_seq_len(LENGTH)
    their_q = x_transformers.apply_rotary_pos_emb(q, frequencies, scale)
    their_k = x_transformers.apply_rotary_pos_emb(k, frequencies, scale**-1)
    position = Xpos().build(DIMS, HeadShape(heads=4, kv_heads=4, head_dim=16))
    our_q, our_k = position.rotate(halves(q).transpose(1, 2), halves(k).transpose(1, 2))
    ours = torch.einsum("bthk,bshk->bhts", our_q, our_k)
    compared(
        "position.xpos",
        "x-transformers RotaryEmbedding(use_xpos=True)",
        ours,
        their_q @ their_k.transpose(-1, -2),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("heads", [1, 5, 8, 12, 16])
def test_alibi_equals_bloom_up_to_a_shift_per_row_and_x_transformers(compared: Compare, heads: int) -> None:
    ours = Alibi().build(DIMS, HeadShape(heads=heads, kv_heads=heads, head_dim=8)).score_bias(LENGTH, LENGTH)
    assert ours is not None
    bloom = build_alibi_tensor(torch.ones(1, LENGTH), heads, torch.float32)
    gap = ours - bloom
    compared(
        "position.alibi",
        "transformers build_alibi_tensor of Bloom",
        ours.tril(),
        (bloom + gap[:, :, :1]).tril(),
        rtol=0,
        atol=2e-5,
    )
    other = x_transformers.AlibiPositionalBias(heads)
    torch.testing.assert_close(slopes(heads, CPU), other.slopes.flatten())
    compared("position.alibi", "x-transformers AlibiPositionalBias", ours.tril(), other(LENGTH, LENGTH).tril())


def test_t5_buckets_and_bias_equal_transformers_and_x_transformers(compared: Compare) -> None:
    relative = torch.arange(-400, 400)[None]
    ours = buckets(-relative)
    theirs = T5Attention._relative_position_bucket(relative, bidirectional=False, num_buckets=32, max_distance=128)
    compared("position.t5_bias", "transformers buckets of T5Attention", ours, theirs, rtol=0, atol=0)
    others = x_transformers.RelativePositionBias._relative_position_bucket(relative, causal=True)
    compared("position.t5_bias", "x-transformers buckets of RelativePositionBias", ours, others, rtol=0, atol=0)
    module = T5Bias().build(DIMS, HeadShape(heads=4, kv_heads=4, head_dim=8))
    assert isinstance(module, T5BiasModule)
    drawn(module)
    other = x_transformers.RelativePositionBias(scale=1.0, causal=True, heads=4)
    other.relative_attention_bias.weight.data = module.table.detach()
    compared(
        "position.t5_bias",
        "x-transformers RelativePositionBias",
        module.score_bias(5, LENGTH, LENGTH - 5),
        other(5, LENGTH),
    )


def test_sinusoids_equal_marian_up_to_the_order_of_channels(compared: Compare) -> None:
    theirs = MarianSinusoidalPositionalEmbedding(LENGTH, MarianConfig(d_model=48).d_model).create_weight()
    compared(
        "position.sinusoidal",
        "transformers MarianSinusoidalPositionalEmbedding",
        halves(sinusoids(0, LENGTH, 48, CPU, torch.float32)),
        theirs,
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("window", [1, 4, 63, 100])
def test_window_sees_the_keys_mistral_sees(compared: Compare, window: int) -> None:
    place = torch.arange(LENGTH)
    query, key = place[:, None], place[None, :]
    theirs = causal_mask_function(0, 0, query, key) & sliding_window_overlay(window)(0, 0, query, key)
    ours = visible_keys(LENGTH, LENGTH, window, None, CPU)[0, 0]
    compared("mixer.sliding_window", "transformers sliding_window_overlay", ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("feature_map", ["elu", "relu_squared"])
@pytest.mark.parametrize("length", [63, 128])
def test_linear_attention_equals_flash_linear_attention(compared: Compare, feature_map: str, length: int) -> None:
    naive = fla_naive("linear_attn")
    ours = dataclasses.replace(Linear(heads=2, head_dim=16), feature_map=feature_map).build(DIMS)
    assert isinstance(ours, LinearModule)
    drawn(ours)
    x = draw(2, length, 48)
    q, k, v = ours._project(x)
    mixed, _ = naive.naive_recurrent_linear_attn(q, k, v, normalize=True)
    compared(
        "mixer.linear",
        "flash-linear-attention naive_recurrent_linear_attn",
        ours(x, PLAIN, Context()),
        ours.out(mixed.flatten(2)),
        rtol=1e-4,
        atol=1e-5,
    )
    if length % 64 == 0:
        chunks = naive.naive_chunk_linear_attn(q, k, v, normalize=True)
        compared(
            "mixer.linear",
            "flash-linear-attention naive_chunk_linear_attn",
            ours(x, PLAIN, Context()),
            ours.out(chunks.flatten(2)),
            rtol=1e-4,
            atol=1e-5,
        )
