"""Init rules: measured standard deviations, growth of the residual stream, and seeds."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from blocks import registry
from blocks.families import AbstractInit, Role
from blocks.init import initialise
from blocks.inits.standard import ScaledNormal, SmallInit, Xavier
from blocks.model import DecoderLM, ModelConfig

Make = Callable[..., ModelConfig]

D, FF, VOCAB, LAYERS = 320, 640, 512, 3
INNER, KV_INNER = 512, 256
"""4 key/value heads x 2 queries x head width 64; keys and values are half as wide."""
EXPECTED = {
    "scaled_normal": {
        **dict.fromkeys(["embedding", "head", "query", "key", "value", "ffn_gate", "ffn_in"], 0.02),
        **dict.fromkeys(["mixer_out", "ffn_out"], 0.02 / math.sqrt(2 * LAYERS)),
    },
    "xavier": {
        "embedding": 1 / math.sqrt(D),
        "head": math.sqrt(2 / (D + VOCAB)),
        "query": math.sqrt(2 / (D + INNER)),
        "mixer_out": math.sqrt(2 / (D + INNER)),
        "key": math.sqrt(2 / (D + KV_INNER)),
        "value": math.sqrt(2 / (D + KV_INNER)),
        **dict.fromkeys(["ffn_gate", "ffn_in", "ffn_out"], math.sqrt(2 / (D + FF))),
    },
    "small_init": {
        **dict.fromkeys(["embedding", "head", "query", "key", "value", "ffn_gate", "ffn_in"], math.sqrt(2 / (5 * D))),
        **dict.fromkeys(["mixer_out", "ffn_out"], 2 / (LAYERS * math.sqrt(D))),
    },
}


def wide(small: Make, init: str, **changes: object) -> ModelConfig:
    heads = {"mixer.softmax.kv_heads": 4, "mixer.softmax.queries_per_kv": 2, "mixer.softmax.head_dim": 64}
    return small(
        {"d_model": D, "layers": LAYERS, "tied": False, "init.kind": init, **heads, **changes},
        vocab_size=VOCAB,
        d_ff=FF,
    )


def measured(model: DecoderLM) -> dict[str, float]:
    """Standard deviation by role, over the layers together."""
    by_role: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        by_role.setdefault(str(model.roles[name]), []).append(parameter.detach().flatten())
    joined = {role: torch.cat(parts) for role, parts in by_role.items()}
    return {role: float(values.std()) for role, values in joined.items() if values.numel() >= 10**5}


@pytest.mark.parametrize("init", EXPECTED)
def test_every_matrix_has_the_standard_deviation_of_its_rule(small: Make, init: str) -> None:
    found = measured(wide(small, init).build(seed=3))
    assert found.keys() == EXPECTED[init].keys()
    for role, std in EXPECTED[init].items():
        assert found[role] == pytest.approx(std, rel=0.05), role


def test_every_rule_has_expected_values() -> None:
    assert EXPECTED.keys() == registry.variants(AbstractInit).keys()


def test_uniform_xavier_has_the_same_deviation_inside_bounds(small: Make) -> None:
    model = wide(small, "xavier", **{"init.xavier.distribution": "uniform"}).build(seed=3)
    for role, std in measured(model).items():
        assert std == pytest.approx(EXPECTED["xavier"][role], rel=0.05), role
    (query,) = (p for name, p in model.named_parameters() if name == "layers.0.mixer.mixer.query.weight")
    bound = math.sqrt(6 / (D + INNER))
    assert 0.99 * bound < query.abs().max() <= bound


@pytest.mark.parametrize("init", EXPECTED)
def test_a_tied_table_keeps_the_deviation_of_an_embedding(small: Make, init: str) -> None:
    tied = small({"d_model": D, "init.kind": init}, vocab_size=VOCAB).build(seed=3)
    assert float(tied.embedding.detach().std()) == pytest.approx(EXPECTED[init]["embedding"], rel=0.05)
    assert Role.HEAD not in tied.roles.values()


@pytest.mark.parametrize("init", EXPECTED)
def test_learned_positions_are_drawn_like_an_embedding(small: Make, init: str) -> None:
    config = small({"d_model": D, "init.kind": init, "position.kind": "learned"}, train_len=400, max_len=400)
    (table,) = (p for p in config.build(seed=3).positions.parameters())
    assert table.numel() >= 10**5
    assert float(table.detach().std()) == pytest.approx(EXPECTED[init]["embedding"], rel=0.05)


def test_catalogue_values_of_xavier() -> None:
    xavier = Xavier()
    assert xavier.std(Role.QUERY, 512, 512, 1) == pytest.approx(0.0442, abs=5e-5)
    assert xavier.std(Role.FFN_IN, 512, 2048, 1) == pytest.approx(0.0280, abs=5e-5)


def test_small_init_values_do_not_depend_on_the_ffn_width() -> None:
    small_init = SmallInit()
    assert small_init.std(Role.FFN_OUT, 2048, 512, 6) == small_init.std(Role.MIXER_OUT, 512, 512, 6)
    assert small_init.std(Role.FFN_IN, 512, 2048, 6) == pytest.approx(math.sqrt(2 / (5 * 512)))


def residual_growth(config: ModelConfig) -> float:
    """Variance that the layers add to the residual stream of a fresh model."""
    streams: list[torch.Tensor] = []
    model = config.build(seed=1).eval()
    hooks = [model.layers[0].register_forward_pre_hook(lambda _, args: streams.append(args[0]))]
    hooks.append(model.layers[-1].register_forward_hook(lambda _, args, out: streams.append(out)))
    tokens = torch.randint(config.vocab_size, (4, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return float((streams[1] - streams[0]).var())


@pytest.mark.parametrize(("init", "growth"), [("scaled_normal", 1.0), ("xavier", 4.0)])
def test_scaled_residuals_add_the_same_variance_at_any_depth(small: Make, init: str, growth: float) -> None:
    """A window of one token keeps the layers' contributions independent of each other."""
    changes = {"d_model": 128, "init.kind": init, "mixer.kind": "sliding_window", "position.kind": "none"}
    plain = registry.encode(small({**changes, "mixer.sliding_window.head_dim": 32}, vocab_size=512, d_ff=256))
    plain["mixer"]["sliding_window"]["window"] = 1
    shallow, deep = (residual_growth(registry.decode(ModelConfig, {**plain, "layers": layers})) for layers in (4, 16))
    assert deep / shallow == pytest.approx(growth, rel=0.1)


def test_parameters_are_drawn_by_name_and_seed_alone(small: Make) -> None:
    two, three = (small({"layers": layers, "init.kind": "xavier"}).build(seed=5) for layers in (2, 3))
    shared = dict(three.named_parameters())
    for name, parameter in two.named_parameters():
        assert torch.equal(parameter, shared[name]), name
    first, second = (two.layers[index].ffn.w_in.weight for index in (0, 1))
    assert not torch.equal(first, second)


def test_a_parameter_without_a_role_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="parameter weight has no role"):
        initialise(nn.Linear(2, 2, bias=False), ScaledNormal(), layers=1, seed=0)
