"""`assay retry`: failed trials run again under their number and run id, and the reason of the first end is kept."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from studied import EXPERIMENT, broken, ok, opened

from runners.attempts import attempts_of
from runners.reopening import Wanted, failed, reopen
from runners.store import Store
from search_space.errors import UserError
from search_space.places import locate
from search_space.records import Stage, Status, Tag


def test_a_reopened_trial_runs_again_and_keeps_its_end_as_an_attempt(tmp_path: Path) -> None:
    with opened(tmp_path) as study:
        for result in (ok(1.0), broken(Status.FAILED), broken(Status.DIVERGED)):
            proposed = study.propose()
            assert proposed is not None
            study.tell(proposed.number, result)
        assert failed(study) == [Wanted(stage=Stage.SEARCH, number=1)]
        reopen(study, [Wanted(stage=Stage.SEARCH, number=1)])
    with opened(tmp_path) as study:
        assert [proposed.number for proposed in study.running()] == [1]
        entry = study.trials()[1]
        assert (entry.result, entry.settled) == (None, False)
        (attempt,) = attempts_of(entry)
        assert (attempt.status, attempt.reason, attempt.asked) == (Status.FAILED, "made up", True)
        study.tell(1, ok(0.5))
    with opened(tmp_path) as study:
        found = study.trials()[1].result
        assert found is not None
        assert found.status is Status.OK
        assert len(study.trials()) == 3


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "ended as ok, so there is nothing to try again"), (1, "has not ended"), (7, "holds 2 such trials")],
)
def test_what_cannot_be_tried_again_is_refused_and_nothing_changes(tmp_path: Path, number: int, words: str) -> None:
    with opened(tmp_path) as study:
        for _ in range(2):
            assert study.propose() is not None
        study.tell(0, ok(1.0))
        with pytest.raises(UserError, match=words):
            reopen(study, [Wanted(stage=Stage.SEARCH, number=number)])
        assert [each.result is None for each in study.trials()] == [False, True]


BLOCK = """
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from blocks.families import AbstractPremixer, Dims, MixerModule
from blocks.premixers.none import Passing
from blocks.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Mended(AbstractPremixer):
    'Breaks while a file called broken lies beside it.'

    kind: ClassVar[str] = "mended"
    paper: ClassVar[str] = "none: a test's own block"

    def build(self, dims: Dims) -> MixerModule:
        if Path(__file__).with_name("broken").exists() and torch.empty(0).device.type != "meta":
            raise RuntimeError("not mended yet")
        return Passing()

    def flops_per_token(self, dims: Dims) -> float:
        return 0.0
"""


def assay(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    return subprocess.run(
        [sys.executable, "-m", "runners", *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
def test_failed_trials_are_told_apart_and_run_again_on_demand_in_their_own_runs(tmp_path: Path) -> None:
    """Each failed trial shows its class, what it raised, its last lines and its memory; `retry` mends what can be."""
    text = EXPERIMENT.replace("  ffn:", "  premixer: [mended, none]\n  ffn:") + "\nblocks: [mended]\n"
    (tmp_path / "small.yaml").write_text(text)
    (tmp_path / "mended.py").write_text(BLOCK)
    (tmp_path / "broken").touch()
    sets = (
        "search.sampler=grid",
        "optimizer.adamw.learning_rate=0.003",
        "model.mixer={softmax: {kv_heads: 1, queries_per_kv: 1, head_dim: 8, qk_norm: none}}",
        "model.position=none",
    )
    overrides = [word for each in sets for word in ("--set", each)]
    searched = assay(tmp_path, "search", "small.yaml", "--no-report", "--trials", "2", "--retries", "1", *overrides)
    assert "is run again: failed: RuntimeError: not mended yet" in searched.stderr
    place = locate(folder=tmp_path, environment={})
    before = {run.info.run_id: run for run in Store(place).children(Store(place).parent("small"))}
    (bad,) = (run for run in before.values() if run.data.tags[Tag.STATUS] == Status.FAILED)
    name = f"small/{bad.data.tags[Tag.NUMBER]}"
    shown = assay(tmp_path, "show", name).stdout
    for words in (
        "status   failed (failed)",
        "reason   RuntimeError: not mended yet",
        "attempt  1: failed at 0 tokens",
    ):
        assert words in shown
    for words in ("peak_bytes", "last lines", "mended.py"):
        assert words in shown

    again = assay(tmp_path, "retry", "small", "--failed")
    assert again.returncode == 1
    (tmp_path / "broken").unlink()
    mended = assay(tmp_path, "retry", name)
    assert mended.returncode == 0, mended.stderr
    assert f"{name}: ok" in mended.stdout
    after = {run.info.run_id: run for run in Store(place).children(Store(place).parent("small"))}
    assert after.keys() == before.keys()
    run = after[bad.info.run_id]
    assert (run.data.tags[Tag.STATUS], run.info.status) == ("ok", "FINISHED")
    assert run.data.tags[Tag.NUMBER] == bad.data.tags[Tag.NUMBER]
    lines = run.data.tags[Tag.ATTEMPTS].splitlines()
    assert [line.partition(":")[0] for line in lines] == ["1", "2", "3", "4"]
    assert all("not mended yet" in line for line in lines)
    assert Store(place).result(run).status is Status.OK
    assert "last lines" not in assay(tmp_path, "show", name).stdout

    nothing = assay(tmp_path, "retry", "small", "--failed")
    assert (nothing.returncode, nothing.stdout) == (0, "small: no trial failed\n")
    for arguments, words in (
        (("retry", name), "so there is nothing to try again"),
        (("retry", "small"), "add --failed, or name one of its runs"),
        (("retry", name, "--failed"), "takes the name of a search"),
    ):
        refused = assay(tmp_path, *arguments)
        assert refused.returncode == 2
        assert words in refused.stderr
