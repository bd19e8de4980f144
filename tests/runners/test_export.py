import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tracked import searched, store_uri, train_search

from runners.candidate import rebuild
from runners.export import CONFIG, LOADER, ExportError, export, registered
from runners.store import Store
from search_space.places import locate
from search_space.records import Artifact, Metric

LOAD = """
import sys
sys.path.insert(0, {folder!r})
import torch
from load_model import load
model = load()
tokens = torch.arange(64).reshape(2, 32) % 32
with torch.no_grad():
    logits, _ = model(tokens)
torch.save(logits, {out!r})
foreign = [name for name in sys.modules if name.split(".")[0] in ("mlflow", "optuna", "runners")]
assert not foreign, foreign
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = store_uri(tmp_path_factory.mktemp("trained"))
    train_search(uri, trials=2, keep_weights=(0,), prune_at={1: 4096})
    return uri


def loaded(folder: Path, out: Path) -> torch.Tensor:
    """Logits of the exported model in a fresh process that knows no store."""
    code = LOAD.format(folder=str(folder), out=str(out))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean, cwd=folder)
    assert done.returncode == 0, done.stderr
    logits: torch.Tensor = torch.load(out, weights_only=True)
    return logits


def validation_loss(folder: Path) -> float:
    """The exported weights' loss on the split the run was scored on."""
    from safetensors.torch import load_model

    from runners.evaluate import evaluate

    search = searched()
    spec, _ = search.trial(0)
    model = rebuild(spec).model.build(seed=5)
    load_model(model, str(folder / Artifact.MODEL))
    batches = search.data.evaluation("validation", spec.budget.eval_tokens, search.data.shape.train_len)
    return evaluate(model, batches, "cpu", "float32").loss


def test_kept_weights_load_in_a_fresh_process_and_score_the_same(trained: str, tmp_path: Path) -> None:
    folder = export("tiny/0", str(tmp_path / "model"), trained)
    assert {file.name for file in folder.iterdir()} == {Artifact.MODEL, CONFIG, LOADER, "README.md"}
    logits = loaded(folder, tmp_path / "logits.pt")
    spec, _ = searched().trial(0)
    from safetensors.torch import load_model

    model = rebuild(spec).model.build(seed=9)
    load_model(model, str(folder / Artifact.MODEL))
    with torch.no_grad():
        expected, _ = model.eval()(torch.arange(64).reshape(2, 32) % 32)
    assert torch.equal(logits, expected)
    run = Store(locate(trained)).find_run("tiny/0")
    assert validation_loss(folder) == run.data.metrics[Metric.LOSS]
    assert f"{run.data.metrics[Metric.LOSS]:.6g}" in (folder / "README.md").read_text()
    assert json.loads((folder / CONFIG).read_text())["run"] == run.info.run_id


def test_an_export_is_one_version_in_the_registry_and_outlives_a_move(trained: str, tmp_path: Path) -> None:
    folder = export("tiny/0", str(tmp_path / "model"), trained)
    assert [registered(folder, trained) for _ in range(2)] == ["models:/tiny/1"] * 2
    client = Store(locate(trained)).client
    version = client.get_model_version_by_alias("tiny", "best")
    assert (str(version.version), version.run_id) == ("1", json.loads((folder / CONFIG).read_text())["run"])
    assert "assay replay tiny/0" in version.description
    moved = tmp_path / "moved"
    shutil.copytree(Path(trained.removeprefix("sqlite:///")).parent, moved)
    store = Store(locate(f"sqlite:///{moved}/mlflow.db"))
    source = store.client.get_model_version_download_uri("tiny", "1")
    kept = store.artifact(store.find_run("tiny/0"), source.rpartition("/")[2])
    assert kept is not None
    assert kept.is_relative_to(moved)
    assert {file.name for file in kept.iterdir()} == {Artifact.MODEL, CONFIG, LOADER, "README.md"}
    assert (kept / Artifact.MODEL).read_bytes() == (folder / Artifact.MODEL).read_bytes()


def test_weights_not_kept_are_trained_again_and_equal(trained: str, tmp_path: Path) -> None:
    store = Store(locate(trained))
    kept = store.artifact(store.find_run("tiny/0"), Artifact.MODEL)
    assert kept is not None
    whole = kept.read_bytes()
    kept.unlink()
    try:
        folder = export("tiny/0", str(tmp_path / "model"), trained)
    finally:
        kept.write_bytes(whole)
    assert (folder / Artifact.MODEL).read_bytes() == whole
    assert "bit-equal" in (folder / "README.md").read_text()


def test_a_folder_that_holds_something_is_left_alone(trained: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match="is not empty"):
        export("tiny/0", str(tmp_path), trained)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_run_without_a_finished_model_is_refused_and_nothing_is_left(trained: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="ended as pruned"):
        export("tiny/1", str(tmp_path / "model"), trained)
    assert not list(tmp_path.iterdir())
