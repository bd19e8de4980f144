"""`assay finals` from end to end: real trainings, a kill in their midst, and what every page then says."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runners.cli import main
from runners.store import Store
from search_space.places import locate
from search_space.records import Stage, Tag

pytestmark = pytest.mark.slow

EXPERIMENT = """
name: tiny
task: {mqar: {seq_len: 16, pairs: 2, vocabulary: 32, examples: 256, eval_lengths: [32]}}
budget: {tokens: 2048, batch_tokens: 256, eval_tokens: 512, eval_every: 1024}
model:
  size: {params: 20k}
  layers: 1
  tied: true
  mixer: {softmax: {kv_heads: 2, queries_per_kv: 1, head_dim: 8, qk_norm: none}}
  position: [none, rotary, alibi]
  ffn: gelu
  norm: rmsnorm
  placement: pre
  init: scaled_normal
optimizer: {adamw: {learning_rate: {low: 1e-3, high: 1e-2, log: true}}}
search: {trials: 5, seed: 1, sampler: random}
engine: {jobs: 2, device: cpu}
"""
WANTED = ("finals", "tiny", "--baseline", "tiny/0", "--top", "1", "--max-seeds", "3", "--sweep", "3", "--delta", "0.01")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands run; empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


Assay = Callable[..., str]


@pytest.fixture
def assay(folder: Path, capsys: pytest.CaptureFixture[str]) -> Assay:
    """Runs a command in the folder, with the exit code it is to have; what it printed, then its messages."""

    def run(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        found = main(arguments)
        said = capsys.readouterr()
        assert found == code, said.out + said.err
        return said.out if code == 0 else said.err

    return run


def ended(assay: Assay) -> dict[str, str]:
    """The spec of every training of the finals that has ended, by name."""
    rows = json.loads(assay("runs", "tiny", "--json"))
    kept = [row for row in rows if row["stage"] in (Stage.SWEEP, Stage.FINAL)]
    return {row["run"]: row["tags"][Tag.SPEC] for row in kept if row["status"] not in ("", "running", "preempted")}


def kill_in_its_midst(folder: Path) -> None:
    """Run the finals in a process of their own, and kill it once two rates of a sweep have ended."""
    root = str(Path(__file__).parents[2])
    store = Store(locate(f"sqlite:///{folder}/mlruns/mlflow.db"))
    running = subprocess.Popen(
        [sys.executable, "-m", "runners", *WANTED],
        env={**os.environ, "PYTHONPATH": root},
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        while running.poll() is None:
            runs = store.children(store.parent("tiny"))
            if sum(run.data.tags[Tag.STAGE] == Stage.SWEEP and Tag.STATUS in run.data.tags for run in runs) >= 2:
                running.kill()
            time.sleep(0.05)
    finally:
        running.kill()
    assert running.wait() == -signal.SIGKILL


def test_finals_survive_a_kill_and_are_told_everywhere(folder: Path, assay: Assay) -> None:
    (folder / "tiny.yaml").write_text(EXPERIMENT)
    assay("search", "tiny.yaml", "--no-report")
    kill_in_its_midst(folder)
    before = ended(assay)
    assert before
    said = assay(*WANTED)
    whole = ended(assay)
    assert before.items() <= whole.items()
    assert len(set(whole.values())) == len(whole)
    assert assay(*WANTED) == said
    assert ended(assay) == whole
    verdict = next(line for line in said.splitlines() if line.startswith("  tiny/"))
    assert " baseline " in verdict
    assert "over test documents" in verdict
    assay("report", "tiny")
    assert verdict.split(": ", 1)[1][:40] in (folder / "reports" / "tiny" / "report.md").read_text()
    final = json.loads(assay("show", "tiny/final/0", "--json"))
    assert {"test/loss", "test/loss_at/32"} <= final["metrics"].keys()
    refused = assay(*WANTED[:-1], "0.02", code=2)
    assert "delta was 0.01, now 0.02" in refused


def test_a_file_can_ask_for_finals_after_the_search(folder: Path, assay: Assay) -> None:
    asked = "baseline: {model: {position: none}}\nfinal: {top: 2, max_seeds: 2, sweep: 0}\n"
    (folder / "tiny.yaml").write_text(EXPERIMENT + asked)
    said = assay("search", "tiny.yaml", "--no-report")
    assert "Verdicts (test split, paired seeds" in said
    assert "minus baseline is" in said
    assert "after 3 paired seeds" in assay("finals", "tiny", "--max-seeds", "3")


def test_what_finals_cannot_do_is_refused_before_anything_is_trained(folder: Path, assay: Assay) -> None:
    (folder / "tiny.yaml").write_text(EXPERIMENT)
    assay("search", "tiny.yaml", "--trials", "2", "--no-report")
    for options, words in (
        (("--top", "6"), "assay finals --top 6: takes 1 to 5"),
        (("--alpha", "0"), "assay finals --alpha 0.0: takes a chance above 0"),
        (("--sweep", "4"), "assay finals --sweep 4: takes one of 0, 3, 5, 7"),
        (("--at-length", "64"), "assay finals --at-length 64: takes one of [32]"),
        ((), "its experiment names no baseline; give --baseline FILE or a run"),
        (("--baseline", "tiny.yaml"), "names no `baseline:` and its space holds several candidates"),
    ):
        assert words in assay("finals", "tiny", *options, code=2)
    assert not ended(assay)
