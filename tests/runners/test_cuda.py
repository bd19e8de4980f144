import pytest
import torch

from search_space.records import Metric, Status, TrialResult
from tests.runners.specs import BYTES, Prepared, losses, prepare, run

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def trained() -> TrialResult:
    return run(prepare(text=BYTES))


def cuda(*overrides: str) -> Prepared:
    return prepare("engine.device=cuda", *overrides, text=BYTES)


@pytest.mark.gpu
@needs_cuda
def test_cuda_trains_in_bfloat16_as_well_as_the_cpu(trained: TrialResult) -> None:
    made = cuda()
    assert made.spec.dtype == "bfloat16"
    result = run(made)
    assert result.status is Status.OK, result.last_lines
    assert result.metrics[Metric.LOSS] == pytest.approx(trained.metrics[Metric.LOSS], abs=0.1)
    assert result.metrics[Metric.PEAK_BYTES] > 2**20


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("mixer", ["softmax", "linear", "sliding_window"])
def test_cuda_repeats_its_numbers_to_the_bit_when_deterministic(mixer: str) -> None:
    made = cuda(f"model.mixer={mixer}", "model.residual_dropout=0.1", "engine.deterministic=true")
    first, second = run(made), run(made)
    assert first.status is Status.OK, first.last_lines
    assert losses(first) == losses(second)


@pytest.mark.gpu
@needs_cuda
def test_cuda_starts_from_the_weights_of_the_cpu(trained: TrialResult) -> None:
    result = run(cuda("engine.dtype=float32"))
    assert result.curve[0].loss == pytest.approx(trained.curve[0].loss, abs=1e-4)


@pytest.mark.gpu
@needs_cuda
def test_cuda_out_of_memory_is_told_and_survived() -> None:
    made = cuda("budget.batch_tokens=1073741824", "budget.tokens=1073741824", "budget.eval_every=1073741824")
    assert run(made).status is Status.OUT_OF_MEMORY
    assert run(cuda()).status is Status.OK
