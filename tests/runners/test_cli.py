"""The command line from end to end: each command as a process of its own, over one small real search."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from runners.cli import main
from search_space.experiment import preset_path

EXPERIMENT = """
name: tiny
task: {mqar: {seq_len: 16, pairs: 2, vocabulary: 32, examples: 256}}
budget: {tokens: 4096, batch_tokens: 256, eval_tokens: 512, eval_every: 1024}
model:
  size: {params: 20k}
  layers: 1
  mixer:
    softmax: {kv_heads: 2, queries_per_kv: 1, head_dim: 8, qk_norm: none}
  position: [none, rotary, alibi]
  ffn: gelu
  norm: rmsnorm
  placement: pre
  init: scaled_normal
optimizer: {adamw: {learning_rate: {low: 1e-3, high: 1e-2, log: true}}}
search: {trials: 4, seed: 1}
engine: {jobs: 2, device: cpu}
final: {seeds: 2, contrasts: {seed_alone: {}}}
"""


def assay(folder: Path, *arguments: str, good: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    done = subprocess.run(
        [sys.executable, "-m", "runners", *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert not good or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a folder with spaces")
    (folder / "tiny.yaml").write_text(EXPERIMENT)
    done = assay(folder, "search", "tiny.yaml")
    for said in (
        "Leaderboard of tiny",
        "What each choice was worth",
        "seed_alone: undecided",
        "report.html",
        "assay best",
    ):
        assert said in done.stdout
    assert "trials 4/4" in done.stderr
    assert "finals 4/4" in done.stderr
    return folder


def processor_seconds() -> float:
    """What all processes took that this one has started; unlike a clock, it does not count what others do meanwhile."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_listings_agree_with_each_other_and_are_quick(searched: Path) -> None:
    (search,) = json.loads(assay(searched, "runs", "--json").stdout)
    assert search["trials"] == {"ok": 4}
    before = processor_seconds()
    runs = json.loads(assay(searched, "runs", "tiny", "--json").stdout)
    assert processor_seconds() - before < 3.0
    assert len(runs) == 8
    best = json.loads(assay(searched, "best", "tiny", "--json").stdout)
    assert best["run"] == search["best"]
    assert best["metrics"]["loss"] == min(run["metrics"]["loss"] for run in runs if run["stage"] == "search")
    shown = json.loads(assay(searched, "show", search["best"], "--json").stdout)
    assert shown["params"] == best["params"]
    assert "params" in json.loads(assay(searched, "compare", "tiny/0", "tiny/1", "--json").stdout)


@pytest.mark.parametrize("words", [("runs", "--json"), ("runs", "tiny", "--json"), ("show", "tiny/0", "--json")])
def test_listing_imports_no_heavy_package(searched: Path, words: tuple[str, ...]) -> None:
    code = (
        f"import sys; from runners.cli import main; assert main({words!r}) == 0; print(*sys.modules, file=sys.stderr)"
    )
    listed = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    listed.pop("MLFLOW_TRACKING_URI", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=searched, env=listed
    )
    assert json.loads(done.stdout)
    assert not {"torch", "optuna", "mlflow", "pandas"} & set(done.stderr.split())


@pytest.mark.slow
def test_winner_as_a_file_holds_one_point(searched: Path) -> None:
    (searched / "winner.yaml").write_text(assay(searched, "best", "tiny", "--as-file").stdout)
    facts = json.loads(assay(searched, "check", "winner.yaml", "--json").stdout)
    best = json.loads(assay(searched, "best", "tiny", "--json").stdout)
    assert facts["points"] == 1
    assert facts["cheapest"]["params"] == best["metrics"]["params"]


def test_replay_is_bit_equal_and_export_loads_alone(searched: Path) -> None:
    replayed = json.loads(assay(searched, "replay", "tiny/best", "--json").stdout)
    assert replayed["good"]
    assert replayed["bit_equal"]
    assay(searched, "export", "tiny/best", "--to", "model")
    assert {file.name for file in (searched / "model").iterdir()} >= {
        "model.safetensors",
        "config.json",
        "load_model.py",
    }


@pytest.mark.slow
def test_same_command_again_trains_nothing_more(searched: Path) -> None:
    before = assay(searched, "runs", "tiny", "--json").stdout
    again = assay(searched, "search", "tiny.yaml")
    assert "Leaderboard of tiny" in again.stdout
    assert assay(searched, "runs", "tiny", "--json").stdout == before


@pytest.mark.slow
def test_edited_file_under_the_same_name_is_refused(searched: Path) -> None:
    (searched / "edited.yaml").write_text(EXPERIMENT.replace("high: 1e-2", "high: 2e-2"))
    done = assay(searched, "search", "edited.yaml", good=False)
    assert done.returncode == 2
    for said in ("learning_rate", "--name", "--extend"):
        assert said in done.stderr


@pytest.mark.slow
def test_removal_asks_first_and_leaves_nothing(searched: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(EXPERIMENT.replace("final: {seeds: 2, contrasts: {seed_alone: {}}}", ""))
    assay(tmp_path, "search", "tiny.yaml", "--trials", "1", "--no-report")
    refused = assay(tmp_path, "rm", "tiny", good=False)
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assay(tmp_path, "rm", "tiny", "--yes")
    assert json.loads(assay(tmp_path, "runs", "--json").stdout) == []
    assert not list((tmp_path / "mlruns" / "studies").glob("tiny*"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("serch", "x"), "invalid choice"),
        (("search", "no_such_file.yaml"), "no such file"),
        (("search", "quickstrat"), "quickstart"),
        (("search", "quickstart", "--trials", "0"), "from 1"),
        (("search", "quickstart", "--set", "model.mixr=softmax"), "mixer"),
        (("blocks", "--family", "mixers"), "mixer"),
        (("show", "nothing/1"), "mlflow.db"),
        (("runs", "--tracking-uri", "ftp://x"), "sqlite:///"),
        (("best", "nothing", "--max-params", "many"), "whole number"),
        (("check", "."), "folder"),
    ],
)
def test_bad_input_is_told_with_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(list(arguments)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "mlruns").exists()


def test_check_tells_cost_without_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", str(preset_path("quickstart")), "--samples", "4", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["points"] is None
    assert 0.9 < facts["legal_and_inside_budget"] <= 1
    assert abs(facts["cheapest"]["params"] / 130_000 - 1) <= 0.01
    assert not (tmp_path / "mlruns").exists()


def test_blocks_lists_every_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["blocks", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert {"softmax", "sliding_window", "linear"} <= {row["kind"] for row in table["mixer"]}
    assert all(row["paper"] and row["meaning"] for rows in table.values() for row in rows)


@pytest.mark.slow
def test_own_block_beside_the_file_is_found_searched_and_exported(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    there = tmp_path / "there"
    there.mkdir()
    (there / "average_beside.py").write_text(source)
    text = EXPERIMENT.replace("task:", "blocks: [average_beside]\ntask:", 1).replace("name: tiny", "name: own")
    text = text.replace("softmax: {kv_heads: 2, queries_per_kv: 1, head_dim: 8, qk_norm: none}", "average: {width: 32}")
    (there / "own.yaml").write_text(text.replace("position: [none, rotary, alibi]", "position: [none, sinusoidal]"))
    assay(tmp_path, "search", "there/own.yaml", "--trials", "2", "--no-report", "--set", "final={}")
    assay(tmp_path, "export", "own/best", "--to", "the model", "--recorded-blocks")
    loaded = subprocess.run(
        [sys.executable, str(tmp_path / "the model" / "load_model.py")],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert loaded.returncode == 0, loaded.stderr
    assert "AverageModule" in loaded.stdout
