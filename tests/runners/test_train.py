import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model

from runners.candidate import rebuild
from runners.conditions import begin_peak, environment, imposed, peak_bytes
from runners.evaluate import evaluate
from runners.tally import MOST_DOCUMENTS
from runners.train import accumulate, run_trial
from search_space.canon import canonical_json
from search_space.records import Metric, Reading, Status, TrialResult, result_from_plain, to_plain
from tests.runners.specs import BYTES, Prepared, keep_going, losses, prepare, run


@pytest.fixture(scope="module")
def trained() -> TrialResult:
    return run(prepare(text=BYTES))


def test_a_trial_learns_real_text(trained: TrialResult) -> None:
    assert trained.status is Status.OK, trained.last_lines
    assert trained.curve[0].loss > 4.5
    assert trained.metrics[Metric.LOSS] < 3.4


def test_readings_stand_at_each_multiple_and_at_the_last_step(trained: TrialResult) -> None:
    assert [reading.tokens for reading in trained.curve] == [0, 4096, 8192, 12288, 16384]
    uneven = run(prepare("budget.eval_every=640", "budget.tokens=1536"))
    assert [reading.tokens for reading in uneven.curve] == [0, 640, 1280, 1536]
    assert uneven.metrics[Metric.LOSS] == uneven.curve[-1].loss


def test_the_reading_before_training_is_kept_but_not_reported() -> None:
    reported: list[Reading] = []
    result = run(prepare(), lambda reading: reported.append(reading) is None)
    assert result.curve[0].tokens == 0
    assert tuple(reported) == result.curve[1:]


def test_metrics_are_complete_and_finite(trained: TrialResult) -> None:
    assert {
        Metric.LOSS, Metric.BEST_LOSS, Metric.PARAMS, Metric.ACTIVE_PARAMS, Metric.BODY_PARAMS, Metric.FLOPS,
        Metric.FLOPS_CAUSAL, Metric.STATE_BYTES, Metric.FIXED_STATE_BYTES, Metric.TOKENS_PER_SECOND,
        Metric.PEAK_BYTES, Metric.SECONDS, Metric.SECONDS_BUILD, Metric.SECONDS_TRAIN, Metric.SECONDS_EVALUATE,
        Metric.TOKENS,
    } == set(trained.metrics)  # fmt: skip
    assert all(math.isfinite(value) for value in trained.metrics.values())
    assert trained.metrics[Metric.BEST_LOSS] == min(reading.loss for reading in trained.curve[1:])
    parts = (Metric.SECONDS_BUILD, Metric.SECONDS_TRAIN, Metric.SECONDS_EVALUATE)
    assert 0 < sum(trained.metrics[part] for part in parts) <= trained.metrics[Metric.SECONDS] == trained.seconds
    assert trained.tokens == trained.metrics[Metric.TOKENS] == 16384
    assert set(trained.backends) == {"attention"}


def test_a_result_survives_json(trained: TrialResult) -> None:
    plain = to_plain(trained)
    canonical_json(plain)
    assert result_from_plain(plain) == trained


def test_the_same_spec_gives_the_same_numbers_to_the_bit(trained: TrialResult) -> None:
    torch.manual_seed(99)
    again = run(prepare(text=BYTES))
    assert losses(again) == losses(trained)


@pytest.mark.parametrize("stream", ["init", "data"])
def test_the_seeds_of_init_and_data_move_the_numbers(stream: str) -> None:
    base, moved = run(prepare()), run(prepare(**{stream: 1}))
    assert losses(moved) != losses(base)
    assert (moved.curve[0].loss == base.curve[0].loss) is (stream == "data")


def test_the_dropout_seed_moves_only_training_with_dropout() -> None:
    assert losses(run(prepare(dropout=1))) == losses(run(prepare()))
    with_dropout = [run(prepare("model.residual_dropout=0.3", dropout=seed)) for seed in (0, 1, 0)]
    assert losses(with_dropout[0]) == losses(with_dropout[2])
    assert with_dropout[0].curve[0].loss == with_dropout[1].curve[0].loss
    assert with_dropout[0].curve[-1].loss != with_dropout[1].curve[-1].loss


def test_a_trial_leaves_global_random_state_and_modes_as_they_were() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run(prepare("model.residual_dropout=0.3"))
    assert torch.rand(3).equal(expected)
    assert not torch.are_deterministic_algorithms_enabled()


def gradients(made: Prepared, *, step: int = 0) -> tuple[float, dict[str, torch.Tensor]]:
    candidate = rebuild(made.spec)
    model = candidate.model.build(0)
    loss = accumulate(model, candidate, made.spec, made.data.batch(step, 8, seed=0))
    return float(loss), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro", [16, 32, 64])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_micro_batches_give_the_loss_and_gradients_of_the_whole_batch(micro: int, smoothing: float) -> None:
    smooth = f"training.label_smoothing={smoothing}"
    loss, whole = gradients(prepare(smooth))
    split_loss, split = gradients(prepare(smooth, f"budget.micro_batch_tokens={micro}"))
    assert split_loss == pytest.approx(loss, abs=1e-5)
    assert whole.keys() == split.keys()
    for name in whole:
        torch.testing.assert_close(split[name], whole[name], atol=1e-5, rtol=1e-5, msg=name)


def test_micro_batches_weigh_targets_alike_when_rows_hold_different_numbers_of_them() -> None:
    made = prepare("budget.micro_batch_tokens=32")
    candidate = rebuild(made.spec)
    inputs, targets = made.data.batch(0, 8, seed=0)
    targets = targets.clone()
    targets[:6, :14] = -100
    grads = []
    for micro in (32, 128):
        model = candidate.model.build(0)
        spec = dataclasses.replace(made.spec, budget=dataclasses.replace(made.spec.budget, micro_batch_tokens=micro))
        accumulate(model, candidate, spec, (inputs, targets))
        grads.append([parameter.grad for parameter in model.parameters()])
    for split, whole in zip(*grads, strict=True):
        torch.testing.assert_close(split, whole, atol=1e-5, rtol=1e-5)


def test_checkpointing_changes_no_number() -> None:
    plain, recomputed = run(prepare()), run(prepare("training.activation_checkpointing=true"))
    assert recomputed.status is Status.OK, recomputed.last_lines
    assert losses(recomputed) == losses(plain)


def test_checkpointing_repeats_the_dropout_it_recomputes() -> None:
    _, plain = gradients_with_dropout(False)
    _, recomputed = gradients_with_dropout(True)
    for name in plain:
        torch.testing.assert_close(recomputed[name], plain[name], msg=name)


def gradients_with_dropout(checkpointing: bool) -> tuple[float, dict[str, torch.Tensor]]:
    made = prepare("model.residual_dropout=0.3", f"training.activation_checkpointing={str(checkpointing).lower()}")
    with imposed(made.spec):
        return gradients(made)


def test_smoothing_moves_training_but_neither_train_loss_nor_evaluation_counts_it() -> None:
    plain, smooth = run(prepare()), run(prepare("training.label_smoothing=0.2"))
    assert smooth.curve[0] == dataclasses.replace(plain.curve[0], seconds=smooth.curve[0].seconds)
    assert smooth.curve[-1].loss != plain.curve[-1].loss


def test_clipping_bounds_what_one_step_can_do() -> None:
    one = ("budget.tokens=128", "budget.eval_every=128")
    made = prepare("training.gradient_clip=0.01", "optimizer.adamw.epsilon=1e-3", *one)
    loose = prepare("training.gradient_clip=100", "optimizer.adamw.epsilon=1e-3", *one)
    assert abs(run(made).curve[-1].loss - run(made).curve[0].loss) < abs(
        run(loose).curve[-1].loss - run(loose).curve[0].loss
    )


def test_bfloat16_trains_close_to_float32() -> None:
    half, full = run(prepare("engine.dtype=bfloat16")), run(prepare())
    assert half.status is Status.OK, half.last_lines
    assert losses(half) != losses(full)
    assert half.metrics[Metric.LOSS] == pytest.approx(full.metrics[Metric.LOSS], abs=0.1)


def test_longer_sequences_are_evaluated_after_training() -> None:
    result = run(prepare("task.mqar.eval_lengths=[16, 64]"))
    assert result.status is Status.OK, result.last_lines
    assert result.metrics["loss_at/16"] == result.metrics[Metric.LOSS]
    assert result.metrics["loss_at/64"] != result.metrics[Metric.LOSS]


def test_the_test_split_is_read_only_when_asked() -> None:
    assert not {Metric.TEST_LOSS, Metric.TEST_ACCURACY} & set(run(prepare()).metrics)
    tested = run(prepare(), test=True)
    assert {Metric.TEST_LOSS, Metric.TEST_ACCURACY} <= set(tested.metrics)
    assert tested.metrics[Metric.TEST_LOSS] != tested.metrics[Metric.LOSS]


def test_a_final_keeps_the_test_losses_of_its_documents_and_they_make_up_its_test_loss() -> None:
    assert run(prepare()).document_losses == ()
    for prepared in (prepare("task.mqar.eval_lengths=[64]"), prepare(text=BYTES), many_documents()):
        tested = run(prepared, test=True)
        counted, means = tested.document_counts, tested.document_losses
        assert 1 < len(means) == len(counted) <= MOST_DOCUMENTS
        mean = sum(loss * count for loss, count in zip(means, counted, strict=True)) / sum(counted)
        assert mean == pytest.approx(tested.metrics[Metric.TEST_LOSS], abs=1e-6)
        assert result_from_plain(to_plain(tested)) == tested
    assert "test/loss_at/64" in run(prepare("task.mqar.eval_lengths=[64]"), test=True).metrics


def many_documents() -> Prepared:
    """More sequences than documents are kept."""
    return prepare("task.mqar.held_out=600", "budget.eval_tokens=9600", "budget.tokens=1280", "budget.eval_every=1280")


def test_recall_is_learned_and_its_accuracy_told() -> None:
    result = run(prepare("budget.tokens=64000", "model.premixer={short_conv: {width: 3}}"))
    assert result.metrics[Metric.ACCURACY] > 0.9


def test_weights_give_the_final_loss_again(tmp_path: Path) -> None:
    made = prepare()
    path = tmp_path / "model.safetensors"
    result = run_trial(made.spec, made.data, keep_going, weights=path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    model = rebuild(made.spec).model.build(123)
    load_model(model, str(path))
    batches = made.data.evaluation("validation", made.spec.budget.eval_tokens, 16)
    with imposed(made.spec):
        assert evaluate(model, batches, "cpu", "float32").loss == result.metrics[Metric.LOSS]


def test_evaluation_is_the_mean_over_counted_targets() -> None:
    made = prepare()
    model = rebuild(made.spec).model.build(0)
    batches = list(made.data.evaluation("validation", 512, 16))
    found = evaluate(model, batches, "cpu", "float32")
    ((inputs, targets),) = batches
    counted = targets != -100
    with torch.no_grad():
        logs = model(inputs)[0].log_softmax(-1)
    picked = logs.gather(-1, targets.clamp_min(0)[..., None])[..., 0][counted]
    assert found.loss == pytest.approx(-picked.mean().item(), rel=1e-5)
    right = (logs.argmax(-1) == targets)[counted].float().mean().item()
    assert found.accuracy == pytest.approx(right)


def test_the_environment_names_what_a_replay_must_impose() -> None:
    result = run(prepare("budget.tokens=128", "budget.eval_every=128"))
    for name in ("python", "torch", "numpy", "platform", "cpu_capability", "threads", "deterministic"):
        assert result.environment[name]
    assert result.environment["deterministic"] == "true"
    assert result.environment["threads"] == "1"


def test_isa_caps_are_recorded_as_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert environment()["env/ONEDNN_MAX_CPU_ISA"] == "AVX2"
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    assert "env/ONEDNN_MAX_CPU_ISA" not in environment()


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="peak memory on this system is the process's maximum"
)
def test_peak_memory_sees_an_allocation_that_is_gone_again() -> None:
    baseline = begin_peak("cpu")
    torch.ones(2**24)
    assert peak_bytes("cpu", baseline) >= 0.9 * 2**26


def test_training_needs_neither_search_nor_tracking_libraries() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['optuna', 'mlflow', 'pandas', 'datasets', 'matplotlib']));"
        "import runners.train, runners.candidate, runners.tasks"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=Path(__file__).parents[2], check=True)
