import dataclasses
import json

import pytest
import torch

from blocks.families import InfeasibleArchitecture
from blocks.registry import config_id, encode
from runners.candidate import check_budget, full_space, make_spec, pick_device, pick_dtype, rebuild, resolve
from runners.tasks import task_from_plain
from search_space.records import Budget, Seeds, TrialSpec, spec_from_plain, to_plain
from search_space.space import default_point, searched
from tests.runners.specs import SMALL, experiment_of, prepare

SIZED = SMALL.replace("  d_model: 16\n", "  size: {params: 20k}\n")


def point_of(*overrides: str, text: str = SMALL) -> dict[str, str | int | float | bool]:
    return default_point(experiment_of(text, *overrides).space)


def test_the_full_space_holds_model_optimizer_schedule_and_training() -> None:
    space = full_space()
    assert set(space.fields) == {"model", "optimizer", "schedule", "training"}
    assert {"optimizer.adamw.learning_rate", "training.label_smoothing", "model.mixer.kind"} <= set(searched(space))


def test_optional_training_fields_stay_at_their_defaults_until_a_file_opens_them() -> None:
    kept = point_of()
    assert kept["training.label_smoothing"] == 0.0
    assert kept["training.activation_checkpointing"] is False
    assert kept["schedule.kind"] == "cosine"
    opened = searched(experiment_of(SMALL, "training.label_smoothing=[0.0, 0.1]", "schedule=[cosine, wsd]").space)
    assert set(opened) == {"training.label_smoothing", "schedule.kind"}


def test_a_spec_rebuilds_the_candidate_it_was_made_from() -> None:
    made = prepare("schedule={wsd: {warmup: 0.0, decay: 0.3}}", "training.gradient_clip=0.5")
    spec = spec_from_plain(json.loads(json.dumps(to_plain(made.spec))))
    assert spec == made.spec
    assert rebuild(spec) == made.resolved.candidate
    assert rebuild(spec).schedule.factor(0.0) == 1.0
    assert config_id(rebuild(spec).model) == made.resolved.arch_id


def test_the_context_of_the_task_is_filled_in() -> None:
    made = prepare("task.mqar.eval_lengths=[32]", "budget.eval_tokens=512")
    model = made.resolved.candidate.model
    assert (model.vocab_size, model.train_len, model.max_len) == (16, 16, 32)
    assert model.d_ff == 64


def test_a_size_target_is_met_within_one_percent() -> None:
    made = prepare(text=SIZED)
    built = made.resolved.candidate.model.build(0)
    counted = sum(parameter.numel() for parameter in built.parameters())
    assert counted == made.resolved.cost.params
    assert abs(counted / 20_000 - 1) <= 0.01


def test_points_that_compute_the_same_share_an_architecture() -> None:
    full = prepare(
        "model.mixer={sliding_window: {kv_heads: 2, queries_per_kv: 1, head_dim: 8, qk_norm: none, window: 16}}"
    )
    assert full.resolved.arch_id == prepare().resolved.arch_id
    assert full.resolved.flat["model.mixer.kind"] == "sliding_window"
    narrow = prepare(
        "model.mixer={sliding_window: {kv_heads: 2, queries_per_kv: 1, head_dim: 8, qk_norm: none, window: 8}}"
    )
    assert narrow.resolved.arch_id != full.resolved.arch_id


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("limits.max_params=1000", r"limits\.max_params=1000: the model needs 3424"),
        ("limits.max_flops_per_token=100", r"limits\.max_flops_per_token=100"),
        ("limits.max_state_bytes=64", r"limits\.max_state_bytes=64: the model needs 2048"),
    ],
)
def test_points_over_a_hard_limit_are_refused_before_anything_trains(limit: str, message: str) -> None:
    with pytest.raises(InfeasibleArchitecture, match=message):
        prepare(limit)


def test_points_within_the_limits_pass() -> None:
    assert prepare("limits.max_params=3424", "limits.max_state_bytes=2048").resolved.cost.params == 3424


def test_a_size_that_no_width_meets_is_refused() -> None:
    with pytest.raises(InfeasibleArchitecture, match=r"model\.size"):
        prepare("model.size={params: 1000}", "model.layers=8", text=SIZED)


def test_device_and_dtype_become_concrete() -> None:
    spec = prepare("engine.dtype=auto").spec
    assert (spec.device, spec.dtype, spec.threads) == ("cpu", "float32", 1)
    assert pick_dtype("bfloat16", "cpu") == "bfloat16"
    assert pick_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_is_refused_where_there_is_none() -> None:
    with pytest.raises(ValueError, match=r"engine\.device='cuda', but torch finds no CUDA device"):
        pick_device("cuda")


def test_replicas_share_a_point_and_differ_in_their_spec() -> None:
    first, second = prepare(init=0).spec, prepare(init=1).spec
    assert first.point_id == second.point_id
    assert first.id != second.id
    assert prepare(init=0).spec.id == first.id


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("micro_batch_tokens", 24, r"budget\.micro_batch_tokens=24: .* of the sequence length \(16\)"),
        ("batch_tokens", 96, r"budget\.batch_tokens=96: .* of budget\.micro_batch_tokens \(64\)"),
        ("tokens", 200, r"budget\.tokens=200: .* of budget\.batch_tokens \(128\); write 256"),
        ("eval_every", 0, r"budget\.eval_every=0"),
    ],
)
def test_budgets_that_do_not_divide_are_refused(field: str, value: int, message: str) -> None:
    budget = Budget(
        tokens=256, batch_tokens=128, micro_batch_tokens=64, eval_tokens=64, eval_every=128, max_seconds=10.0
    )
    check_budget(budget, 16)
    with pytest.raises(ValueError, match=message):
        check_budget(dataclasses.replace(budget, **{field: value}), 16)


def test_a_resolved_candidate_is_canonical() -> None:
    made = prepare()
    again = resolve(made.resolved.flat, made.experiment, task_from_plain(made.experiment.task).shape())
    assert again == made.resolved
    assert encode(made.resolved.candidate.model.canonical()) == encode(made.resolved.candidate.model)
    spec = make_spec(again, made.experiment, fingerprint="0" * 64, seeds=Seeds(init=1, data=2, dropout=3))
    assert isinstance(spec, TrialSpec)
    assert spec.space_id == made.experiment.space.id


@pytest.mark.parametrize("stack", ["encoder", "prefix_lm", "encoder_decoder"])
def test_trials_refuse_stacks_that_do_not_predict_the_next_token(stack: str) -> None:
    with pytest.raises(InfeasibleArchitecture, match=rf"model\.stack\.kind='{stack}'.*decoder.*a loop of your own"):
        prepare(f"model.stack={stack}")
