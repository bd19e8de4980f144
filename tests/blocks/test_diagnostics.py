"""Diagnostics: maps equal the weights of attention itself, each number on a case made for it, warnings in words."""

from collections.abc import Callable

import pytest
import torch
from registered_cases import MIXERS
from torch import Tensor
from torch.nn import functional as F

from blocks import registry
from blocks.attention_maps import attention_maps
from blocks.diagnostics import (
    Diagnosis,
    LayerDiagnosis,
    dead_share,
    diagnose,
    effective_rank,
    gradient_norms,
    position_r2,
    redundancy,
    sink_share,
    update_ratios,
)
from blocks.families import AbstractPlacement, Context, Role
from blocks.findings import warnings_of, warnings_of_updates
from blocks.model import DecoderLM, ModelConfig
from blocks.ops.attention import attention_weights

pytestmark = pytest.mark.slow

Make = Callable[..., ModelConfig]
TOKENS = torch.randint(48, (4, 21), generator=torch.Generator().manual_seed(0))
LINEAR_IN_VALUES = [kind for kind, mixer in MIXERS.items() if mixer.value_projection]


def stirred(config: ModelConfig) -> DecoderLM:
    model = config.build(seed=1)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@pytest.mark.parametrize("position", ["rotary", "alibi"])
@pytest.mark.parametrize("mixer", ["softmax", "sliding_window"])
def test_probed_maps_are_the_weights_of_attention(small: Make, mixer: str, position: str) -> None:
    window = {"mixer.sliding_window.window": 8} if mixer == "sliding_window" else {}
    model = stirred(small({"mixer.kind": mixer, "position.kind": position, "layers": 1, **window}))
    x = torch.randn(2, 21, 32, generator=torch.Generator().manual_seed(0))
    live = torch.ones(2, 21, dtype=torch.bool)
    live[1, 15:] = False
    scheme, attention = model.positions[0], model.slots[0].mixer
    with torch.no_grad():
        (probed,) = attention_maps(model, [(x, scheme, Context(live=live))])
        q, k = (project(x).unflatten(-1, (-1, 8)) for project in (attention.query, attention.key))
        q, k = scheme.rotate(q, k)
        bias = scheme.score_bias(21, 21)
        exact = attention_weights(q, k, scale=8**-0.5, window=attention.window, bias=bias, live=live)
    torch.testing.assert_close(probed, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mixer", LINEAR_IN_VALUES)
def test_probed_maps_rebuild_the_output_of_every_mixer_linear_in_its_values(small: Make, mixer: str) -> None:
    config = small({"mixer.kind": mixer, "position.kind": "none", "layers": 1})
    model = stirred(config)
    x = torch.randn(2, 21, 32, generator=torch.Generator().manual_seed(0))
    module = model.slots[0].mixer
    with torch.no_grad():
        (weights,) = attention_maps(model, [(x, model.positions[0], Context())])
        if weights is None:
            assert mixer in ("differential", "nsa"), "one norms its heads, one has values per branch; no other may"
            return
        values = module.value(x).unflatten(-1, (config.mixer.head_shape().kv_heads, -1))
        values = values.repeat_interleave(weights.shape[1] // values.shape[2], dim=2)
        mixed = torch.einsum("bhts,bshk->bthk", weights, values).flatten(2)
        torch.testing.assert_close(module.out(mixed), module(x, model.positions[0], Context()), rtol=1e-4, atol=1e-5)
    assert (weights.triu(1).abs() < 1e-6).all()


def test_a_diagnosis_leaves_the_model_as_it_was(small: Make) -> None:
    model = stirred(small({"residual_dropout": 0.3})).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(1)
    logits = model(TOKENS)[0]
    one, other = (diagnose(model, TOKENS, targets=TOKENS) for _ in range(2))
    assert one == other
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    torch.manual_seed(1)
    assert torch.equal(model(TOKENS)[0], logits)


@pytest.mark.parametrize("changes", [
    {"mixer.kind": "linear"}, {"residual.kind": "looped", "layers": 3}, {"residual.kind": "value_residual"},
    {"residual.kind": "hyper_connections"}, {"stack.kind": "encoder"}, {"ffn.kind": "none"},
    {"mixer.softmax.entropy_weight": 0.1},
    *(
        pytest.param(changes, marks=pytest.mark.slow)
        for changes in (
            *({"placement.kind": kind} for kind in registry.variants(AbstractPlacement)),
            *({"mixer.kind": kind, "position.kind": "none"} for kind in MIXERS),
        )
    ),
], ids=str)  # fmt: skip
def test_every_model_can_be_diagnosed(small: Make, changes: dict[str, object]) -> None:
    config = small(changes)
    model = config.build(seed=0)
    live = torch.ones(4, 21, dtype=torch.bool)
    live[2, 17:] = False
    diagnosis = diagnose(model, TOKENS, targets=TOKENS.masked_fill(~live, -100), live=live)
    assert len(diagnosis.layers) == config.layers
    assert all(layer.rms > 0 and 0 < layer.rank <= 32 for layer in diagnosis.layers)
    for layer, mixer in zip(diagnosis.layers, config.layer_mixers(), strict=True):
        heads = mixer.head_shape().heads if layer.entropy else 0
        assert len(layer.entropy) == len(layer.sink_share) == len(layer.redundancy) == heads
        assert all(0 <= value <= torch.tensor(21.0).log() + 1e-5 for value in layer.entropy)
    warnings_of(diagnosis)


def test_entropy_and_sinks_of_known_maps(small: Make) -> None:
    model = small({"position.kind": "none", "layers": 1}).build(seed=0)
    with torch.no_grad():
        model.slots[0].mixer.query.weight.zero_()
    (layer,) = diagnose(model, TOKENS).layers
    places = torch.arange(1, 22, dtype=torch.float64)
    assert layer.entropy == pytest.approx([float(places.log().mean())] * 4, rel=1e-5)
    assert layer.sink_share == pytest.approx([float((1 / places[1:]).mean())] * 4, rel=1e-5)
    assert layer.redundancy == pytest.approx([1.0] * 4)
    assert any("4 of 4 heads have the map of another head" in words for words in warnings_of(diagnose(model, TOKENS)))


def test_sinks_and_copies_are_found_among_other_heads() -> None:
    first = torch.zeros(1, 1, 6, 6)
    first[..., 0] = 1
    itself = torch.eye(6)[None, None]
    weights = torch.cat([first, itself, first], dim=1)
    assert sink_share(weights).tolist() == [1.0, 0.0, 1.0]
    assert redundancy(weights).tolist() == pytest.approx([1.0, 1 / 6, 1.0])
    assert sink_share(weights, torch.arange(6)[None] < 4).tolist() == [1.0, 0.0, 1.0]


def test_rank_counts_the_dimensions_in_use() -> None:
    rows = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
    assert effective_rank(rows) == pytest.approx(16, rel=0.01)
    assert effective_rank(rows * torch.tensor([1.0] * 3 + [0.0] * 13)) == pytest.approx(3, rel=0.01)
    assert effective_rank(rows[:1].expand(10, -1) + 7) == pytest.approx(0, abs=1e-6)


def test_units_that_never_fire_are_counted(small: Make) -> None:
    model = small({"ffn.kind": "relu"}).build(seed=0)
    assert dead_share(torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, -2.0]])) == pytest.approx(1 / 3)
    with torch.no_grad():
        model.layers[1].ffn.w_in.weight[:10].zero_()
    diagnosis = diagnose(model, TOKENS)
    assert diagnosis.layers[1].dead_units == pytest.approx(0.25)
    assert diagnosis.layers[0].dead_units == 0
    assert "layer 2: 25% of the FFN's units never fire" in warnings_of(diagnosis)


def test_positions_are_told_apart_where_they_are_written_down() -> None:
    noise = torch.randn(16, 20, 8, generator=torch.Generator().manual_seed(0))
    assert position_r2(noise) < 0.1
    placed = noise.clone()
    placed[..., 3] += torch.linspace(-20, 20, 20)
    assert position_r2(placed) > 0.95


def test_gradients_are_summed_by_layer_and_role(small: Make) -> None:
    model = small().build(seed=0)
    logits, auxiliary = model.eval()(TOKENS)
    (F.cross_entropy(logits.flatten(0, 1), TOKENS.flatten()) + auxiliary).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    norms = diagnose(model, TOKENS, targets=TOKENS).gradients
    assert norms == pytest.approx(gradient_norms(model, gradients))
    total = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    assert sum(norm**2 for norm in norms.values()) ** 0.5 == pytest.approx(float(total), rel=1e-5)
    assert norms["layer 2", Role.QUERY] == pytest.approx(float(model.slots[1].mixer.query.weight.grad.norm()), rel=1e-5)
    assert {layer for layer, _ in norms} == {"layer 1", "layer 2", "outside"}


def test_updates_are_measured_against_the_weights(small: Make) -> None:
    model = small().build(seed=0)
    before: dict[str, Tensor] = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        model.slots[0].mixer.query.weight.mul_(1.5)
        model.slots[1].mixer.key.weight.mul_(1.001)
    ratios = update_ratios(model, before)
    assert ratios["layer 1", Role.QUERY] == pytest.approx(0.5, rel=1e-4)
    assert ratios["layer 2", Role.KEY] == pytest.approx(0.001, rel=1e-2)
    words = warnings_of_updates({place: ratio for place, ratio in ratios.items() if ratio})
    assert words == ["layer 1: one step moved the query weights by 50%; lower the learning rate"]
    assert warnings_of_updates({("layer 1", Role.KEY): 1e-7})[0].endswith("hardly at all")


def healthy(**changes: object) -> Diagnosis:
    layer = LayerDiagnosis(rms=1.0, rank=20.0, entropy=(1.0,) * 8, sink_share=(0.1,) * 8, redundancy=(0.2,) * 8)
    plain = {"layers": (layer,) * 3, "d_model": 32, "embedding_rms": 1.0, "logit_rms": 1.0, "largest_logit": 5.0,
             "position_r2": 0.5}  # fmt: skip
    return Diagnosis(**{**plain, **changes})


def test_warnings_are_sentences() -> None:
    assert warnings_of(healthy()) == []
    good = healthy().layers[0]
    sinks = LayerDiagnosis(rms=1.0, rank=20.0, entropy=(0.1,) * 8, sink_share=(0.95,) * 6 + (0.1,) * 2,
                           redundancy=(0.99,) * 6 + (0.2,) * 2)  # fmt: skip
    assert warnings_of(healthy(layers=(good, good, sinks))) == ["layer 3: 6 of 8 heads attend only to token 1"]
    flat = LayerDiagnosis(rms=50.0, rank=1.2)
    assert warnings_of(healthy(layers=(good, flat), largest_logit=300.0)) == [
        "layer 2: representations use 1.2 of 32 dimensions; tokens look nearly alike",
        "the residual stream grows 50-fold over 2 layers, from 1 to 50",
        "logits reach 300; cap them, or norm queries and keys",
    ]
    gradients = {("layer 1", Role.QUERY): 1e-4, ("layer 2", Role.QUERY): 1.0, ("layer 2", Role.KEY): 0.0}
    assert warnings_of(healthy(gradients=gradients)) == [
        "layer 2: the key weights get no gradient",
        "the gradient of layer 2 is 10000 times that of layer 1",
    ]
