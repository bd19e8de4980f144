"""A trial that was cut off goes on from its checkpoint to the numbers of an unbroken one, or says why it could not."""

import json
import pickle
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from blocks.registry import variants
from runners.checkpoints import HEADER, Checkpointing, CheckpointRefused, discard, find, size_bytes
from runners.comparison import CLOCK
from runners.optimize import AbstractOptimizer
from runners.train import run_trial
from search_space.records import Reading, Status, TrialResult
from tests.runners.specs import Prepared, keep_going, losses, prepare

EVERY = 640
SEVERAL = {
    "dropout": ("model.residual_dropout=0.2", "model.mixer.softmax.attention_dropout=0.1"),
    "experts that move biases": ("model.ffn=moe_bias", "model.layers=2"),
    "looped blocks": ("model.layers=2", "model.residual={looped: {blocks: 1}}", "budget.micro_batch_tokens=64"),
    "checkups": ("search.diagnostics=true",),
}


class Killed(BaseException):
    """Ends a trial as a kill would: nothing catches it."""


def cut(made: Prepared, folder: Path, *, at: int, every: int = EVERY) -> None:
    """Train with checkpoints until a reading, and die there."""

    def report(reading: Reading) -> bool:
        if reading.tokens >= at:
            raise Killed
        return True

    with pytest.raises(Killed):
        run_trial(made.spec, made.data, report, checkpoint=Checkpointing(folder=folder, every_tokens=every))


def go_on(
    made: Prepared, folder: Path, weights: Path, report: Callable[[Reading], bool] = keep_going
) -> tuple[TrialResult, list[int]]:
    """The rest of the trial, and the tokens of the readings it made."""
    made_now: list[int] = []

    def noting(reading: Reading) -> bool:
        made_now.append(reading.tokens)
        return report(reading)

    checkpoint = Checkpointing(folder=folder, every_tokens=EVERY)
    result = run_trial(made.spec, made.data, noting, weights=weights, checkpoint=checkpoint)
    return result, made_now


def check_equal(broken: TrialResult, whole: TrialResult) -> None:
    assert (broken.status, broken.reason, broken.tokens) == (whole.status, whole.reason, whole.tokens)
    assert [reading.tokens for reading in broken.curve] == [reading.tokens for reading in whole.curve]
    assert losses(broken) == losses(whole)
    assert {k: v for k, v in broken.metrics.items() if k not in CLOCK} == {
        k: v for k, v in whole.metrics.items() if k not in CLOCK
    }
    assert broken.checkups == whole.checkups


def check_continues(made: Prepared, folder: Path) -> None:
    """Cut off at the third reading, the trial ends as an unbroken one does, to the bit."""
    whole = run_trial(made.spec, made.data, keep_going, weights=folder / "whole")
    assert whole.status is Status.OK, whole.last_lines
    cut(made, folder / "kept", at=1920)
    broken, readings = go_on(made, folder / "kept", folder / "broken")
    assert readings == [1920, 2560]
    assert broken.remarks == ()
    check_equal(broken, whole)
    before, after = load_file(folder / "whole"), load_file(folder / "broken")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "overrides",
    [pytest.param(each, marks=() if name == "dropout" else pytest.mark.slow) for name, each in SEVERAL.items()],
    ids=SEVERAL,
)
def test_a_cut_trial_goes_on_to_the_bits_of_an_unbroken_one(overrides: tuple[str, ...], tmp_path: Path) -> None:
    check_continues(prepare(*overrides), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in variants(AbstractOptimizer) if kind != "adamw"] or ["adamw"])
def test_every_optimizer_goes_on_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    check_continues(prepare(f"optimizer={kind}", "model.residual_dropout=0.1"), tmp_path)


def test_a_trial_that_is_pruned_after_a_cut_is_pruned_as_it_would_have_been(tmp_path: Path) -> None:
    made = prepare("model.residual_dropout=0.2")
    whole = run_trial(made.spec, made.data, lambda reading: reading.tokens < 1920)
    cut(made, tmp_path / "kept", at=1920)
    broken, readings = go_on(made, tmp_path / "kept", tmp_path / "w", lambda reading: reading.tokens < 1920)
    assert whole.status is Status.PRUNED
    assert readings == [1920]
    check_equal(broken, whole)


@pytest.mark.slow
def test_tokens_decide_when_a_checkpoint_is_taken_and_only_one_is_kept(tmp_path: Path) -> None:
    made = prepare("budget.tokens=12800", "budget.eval_every=12800")
    folder = tmp_path / "kept"
    cut(made, folder, at=12800, every=2000)
    found = find(folder, made.spec.id, 128)
    assert found is not None
    assert (found.tokens, found.step) == (10240, 80)
    assert {file.name for file in folder.iterdir()} == {HEADER, "10240.safetensors"}
    assert [reading.tokens for reading in found.curve] == [0]


@pytest.mark.slow
def test_without_tokens_a_young_trial_takes_no_checkpoint(tmp_path: Path) -> None:
    made = prepare()
    cut(made, tmp_path / "kept", at=1920, every=0)
    assert not (tmp_path / "kept").exists()


@pytest.mark.slow
def test_seconds_of_all_attempts_count(tmp_path: Path) -> None:
    made = prepare()
    cut(made, tmp_path / "kept", at=1920)
    found = find(tmp_path / "kept", made.spec.id, 128)
    assert found is not None
    broken, _ = go_on(made, tmp_path / "kept", tmp_path / "w")
    assert broken.seconds > found.header["tally"]["seconds"] > found.curve[-1].seconds
    assert [reading.seconds for reading in broken.curve] == sorted(reading.seconds for reading in broken.curve)


def _tear(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def _flip(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    whole = bytearray(file.read_bytes())
    whole[-20] ^= 1
    file.write_bytes(whole)


def _edit(folder: Path) -> None:
    header = json.loads((folder / HEADER).read_text())
    header["step"] += 1
    (folder / HEADER).write_text(json.dumps(header))


def _halve(folder: Path) -> None:
    text = (folder / HEADER).read_text()
    (folder / HEADER).write_text(text[: len(text) // 2])


class _Trap:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return Path.touch, (Path("/tmp/assay-trap-was-sprung"),)  # type: ignore[return-value]


def _plant(folder: Path) -> None:
    for file in folder.iterdir():
        file.write_bytes(pickle.dumps(_Trap()))


SPOILED = {
    "torn tensors": (_tear, "is not whole"),
    "a flipped bit": (_flip, "is not whole"),
    "an edited header": (_edit, "was changed after it was written"),
    "half a header": (_halve, "is no JSON"),
    "a pickle": (_plant, "cannot be read|is no JSON"),
}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [pytest.param(*each, marks=() if name == "torn tensors" else pytest.mark.slow) for name, each in SPOILED.items()],
    ids=SPOILED,
)
def test_a_spoiled_checkpoint_is_refused_and_the_trial_begins_anew_and_says_so(
    spoil: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    made, folder = prepare(), tmp_path / "kept"
    cut(made, folder, at=1280)
    spoil(folder)
    with pytest.raises(CheckpointRefused, match=words):
        find(folder, made.spec.id, 128)
    result, readings = go_on(made, folder, tmp_path / "w")
    assert readings == [640, 1280, 1920, 2560]
    (remark,) = result.remarks
    assert remark.endswith("; trained from the start")
    assert not Path("/tmp/assay-trap-was-sprung").exists()
    check_equal(result, run_trial(made.spec, made.data, keep_going))


@pytest.mark.slow
def test_a_checkpoint_of_another_trial_or_micro_batch_is_refused(tmp_path: Path) -> None:
    made, other, folder = prepare(), prepare(init=1), tmp_path / "kept"
    cut(made, folder, at=1920)
    with pytest.raises(CheckpointRefused, match=f"is of spec {made.spec.id}"):
        find(folder, other.spec.id, 128)
    with pytest.raises(CheckpointRefused, match="micro-batches of 128 tokens"):
        find(folder, made.spec.id, 64)
    result, readings = go_on(other, folder, tmp_path / "w")
    assert readings[0] == 640
    assert "is of spec" in result.remarks[0]


@pytest.mark.slow
def test_a_state_too_large_for_its_share_is_not_kept_and_that_is_told_once(tmp_path: Path) -> None:
    made = prepare()
    asked = Checkpointing(folder=tmp_path / "kept", every_tokens=640, most_bytes=1000)
    result = run_trial(made.spec, made.data, keep_going, checkpoint=asked)
    assert result.status is Status.OK
    (remark,) = result.remarks
    assert "engine.disk_bytes leaves 1,000" in remark
    assert size_bytes(tmp_path) == 0


@pytest.mark.fault
def test_a_disk_that_is_full_costs_the_checkpoint_and_no_trial(tmp_path: Path) -> None:
    """A limit on the size of files fails writes as a full disk does; what was written before stays."""
    made, folder = prepare(), tmp_path / "kept"
    cut(made, folder, at=1280)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        result, readings = go_on(made, folder, tmp_path / "weights")
        assert find(folder, made.spec.id, 128) is not None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.status is Status.OK, result.last_lines
    assert readings == [1280, 1920, 2560]
    kept, model = result.remarks
    assert "a checkpoint could not be kept" in kept
    assert "File too large" in kept
    assert "the trained model could not be kept" in model
    assert not (tmp_path / "weights").exists()
    assert not list(folder.glob("*.partial"))


@pytest.mark.slow
def test_discarding_leaves_nothing_and_asks_for_nothing(tmp_path: Path) -> None:
    made = prepare()
    cut(made, tmp_path / "kept", at=1920)
    assert size_bytes(tmp_path) > 0
    discard(tmp_path / "kept")
    discard(tmp_path / "kept")
    assert list(tmp_path.iterdir()) == []
