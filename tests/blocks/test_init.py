"""Init rules: measured standard deviations, growth of the residual stream, and seeds."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from blocks import registry
from blocks.families import MATRICES, AbstractInit, AbstractMixer, AbstractPlacement, Dims, InfeasibleArchitecture, Role
from blocks.init import initialise, related
from blocks.inits.draws import kept
from blocks.inits.shaped import TruncatedNormal
from blocks.inits.standard import ScaledNormal, SmallInit, Table, Xavier
from blocks.legality import can_relate
from blocks.model import DecoderLM, ModelConfig

Make = Callable[..., ModelConfig]

D, FF, VOCAB, LAYERS = 320, 640, 512, 3
INNER, KV_INNER = 512, 256
"""4 key/value heads x 2 queries x head width 64; keys and values are half as wide."""
XAVIER = {
    "embedding": 1 / math.sqrt(D),
    "head": math.sqrt(2 / (D + VOCAB)),
    "query": math.sqrt(2 / (D + INNER)),
    "mixer_out": math.sqrt(2 / (D + INNER)),
    "key": math.sqrt(2 / (D + KV_INNER)),
    "value": math.sqrt(2 / (D + KV_INNER)),
    **dict.fromkeys(["ffn_gate", "ffn_in", "ffn_out"], math.sqrt(2 / (D + FF))),
}
INPUTS = ("query", "key", "value", "ffn_gate", "ffn_in")
OUTPUTS = ("mixer_out", "ffn_out")
BRANCH_VALUES = ("value", "mixer_out", "ffn_gate", "ffn_in", "ffn_out")
LECUN = {
    **dict.fromkeys(["embedding", "head", *INPUTS], D**-0.5),
    "mixer_out": INNER**-0.5,
    "ffn_out": FF**-0.5,
}


def scaled(values: dict[str, float], roles: tuple[str, ...], factor: float) -> dict[str, float]:
    return {role: std * factor if role in roles else std for role, std in values.items()}


EXPECTED = {
    "scaled_normal": {
        **dict.fromkeys(["embedding", "head", "query", "key", "value", "ffn_gate", "ffn_in"], 0.02),
        **dict.fromkeys(["mixer_out", "ffn_out"], 0.02 / math.sqrt(2 * LAYERS)),
    },
    "xavier": XAVIER,
    "small_init": {
        **dict.fromkeys(["embedding", "head", "query", "key", "value", "ffn_gate", "ffn_in"], math.sqrt(2 / (5 * D))),
        **dict.fromkeys(["mixer_out", "ffn_out"], 2 / (LAYERS * math.sqrt(D))),
    },
    "wang": {**LECUN, **dict.fromkeys(OUTPUTS, 2 / (LAYERS * math.sqrt(D)))},
    "lecun": LECUN,
    "kaiming": scaled(LECUN, ("head", *INPUTS, *OUTPUTS), math.sqrt(2)),
    "table": {
        **XAVIER,
        "head": D**-0.5,
        **dict.fromkeys(OUTPUTS, 0.02 / math.sqrt(2 * LAYERS)),
    },
    "truncated_normal": {
        **dict.fromkeys(["embedding", "head", *INPUTS], 0.02),
        **dict.fromkeys(OUTPUTS, 0.02 / math.sqrt(2 * LAYERS)),
    },
    "orthogonal": {
        "embedding": D**-0.5,
        "head": VOCAB**-0.5,
        "query": INNER**-0.5,
        "mixer_out": INNER**-0.5,
        **dict.fromkeys(["key", "value"], D**-0.5),
        **dict.fromkeys(["ffn_gate", "ffn_in", "ffn_out"], FF**-0.5),
    },
    "zero_outputs": {
        "embedding": 1.0,
        "head": 0.001,
        **dict.fromkeys(INPUTS, D**-0.5),
        **dict.fromkeys(OUTPUTS, 0.0),
    },
    "depth_scaled": {
        "embedding": 1.0,
        "head": D**-0.5,
        **dict.fromkeys(INPUTS, 0.02),
        **dict.fromkeys(OUTPUTS, 0.02 * math.sqrt(sum(1 / (2 * layer) for layer in range(1, LAYERS + 1)) / LAYERS)),
    },
    "t_fixup": scaled(XAVIER, ("embedding", *BRANCH_VALUES), 0.67 * LAYERS**-0.25),
    "fixup": {
        "embedding": D**-0.5,
        "head": 0.0,
        **dict.fromkeys(INPUTS, math.sqrt(2 / D) / math.sqrt(2 * LAYERS)),
        **dict.fromkeys(OUTPUTS, 0.0),
    },
    "deepnorm": scaled(XAVIER, BRANCH_VALUES, (8 * LAYERS) ** -0.25),
    "magneto": scaled(XAVIER, BRANCH_VALUES, math.sqrt(math.log(2 * LAYERS))),
    "mup": {**LECUN, "embedding": 0.02, "head": 64**-0.5},
    "complete_p": {**LECUN, "embedding": 0.02, "head": 64**-0.5},
}
RELATED = {"mimetic"}
"""Rules whose matrices are not independent draws: their own tests follow."""


def placed(init: str) -> dict[str, str]:
    """The rule, and the placement it needs."""
    needs = registry.lookup(AbstractInit, init).needs
    able = (kind for kind, other in registry.variants(AbstractPlacement).items() if needs <= other.provides)
    return {"init.kind": init, "placement.kind": next(able) if needs else "pre"}


def wide(small: Make, init: str, **changes: object) -> ModelConfig:
    heads = {"mixer.softmax.kv_heads": 4, "mixer.softmax.queries_per_kv": 2, "mixer.softmax.head_dim": 64}
    return small(
        {"d_model": D, "layers": LAYERS, "tied": False, **placed(init), **heads, **changes},
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
    assert EXPECTED.keys() | RELATED == registry.variants(AbstractInit).keys()


def test_uniform_xavier_has_the_same_deviation_inside_bounds(small: Make) -> None:
    model = wide(small, "xavier", **{"init.xavier.distribution": "uniform"}).build(seed=3)
    for role, std in measured(model).items():
        assert std == pytest.approx(EXPECTED["xavier"][role], rel=0.05), role
    (query,) = (p for name, p in model.named_parameters() if name == "layers.0.mixer.mixer.query.weight")
    bound = math.sqrt(6 / (D + INNER))
    assert 0.99 * bound < query.abs().max() <= bound


@pytest.mark.parametrize("init", EXPECTED)
def test_a_tied_table_keeps_the_deviation_of_an_embedding(small: Make, init: str) -> None:
    tied = small({"d_model": D, "layers": LAYERS, **placed(init)}, vocab_size=VOCAB).build(seed=3)
    assert float(tied.embedding.detach().std()) == pytest.approx(EXPECTED[init]["embedding"], rel=0.05)
    assert Role.HEAD not in tied.roles.values()


@pytest.mark.parametrize("init", EXPECTED)
def test_learned_positions_are_drawn_like_an_embedding(small: Make, init: str) -> None:
    config = small(
        {"d_model": D, "layers": LAYERS, **placed(init), "position.kind": "learned"}, train_len=400, max_len=400
    )
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


def test_the_table_as_printed_is_he_s_rule_and_not_xavier_s() -> None:
    printed, read = Table(reading="printed"), Table(reading="xavier")
    assert printed.std(Role.QUERY, 512, 512, 6) == pytest.approx(math.sqrt(2 / 512))
    assert read.std(Role.QUERY, 512, 512, 6) == pytest.approx(0.0442, abs=5e-5)
    for table in (printed, read):
        assert table.std(Role.EMBEDDING, 1000, 512, 6) == pytest.approx(512**-0.5)
        assert table.std(Role.FFN_OUT, 2048, 512, 6) == pytest.approx(0.02 / math.sqrt(12))


@pytest.mark.parametrize(("cut", "share"), [(2.0, 0.879), (3.0, 0.986)])
def test_cutting_the_tails_lowers_the_deviation_unless_it_is_restored(small: Make, cut: float, share: float) -> None:
    assert kept(cut) == pytest.approx(share, abs=1e-3)
    stds = {}
    for rescaled in (True, False):
        rule = TruncatedNormal(cut=cut, rescaled=rescaled)
        weight = torch.empty(400, 400)
        rule.fill(weight, rule.std(Role.QUERY, 400, 400, 1), torch.Generator().manual_seed(0))
        stds[rescaled] = float(weight.std())
        assert float(weight.abs().max()) <= cut * 0.02 / (kept(cut) if rescaled else 1)
    assert stds[True] == pytest.approx(0.02, rel=0.01)
    assert stds[False] == pytest.approx(share * 0.02, rel=0.01)


def test_depth_scaled_outputs_shrink_layer_by_layer(small: Make) -> None:
    model = wide(small, "depth_scaled").build(seed=3)
    for index, layer in enumerate(model.layers):
        assert float(layer.ffn.w_out.weight.detach().std()) == pytest.approx(
            0.02 / math.sqrt(2 * (index + 1)), rel=0.05
        )


def test_orthogonal_matrices_are_rotations_as_far_as_their_shape_allows(small: Make) -> None:
    model = wide(small, "orthogonal").build(seed=3)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and name != "embedding":
            spectrum = torch.linalg.svdvals(parameter)
            torch.testing.assert_close(spectrum, torch.ones_like(spectrum), rtol=1e-3, atol=1e-3)


def test_orthogonal_experts_are_rotations_each(small: Make) -> None:
    model = small({"ffn.kind": "moe", "init.kind": "orthogonal"}).build(seed=3)
    spectrum = torch.linalg.svdvals(model.layers[0].ffn.w_in)
    torch.testing.assert_close(spectrum, torch.ones_like(spectrum), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(model.layers[0].ffn.w_in[0], model.layers[0].ffn.w_in[1])


@pytest.mark.parametrize("queries", [1, 2])
def test_mimetic_products_lie_near_plus_and_minus_the_identity(small: Make, queries: int) -> None:
    """Heads as wide as the model make the factors exact."""
    heads = {"mixer.softmax.kv_heads": 2, "mixer.softmax.queries_per_kv": queries, "mixer.softmax.head_dim": 64}
    mixer = small({"d_model": 64, "init.kind": "mimetic", **heads}).build(seed=3).slots[0].mixer.requires_grad_(False)
    for head in range(2 * queries):
        q, o = (part.unflatten(0, (2 * queries, 64))[head] for part in (mixer.query.weight, mixer.out.weight.T))
        k, v = (part.weight.unflatten(0, (2, 64))[head // queries] for part in (mixer.key, mixer.value))
        for product, (noise, identity) in ((q.T @ k, (0.7, 0.7)), (o.T @ v, (0.4, -0.4))):
            assert float(product.diagonal().mean()) == pytest.approx(identity, abs=0.1)
            off = product - torch.diag(product.diagonal())
            assert float(off.norm()) == pytest.approx(noise * 8, rel=0.1)


@pytest.mark.parametrize("mixer", ["retention", "gla", "softmax"])
def test_mimetic_relates_queries_not_gates_to_keys(small: Make, mixer: str) -> None:
    gate = {"mixer.softmax.gate": "channel"} if mixer == "softmax" else {}
    model = small({"mixer.kind": mixer, "position.kind": "none", "init.kind": "mimetic", **gate}).build(seed=3)
    named, heads = dict(model.slots[0].mixer.named_parameters()), model.config.mixer.head_shape()
    query, key = (
        next(p.detach() for n, p in named.items() if n.endswith(f"{part}.weight")) for part in ("query", "key")
    )
    q, k = query.unflatten(0, (heads.heads, -1))[0], key.unflatten(0, (heads.kv_heads, -1))[0]
    assert float((q.T @ k).trace()) > q.shape[0] / 2, "near 0.7 in as many directions as a head has channels"


@pytest.mark.parametrize(
    "changes",
    [
        {"mixer.kind": "softmax", "mixer.softmax.head_dim": 64},
        {"mixer.kind": "retention", "mixer.retention.head_dim": 16, "mixer.retention.value_factor": 2},
    ],
)
def test_mimetic_draws_heads_wider_than_the_model_and_queries_of_another_width(
    small: Make, changes: dict[str, object]
) -> None:
    model = small({**changes, "position.kind": "none", "init.kind": "mimetic"}).build(seed=3)
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        assert parameter.role not in MATRICES or parameter.abs().max() > 0, name


@pytest.mark.parametrize(
    "changes", [{"mixer.kind": "mla"}, {"mixer.kind": "mla", "mixer.mla.heads": 1}, {"mixer.kind": "mamba2"}]
)
def test_mimetic_is_refused_where_it_would_relate_nothing(small: Make, changes: dict[str, object]) -> None:
    changes = {**changes, "position.kind": "none", "init.kind": "mimetic"}
    with pytest.raises(InfeasibleArchitecture, match=r"model\.init\.kind='mimetic'.*model\.mixer.*that do:.*softmax"):
        small(changes)
    hybrid = small({**changes, "pattern.kind": "every_nth", "pattern.every_nth.every": 2})
    drawn, alone = (
        dict(config.build(seed=3).named_parameters())
        for config in (hybrid, dataclasses.replace(hybrid, init=registry.lookup(AbstractInit, "xavier")()))
    )
    assert not torch.equal(*(named["layers.1.mixer.mixer.query.weight"] for named in (drawn, alone)))


@pytest.mark.parametrize("kind", registry.variants(AbstractMixer))
def test_mimetic_changes_the_start_of_every_mixer_it_is_not_refused_with(kind: str) -> None:
    mixer, rule = registry.lookup(AbstractMixer, kind)(), registry.lookup(AbstractInit, "mimetic")()
    module = mixer.build(Dims(d_model=48, d_ff=48, layers=2, train_len=32, max_len=32, direction=min(mixer.directions)))
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with torch.no_grad():
        rule.relate(related(module), mixer.head_shape(), torch.Generator().manual_seed(0))
    changed = any(not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
    assert changed == can_relate(rule, mixer)


@pytest.mark.parametrize("init", ["zero_outputs", "fixup"])
def test_zero_outputs_make_every_layer_the_identity_and_the_loss_that_of_guessing(small: Make, init: str) -> None:
    model = small({**placed(init), "layers": 3, "tied": False}).build(seed=3).eval()
    streams: list[torch.Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda _, args: streams.append(args[0]))
    model.layers[-1].register_forward_hook(lambda _, args, out: streams.append(out))
    tokens = torch.randint(48, (4, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y, _ = model(tokens)
    assert torch.equal(streams[0], streams[1])
    loss = torch.nn.functional.cross_entropy(y.flatten(0, 1), tokens.roll(1, 1).flatten())
    assert float(loss) == pytest.approx(math.log(48), abs=1e-3)


@pytest.mark.slow
def test_t_fixup_trains_six_layers_without_norms_or_warm_up(small: Make) -> None:
    model = small({**placed("t_fixup"), "layers": 6}).build(seed=3)
    tokens = (torch.arange(20) + torch.arange(0, 48, 6)[:, None]) % 48
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=3e-3), []
    for _ in range(40):
        y, _ = model(tokens)
        loss = torch.nn.functional.cross_entropy(y[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_rules_for_one_placement_are_refused_under_another(small: Make) -> None:
    rules = {kind: rule for kind, rule in registry.variants(AbstractInit).items() if rule.needs}
    assert set(rules) == {"t_fixup", "fixup", "deepnorm", "magneto"}
    for init, rule in rules.items():
        for placement, other in registry.variants(AbstractPlacement).items():
            if rule.needs <= other.provides:
                small({"init.kind": init, "placement.kind": placement})
                continue
            with pytest.raises(InfeasibleArchitecture) as refused:
                small({"init.kind": init, "placement.kind": placement})
            assert f"model.placement.kind={placement!r}" in str(refused.value)
            assert "placements that do: " in str(refused.value)


def test_embeddings_can_be_scaled_by_the_root_of_the_width(small: Make) -> None:
    config = small({"embed_scale": "sqrt_d", "init.kind": "xavier", "position.kind": "sinusoidal"})
    model, plain = config.build(seed=0).eval(), small({"init.kind": "xavier", "position.kind": "sinusoidal"})
    assert registry.config_id(config) != registry.config_id(plain)
    assert "embed_scale" not in registry.identity(plain)
    tokens = torch.arange(20)[None]
    seen: list[torch.Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(tokens)
        model.step(tokens, model.empty_state(1), 0)
    expected = model.positions[0].embed(math.sqrt(32) * model.embedding[tokens])
    for stream in seen:
        torch.testing.assert_close(stream, expected)


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


@pytest.mark.parametrize("init", [kind for kind, rule in registry.variants(AbstractInit).items() if not rule.needs])
def test_a_layer_opens_and_stays_finite_or_its_start_is_refused(small: Make, init: str) -> None:
    """Six layers without a norm, and layers whose branches have a factor that starts at zero."""
    for placement in ("no_norm", "rezero"):
        changes = {"init.kind": init, "placement.kind": placement, "layers": 6, "ffn.kind": "bilinear"}
        if (init, placement) in {("kaiming", "no_norm"), ("mimetic", "no_norm"), ("zero_outputs", "rezero")}:
            with pytest.raises(InfeasibleArchitecture, match=rf"model\.init\.kind='{init}'.*'{placement}'.*xavier"):
                small(changes)
            continue
        model = small(changes, d_ff=80).build(seed=0)
        optimizer, tokens = torch.optim.SGD(model.parameters(), lr=0.1), torch.arange(40)[None]
        untouched = {name for name, _ in model.named_parameters()}
        for _ in range(2):
            y, _ = model(tokens)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(y.flatten(0, 1), tokens[0]).backward()
            optimizer.step()
            untouched -= {name for name, p in model.named_parameters() if p.grad.isfinite().all() and p.grad.any()}
        assert not untouched
