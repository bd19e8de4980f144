"""Findings: each fault that is planted in a sound model is named in words, and the sound model is called nothing."""

import math
from collections.abc import Callable

import pytest
import torch

from blocks.diagnostics import diagnose, order_effect, position_r2
from blocks.families import Role
from blocks.findings import unread, warnings_of, warnings_of_growth, warnings_of_updates
from blocks.model import DecoderLM, ModelConfig

Make = Callable[..., ModelConfig]
GENERATOR = torch.Generator().manual_seed(0)
TOKENS = torch.cat([torch.zeros(4, 1, dtype=torch.int64), torch.randint(1, 48, (4, 20), generator=GENERATOR)], dim=1)
TARGETS = TOKENS.roll(-1, 1)


def sound(small: Make, changes: dict[str, object] | None = None) -> DecoderLM:
    """A model as training would leave it: its heads differ and choose, its embeddings have a size."""
    model = small({"position.kind": "rotary", "ffn.kind": "relu", "tied": False, **(changes or {})}).build(seed=0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        model.embedding.normal_(generator=generator)
        for slot in model.slots:
            for project in (slot.mixer.query, slot.mixer.key):
                project.weight.normal_(std=0.35, generator=generator)
            for project in (slot.mixer.value, slot.mixer.out):
                project.weight *= 5
    return model


def words(model: DecoderLM) -> list[str]:
    return warnings_of(diagnose(model, TOKENS, targets=TARGETS))


def sinks(model: DecoderLM) -> None:
    """Three of the four heads of layer 2 score the first token's direction alone."""
    model.embedding[0] = 0
    model.embedding[:, :2] = 0
    model.embedding[0, 0] = 100
    model.embedding[1:, 1] = 10
    mixer = model.slots[1].mixer
    mixer.query.weight[:24] = 0
    mixer.query.weight[7:24:8, 0] = mixer.query.weight[7:24:8, 1] = 30
    mixer.query.weight[31] = 0
    mixer.key.weight[7::8] = 0
    mixer.key.weight[7::8, 0] = 30


def hard_heads(model: DecoderLM) -> None:
    model.slots[1].mixer.query.weight *= 1e5


def repeated_heads(model: DecoderLM) -> None:
    query = model.slots[0].mixer.query.weight
    query[8:16] = query[:8]


def collapse(model: DecoderLM) -> None:
    model.embedding[:] = model.embedding[5]


def growth(model: DecoderLM) -> None:
    model.slots[1].mixer.out.weight *= 1e4


def dead_units(model: DecoderLM) -> None:
    model.layers[1].ffn.w_in.weight[:20] = 0


def large_logits(model: DecoderLM) -> None:
    model.head.weight *= 1000


def blocked_gradient(model: DecoderLM) -> None:
    model.slots[0].mixer.out.weight.zero_()


def vanishing_gradient(model: DecoderLM) -> None:
    for matrix in (model.slots[0].mixer.out.weight, model.layers[0].ffn.w_out.weight):
        matrix *= 1e-3
    for matrix in (model.slots[0].mixer.value.weight, model.layers[0].ffn.w_in.weight):
        matrix *= 1e-3


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (sinks, "layer 2: 3 of 4 heads attend only to token 1"),
        *(
            pytest.param(*fault, marks=pytest.mark.slow)
            for fault in (
                (hard_heads, "layer 2: 4 of 4 heads look at a single token each"),
                (repeated_heads, "layer 1: 2 of 4 heads have the map of another head"),
                (collapse, "layer 1: representations use 0.0 of 32 dimensions; tokens look nearly alike"),
                (growth, "the residual stream grows"),
                (dead_units, "layer 2: 50% of the FFN's units never fire"),
                (large_logits, "logits reach"),
                (blocked_gradient, "layer 1: the query weights get no gradient"),
                (vanishing_gradient, "the gradient of layer 2 is"),
            )
        ),
    ],
)
def test_a_planted_fault_is_named_and_a_sound_model_is_not(
    small: Make, plant: Callable[[DecoderLM], None], said: str
) -> None:
    model = sound(small)
    assert words(model) == []
    with torch.no_grad():
        plant(model)
    assert any(sentence.startswith(said) for sentence in words(model)), words(model)


def test_a_model_blind_to_order_is_told_from_one_that_sees_it(small: Make) -> None:
    blind, seeing = (sound(small, {"position.kind": position, "layers": 1}) for position in ("none", "rotary"))
    assert words(blind) == [
        "the order of earlier tokens does not reach the prediction: mixers see no places, or add hardly anything"
    ]
    assert words(seeing) == []
    assert diagnose(blind, TOKENS).order_effect < 1e-5 < 1e-2 < diagnose(seeing, TOKENS).order_effect
    with torch.no_grad():
        logits, _ = seeing(TOKENS[:, :2])
    assert math.isnan(order_effect(seeing, TOKENS[:, :2], logits))


@pytest.mark.slow
def test_growth_of_logits_in_training_is_named(small: Make) -> None:
    model = sound(small)
    before = diagnose(model, TOKENS)
    assert warnings_of_growth(before, before) == []
    with torch.no_grad():
        model.head.weight *= 40
    (sentence,) = warnings_of_growth(before, diagnose(model, TOKENS))
    assert sentence.startswith("logits grew 40-fold in training")


def test_mixers_without_weights_are_named_and_diagnosed_all_the_same(small: Make) -> None:
    model = sound(small)
    assert unread(diagnose(model, TOKENS), ["softmax", "softmax"]) == []
    config = small({"mixer.kind": "mamba2", "position.kind": "none"})
    diagnosis = diagnose(config.build(seed=0), TOKENS, targets=TARGETS)
    assert all(layer.rms > 0 and layer.rank > 0 for layer in diagnosis.layers)
    assert unread(diagnosis, [mixer.kind for mixer in config.layer_mixers()]) == [
        "layers 1, 2: no attention weights can be read off mamba2"
    ]


@pytest.mark.slow
def test_numbers_that_are_not_finite_stay_out_of_the_way(small: Make) -> None:
    model = sound(small)
    with torch.no_grad():
        model.layers[1].ffn.w_out.weight.fill_(math.inf)
    broken = diagnose(model, TOKENS, targets=TARGETS)
    assert math.isnan(broken.layers[1].rank)
    assert broken.layers[0].rank > 1
    assert math.isnan(broken.position_r2)
    warnings_of(broken)


def test_the_position_probe_does_not_fail_by_fitting_too_few_rows() -> None:
    noise = torch.randn(4, 20, 64, generator=torch.Generator().manual_seed(0))
    assert -0.05 < position_r2(noise) < 0.2
    noise[..., 3] += torch.linspace(-20, 20, 20)
    assert position_r2(noise) > 0.9


@pytest.mark.slow
def test_a_loss_that_counts_nothing_has_no_gradient(small: Make) -> None:
    gradients = diagnose(sound(small), TOKENS, targets=torch.full_like(TARGETS, -100)).gradients
    assert set(gradients.values()) == {0.0}


def test_steps_are_judged_by_matrices_and_told_in_one_sentence() -> None:
    ratios = {("layer 1", Role.QUERY): 0.2, ("layer 2", Role.KEY): 0.5, ("layer 1", Role.BIAS): 90.0}
    assert warnings_of_updates(ratios) == [
        "layer 2: one step moved the key weights by 50% (1 more too far); lower the learning rate"
    ]
    assert warnings_of_updates({("layer 1", Role.QUERY): 0.01, ("layer 1", Role.GAIN): 0.0}) == []
    assert warnings_of_updates({("layer 1", Role.VALUE): 1e-7, ("layer 2", Role.FFN_IN): 1e-9}) == [
        "layer 2: one step moved the ffn_in weights by 1.0e-09 of their size (1 more as little), hardly at all"
    ]


@pytest.mark.slow
def test_weights_are_read_where_values_come_from_a_latent(small: Make) -> None:
    model = small({"mixer.kind": "mla", "position.kind": "none", "layers": 1}).build(seed=0)
    with torch.no_grad():
        for project in (model.slots[0].mixer.query, model.slots[0].mixer.rotated_query):
            project.weight.zero_()
    (layer,) = diagnose(model, TOKENS).layers
    uniform = float(torch.arange(1, 22, dtype=torch.float64).log().mean())
    assert layer.entropy == pytest.approx([uniform] * 4, rel=1e-5)
