"""Partial, thinned, scaled and layered rotations: their reductions, their numbers, and other people's code."""

import dataclasses
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from placed import CPU, DIMS, LONG, SHAPE, draw, logits, queries_and_keys
from reference_table import Compare
from torch import Tensor

from blocks.families import AbstractPosition, HeadShape, InfeasibleArchitecture
from blocks.model import ModelConfig
from blocks.ops.turning import (
    interpolated_frequencies,
    llama3_frequencies,
    ntk_frequencies,
    plain_frequencies,
    yarn_factor,
    yarn_frequencies,
)
from blocks.positions.none import NoPosition
from blocks.positions.nope_layers import NopeLayers
from blocks.positions.p_rope import PRope
from blocks.positions.rope_partial import RopePartial
from blocks.positions.rope_scaled import RopeScaled
from blocks.positions.rotary import Rotary

pytestmark = pytest.mark.slow

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=DeprecationWarning)
    from transformers import GPTNeoXConfig, LlamaConfig, SmolLM3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding, apply_rotary_pos_emb

Make = Callable[..., ModelConfig]
METHODS = ("interpolate", "ntk", "yarn", "llama3")
WIDE = torch.float64


def rotated(config: AbstractPosition, training: bool = False) -> tuple[Tensor, Tensor]:
    return config.build(DIMS, SHAPE).train(training).rotate(*queries_and_keys())


@pytest.mark.parametrize(("config", "simpler"), [
    (RopePartial(fraction=0.0), NoPosition()),
    (RopePartial(fraction=1.0), Rotary()),
    (PRope(kept=0.0), NoPosition()),
    (PRope(kept=1.0), Rotary()),
    (NopeLayers(every=1), NoPosition()),
    (NopeLayers(every=5, base=1000.0), Rotary(base=1000.0)),
    *((RopeScaled(method=method, base=1000.0), Rotary(base=1000.0)) for method in METHODS),
])  # fmt: skip
def test_settings_that_equal_a_simpler_scheme_are_canonicalised_to_it(
    config: AbstractPosition, simpler: AbstractPosition
) -> None:
    assert config.canonical(DIMS) == simpler
    layers = range(DIMS.layers)
    for one, other in zip(map(config.at_layer, layers), map(simpler.at_layer, layers), strict=True):
        for x, y in zip(rotated(one), rotated(other), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("config", [RopePartial(), PRope(), NopeLayers(), NopeLayers(every=4)])
def test_settings_inside_the_domain_are_schemes_of_their_own(config: AbstractPosition) -> None:
    assert config.canonical(DIMS) == config


def test_scaling_is_a_scheme_of_its_own_where_evaluation_is_longer_than_training() -> None:
    for method in METHODS:
        assert RopeScaled(method=method).canonical(LONG) == RopeScaled(method=method)


def test_partial_rotation_equals_gpt_neox(compared: Compare) -> None:
    q, k = queries_and_keys(shape=dataclasses.replace(SHAPE, kv_heads=4))
    config = GPTNeoXConfig(
        hidden_size=64, num_attention_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    )  # fmt: skip
    q, k = q.float(), k.float()
    cos, sin = GPTNeoXRotaryEmbedding(config)(q, torch.arange(q.shape[1])[None])
    theirs = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    ours = RopePartial(fraction=0.25).build(DIMS, SHAPE).rotate(q, k)
    for a, b in zip(ours, theirs, strict=True):
        compared(
            "position.rope_partial",
            "transformers apply_rotary_pos_emb of GPT-NeoX",
            a.transpose(1, 2),
            b,
            rtol=1e-5,
            atol=1e-5,
        )
    torch.testing.assert_close(ours[0][..., 4:], q[..., 4:], rtol=0, atol=0)


def test_p_rope_turns_the_highest_frequencies_and_no_other() -> None:
    q, _ = queries_and_keys()
    (ours, _), (full, _) = rotated(PRope(kept=0.25)), rotated(Rotary())
    turning = [0, 1, 8, 9]
    still = [channel for channel in range(16) if channel not in turning]
    torch.testing.assert_close(ours[..., turning], full[..., turning])
    torch.testing.assert_close(ours[..., still], q[..., still], rtol=0, atol=0)


def test_ntk_keeps_the_first_frequency_and_divides_the_last_by_the_scale() -> None:
    ratio = ntk_frequencies(64, 10000.0, 8.0, CPU, WIDE) / plain_frequencies(64, 10000.0, CPU, WIDE)
    assert ratio[0] == 1
    assert ratio[-1].item() == pytest.approx(1 / 8, rel=1e-12)
    assert (ratio.diff() < 0).all()


def test_yarn_leaves_fast_pairs_interpolates_slow_ones_and_sharpens_by_the_published_factor() -> None:
    ratio = yarn_frequencies(128, 10000.0, 4.0, 4096, CPU, WIDE) / plain_frequencies(128, 10000.0, CPU, WIDE)
    assert ratio[0] == 1
    assert ratio[-1] == 0.25
    assert yarn_factor(4.0) == pytest.approx(1.1386, abs=5e-5)
    q, k = queries_and_keys()
    stretched = RopeScaled(method="yarn").build(LONG, SHAPE).eval()
    norms = stretched.rotate(q, k)[0].norm(dim=-1) / q.norm(dim=-1)
    torch.testing.assert_close(norms, torch.full_like(norms, 0.1 * math.log(4) + 1))


def test_interpolation_is_rotation_at_positions_divided_by_the_scale() -> None:
    q = draw(1, 1, 4, 16).expand(1, 33, 4, 16)
    stretched, _ = RopeScaled(method="interpolate").build(LONG, SHAPE).eval().rotate(q, q)
    plain, _ = Rotary().build(DIMS, SHAPE).rotate(q[:, :9], q[:, :9])
    torch.testing.assert_close(stretched[:, ::4], plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("train_len", [64, 512, 4096])
@pytest.mark.parametrize(("name", "ours"), [
    ("linear", lambda scale, length: interpolated_frequencies(32, 10000.0, scale, CPU, torch.float32)),
    ("dynamic", lambda scale, length: ntk_frequencies(32, 10000.0, scale, CPU, torch.float32)),
    ("yarn", lambda scale, length: yarn_frequencies(32, 10000.0, scale, length, CPU, torch.float32)),
    ("llama3", lambda scale, length: llama3_frequencies(32, 10000.0, scale, length, CPU, torch.float32)),
])  # fmt: skip
def test_scaled_frequencies_equal_transformers(
    compared: Compare, name: str, ours: Callable[..., Tensor], train_len: int
) -> None:
    scale = 4.0
    # Its dynamic form takes the scale from the length at hand: base * (f n / N - (f - 1))^(d / (d - 2)).
    parameters = {
        "rope_type": name, "rope_theta": 10000.0, "factor": 1.0 if name == "dynamic" else scale,
        "original_max_position_embeddings": train_len, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    }  # fmt: skip
    kept = {
        "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor", "original_max_position_embeddings"),
        "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    }[name]  # fmt: skip
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=4, max_position_embeddings=train_len * (1 if name == "dynamic" else 4),
        rope_parameters={key: parameters[key] for key in ("rope_type", "rope_theta", *kept)},
    )  # fmt: skip
    theirs, factor = ROPE_INIT_FUNCTIONS[name](config, CPU, seq_len=int(scale * train_len))
    compared(
        "position.rope_scaled",
        f"transformers ROPE_INIT_FUNCTIONS[{name!r}]",
        ours(scale, train_len),
        theirs,
        rtol=1e-5,
        atol=0,
    )
    assert factor == pytest.approx(yarn_factor(scale) if name == "yarn" else 1.0)


@pytest.mark.parametrize("method", METHODS)
def test_scaling_stretches_evaluation_and_leaves_training_alone(method: str) -> None:
    position = RopeScaled(method=method).build(LONG, SHAPE)
    q, k = queries_and_keys()
    plain = Rotary().build(LONG, SHAPE).rotate(q, k)[0]
    torch.testing.assert_close(position.train().rotate(q, k)[0], plain, rtol=0, atol=0)
    assert (position.eval().rotate(q, k)[0] - plain).abs().max() > 1e-3


@pytest.mark.parametrize("config", [RopePartial(), PRope(), *(RopeScaled(method=method) for method in METHODS)])
def test_scores_depend_on_distance_only_and_rows_may_start_anywhere(config: AbstractPosition) -> None:
    position = config.build(LONG, SHAPE).eval()
    q, k = (x[:, :1].expand(-1, 50, -1, -1) for x in queries_and_keys())
    scores = logits(position, q, k)
    torch.testing.assert_close(scores[..., 1:, 1:], scores[..., :-1, :-1], rtol=1e-10, atol=1e-10)
    whole_q, whole_k = position.rotate(q, k)
    part_q, part_k = position.rotate(q[:, 41:], k, 41)
    torch.testing.assert_close(part_q, whole_q[:, 41:])
    torch.testing.assert_close(part_k, whole_k)


def test_every_kth_layer_has_no_positions_as_in_smollm3(small: Make) -> None:
    theirs = SmolLM3Config(num_hidden_layers=8, no_rope_layer_interval=3).no_rope_layers
    ours = [NopeLayers(every=3).at_layer(layer) for layer in range(8)]
    assert [int(scheme == Rotary()) for scheme in ours] == theirs
    assert all(scheme in (Rotary(), NoPosition()) for scheme in ours)
    model = small({"position.kind": "nope_layers", "position.nope_layers.every": 3, "layers": 8}).build(seed=0)
    assert [index == model.layer_position[0] for index in model.layer_position] == [bool(turns) for turns in theirs]


def test_a_stretched_model_decodes_past_its_training_length_as_it_runs(small: Make) -> None:
    config = small({"position.kind": "rope_scaled"}, train_len=16, max_len=64)
    model = config.build(seed=0).eval()
    tokens = torch.randint(48, (2, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, _ = model(tokens)
        _, state = model.step(tokens[:, :10], model.empty_state(2), 0)
        first, state = model.step(tokens[:, 10:33], state, 10)
        rest, _ = model.step(tokens[:, 33:], state, 33)
    torch.testing.assert_close(torch.cat([first, rest], dim=1), whole[:, 10:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("config", "head_dim", "message"), [
    (RopePartial(fraction=0.25), 12, "even number"),
    (RopePartial(fraction=1.5), 16, "none to all"),
    (PRope(kept=0.25), 12, "whole number"),
    (PRope(), 15, "even head_dim"),
    (RopeScaled(), 15, "even head_dim"),
    (RopeScaled(method="ntk"), 2, "at least 4"),
    (NopeLayers(), 15, "even head_dim"),
])  # fmt: skip
def test_heads_that_do_not_divide_are_refused(config: AbstractPosition, head_dim: int, message: str) -> None:
    with pytest.raises(InfeasibleArchitecture, match=message):
        config.check(DIMS, HeadShape(heads=4, kv_heads=4, head_dim=head_dim))
