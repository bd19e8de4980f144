"""Every preset is a sound experiment of the real registry, and asks for what its name promises."""

import random

import pytest

import blocks.size
from blocks.families import (
    BOTH_DIRECTIONS,
    AbstractFFN,
    AbstractInit,
    AbstractMixer,
    AbstractNorm,
    AbstractPattern,
    AbstractPlacement,
    AbstractPosition,
    AbstractPremixer,
    AbstractResidual,
    Direction,
    InfeasibleArchitecture,
)
from blocks.registry import variants
from runners.candidate import full_space, resolve
from runners.tasks import TASKS, task_from_plain
from search_space.canon import unflatten
from search_space.experiment import Experiment, SizeTarget, as_file, preset_path, presets, read
from search_space.space import OneOf, Space, default_point, narrow, random_point, searched, size

FULL = full_space()
DRAWS = 12
MANY_DRAWS = 600
DECLARED = (
    "needs the hook",
    "is derived for layers with",
    "neither would ever get a gradient",
    "no norm keeps the residual stream finite",
    "puts norms at",
    "mixes values over layers",
    "needs the same kind of mixer",
    "scales what a layer adds",
    "uses one block in layers",
)
"""What a refusal says where one block lacks what another declares to need."""


def real_space(blocks: tuple[str, ...]) -> Space:
    """The registry's space, derived once."""
    return FULL if not blocks else full_space(blocks)


def load(preset: str, *overrides: str) -> Experiment:
    return read(preset_path(preset), full_space=real_space, tasks=TASKS, overrides=overrides)


def kinds(experiment: Experiment, family: str) -> set[str]:
    """The variants of a model family that an experiment picks."""
    model = experiment.space.fields["model"]
    assert isinstance(model, Space)
    node = model.fields[family]
    assert isinstance(node, OneOf)
    return set(node.variants)


def causal(family: type) -> set[str]:
    """The variants of a family that a decoder can hold."""
    return {
        kind
        for kind, variant in variants(family).items()
        if Direction.CAUSAL in getattr(variant, "directions", BOTH_DIRECTIONS)
    }


@pytest.mark.parametrize("preset", presets())
def test_a_preset_draws_models_that_can_be_built_within_one_percent_of_its_size(preset: str) -> None:
    experiment = load(preset)
    assert experiment.name == preset.split("/")[-1]
    assert experiment.description
    shape = task_from_plain(experiment.task).shape()
    rng = random.Random(0)
    refusals: list[str] = []
    n_built = 0
    while n_built < DRAWS:
        point = random_point(experiment.space, rng)
        try:
            cost = resolve(point, experiment, shape).cost
        except InfeasibleArchitecture as error:
            refusals.append(str(error))
            continue
        n_built += 1
        if isinstance(experiment.size, SizeTarget):
            assert getattr(cost, experiment.size.measure) == pytest.approx(experiment.size.value, rel=0.01)
    assert all(any(rule in refusal for rule in DECLARED) for refusal in refusals), refusals


@pytest.mark.parametrize("preset", presets())
def test_at_least_a_third_of_all_draws_of_a_preset_are_legal(preset: str) -> None:
    experiment, rng, legal = load(preset), random.Random(0), 0
    shape = task_from_plain(experiment.task).shape()
    for _ in range(MANY_DRAWS):
        model = {"d_model": 64, **unflatten(random_point(experiment.space, rng))["model"]}
        try:
            blocks.size.sized(model, vocab_size=shape.vocab_size, train_len=shape.train_len, max_len=shape.max_len)
        except InfeasibleArchitecture:
            continue
        legal += 1
    assert legal >= MANY_DRAWS / 3, f"{legal} of {MANY_DRAWS}"


@pytest.mark.parametrize("preset", presets())
def test_baselines_and_contrasted_candidates_can_be_built(preset: str) -> None:
    experiment = load(preset)
    shape = task_from_plain(experiment.task).shape()
    if experiment.baseline:
        assert resolve(experiment.baseline, experiment, shape).arch_id
    start = experiment.baseline or default_point(experiment.space)
    for contrast in experiment.final.contrasts:
        assert resolve(experiment.changed(start, contrast), experiment, shape).arch_id


@pytest.mark.parametrize("preset", presets())
def test_a_candidates_file_builds_the_very_same_model(preset: str) -> None:
    experiment = load(preset)
    shape = task_from_plain(experiment.task).shape()
    point = default_point(experiment.space)
    again = read(as_file(point, experiment), full_space=real_space, tasks=TASKS)
    assert default_point(again.space) == point
    assert size(again.space) == 1
    assert resolve(point, again, shape).arch_id == resolve(point, experiment, shape).arch_id


def test_attention_searches_every_mixer_with_all_its_fields_at_one_million_parameters() -> None:
    experiment = load("attention")
    assert experiment.size == SizeTarget(measure="params", value=1e6)
    assert kinds(experiment, "mixer") == causal(AbstractMixer)
    offered = searched(narrow(FULL, {"model": {"mixer": dict.fromkeys(causal(AbstractMixer))}}))
    of_mixers = {path for path in offered if path.startswith("model.mixer.")}
    assert of_mixers == {path for path in searched(experiment.space) if path.startswith("model.mixer.")}


def test_positions_searches_every_scheme_and_evaluates_beyond_the_training_length() -> None:
    experiment = load("positions")
    assert kinds(experiment, "position") == set(variants(AbstractPosition))
    task = experiment.task["python_source"]
    assert min(task["eval_lengths"]) > task["seq_len"]
    assert size(experiment.space) == experiment.search.trials, "the grid is walked to its end"


def test_norms_and_init_searches_every_norm_placement_and_rule() -> None:
    experiment = load("norms_and_init")
    assert kinds(experiment, "norm") == set(variants(AbstractNorm))
    assert kinds(experiment, "placement") == set(variants(AbstractPlacement))
    assert kinds(experiment, "init") == set(variants(AbstractInit))


def test_full_holds_every_variant_of_every_family_and_opens_dropout() -> None:
    experiment = load("full")
    for family, abstract in {
        "mixer": AbstractMixer,
        "premixer": AbstractPremixer,
        "pattern": AbstractPattern,
        "position": AbstractPosition,
        "ffn": AbstractFFN,
        "norm": AbstractNorm,
        "placement": AbstractPlacement,
        "init": AbstractInit,
        "residual": AbstractResidual,
    }.items():
        assert kinds(experiment, family) == causal(abstract), family
    opened = set(searched(experiment.space))
    assert {"model.residual_dropout", "model.embedding_dropout", "training.label_smoothing"} <= opened


def test_the_quickstart_is_small_and_decides_position_against_none_and_a_seed_alone() -> None:
    experiment = load("quickstart")
    assert experiment.search.trials >= 24
    assert experiment.budget.tokens / experiment.budget.batch_tokens >= 200
    assert experiment.search.pruner.kind == "asha"
    changes = [dict(contrast.change) for contrast in experiment.final.contrasts]
    assert changes == [{"model.position.kind": "none"}, {}]


def test_findings_keep_the_settings_they_are_known_for() -> None:
    alibi = load("findings/alibi_extrapolates")
    assert kinds(alibi, "position") == {"alibi", "sinusoidal", "learned"}
    assert alibi.task["python_source"] == {
        **alibi.task["python_source"],
        "seq_len": 64,
        "eval_lengths": [128, 256, 512],
    }
    assert alibi.budget.tokens // alibi.budget.batch_tokens == 500
    assert unflatten(default_point(alibi.space))["model"]["d_model"] == 96
    post = load("findings/post_norm_needs_warmup")
    assert default_point(post.space)["model.layers"] == 8
    assert default_point(post.space)["optimizer.adamw.learning_rate"] == 3e-3
    recall = load("findings/width_and_recall")
    assert recall.task["mqar"] == {**recall.task["mqar"], "seq_len": 128, "pairs": 32, "vocabulary": 256}
    assert default_point(recall.space)["optimizer.adamw.learning_rate"] == 1e-2
