"""A trained model as a folder that needs no tracking store: weights, config, a short loader, and what it scored."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runners.registry import register
from runners.replay import replay
from runners.store import Store
from search_space.errors import UserError
from search_space.places import locate
from search_space.records import Artifact, Metric, Status, Tag, TrialResult, TrialSpec

if TYPE_CHECKING:
    from mlflow.entities import Run

CONFIG = "config.json"
LOADER = "load_model.py"

_LOADER_TEXT = '''"""Load this folder's model; needs torch, safetensors and `blocks` (package assay-search)."""

import json
import sys
from pathlib import Path

from safetensors.torch import load_model

from blocks.model import DecoderLM, ModelConfig
from blocks.registry import decode, load_modules


def load(folder: Path = Path(__file__).parent) -> DecoderLM:
    """The trained model on the CPU, in evaluation mode: tokens [B, T] -> (logits [B, T, vocabulary], 0)."""
    config = json.loads((folder / "config.json").read_text())
    sys.path.append(str(folder))  # your own blocks lie beside this file
    load_modules(tuple(config["blocks"]))
    model = decode(ModelConfig, config["model"]).build(seed=0)
    load_model(model, str(folder / "model.safetensors"))
    return model.eval()


if __name__ == "__main__":
    print(load())
'''


class ExportError(UserError):
    """A run that cannot be exported; the message says why and what to do."""


def export(run: str, to: str, uri: str = "", data_path: str = "", *, recorded_blocks: bool = False) -> Path:
    """Write the model of a run into a new folder, whole or not at all; the folder.

    The weights are the run's own artifact. Where it kept none, the run is trained again and must come out bit-equal
    (or within the spread where the record promises no more).
    """
    target = Path(to).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportError(f"export --to {to}: is not empty; name a folder that is new or empty")
    store = Store(locate(uri))
    found = store.find_run(run)
    spec, result = store.spec(found), store.result(found)
    if result.status != Status.OK:
        raise ExportError(
            f"run {run}: ended as {result.status} ({result.reason or 'no reason given'}) without a finished model; "
            f"export one that ended as ok, such as {found.data.tags[Tag.SEARCH]}/best"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        source = _weights(store, found, run, partial / Artifact.MODEL, uri, data_path, recorded_blocks)
        (partial / CONFIG).write_text(json.dumps(_config(spec, found), indent=2) + "\n")
        own = store.environment_file(found, Artifact.BLOCKS) if spec.blocks else None
        if own is not None:
            shutil.copytree(own, partial, dirs_exist_ok=True)
        (partial / LOADER).write_text(_LOADER_TEXT)
        (partial / "README.md").write_text(_readme(spec, result, found, source))
        partial.chmod(0o755)
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def registered(folder: Path, uri: str = "") -> str:
    """The name under which an exported folder now stands in its store's model registry; empty where there is none."""
    store = Store(locate(uri))
    found = store.client.get_run(json.loads((folder / CONFIG).read_text())["run"])
    return register(store, found, folder)


def _weights(store: Store, found: "Run", run: str, path: Path, uri: str, data_path: str, recorded_blocks: bool) -> str:
    """Put the weights at the path; in words where they come from."""
    kept = store.artifact(found, Artifact.MODEL, required=False)
    if kept is not None:
        shutil.copyfile(kept, path)
        return "as the run kept them"
    report = replay(run, uri, data_path, recorded_blocks=recorded_blocks, weights=path)
    if not report.good or not path.exists():
        raise ExportError(f"run {run}: kept no weights, and training it again did not repeat it; {report.text()}")
    return f"trained again from the record, {report.verdict()}"


def _config(spec: TrialSpec, run: "Run") -> dict[str, Any]:
    return {
        "model": spec.candidate["model"],
        "blocks": list(spec.blocks),
        "task": spec.task,
        "run": run.info.run_id,
        "spec": spec.id,
        "arch": run.data.tags[Tag.ARCH],
    }


def _readme(spec: TrialSpec, result: TrialResult, run: "Run", source: str) -> str:
    tags = run.data.tags
    wanted = (
        Metric.LOSS,
        Metric.TEST_LOSS,
        Metric.ACCURACY,
        Metric.TEST_ACCURACY,
        Metric.PARAMS,
        Metric.ACTIVE_PARAMS,
        Metric.BODY_PARAMS,
        Metric.FLOPS,
        Metric.STATE_BYTES,
        Metric.FIXED_STATE_BYTES,
    )
    rows = [f"| {name} | {run.data.metrics[name]:.6g} |" for name in wanted if name in run.data.metrics]
    kinds = {name: value["kind"] for name, value in spec.candidate["model"].items() if isinstance(value, dict)}
    lines = [
        f"# {tags[Tag.SEARCH]}: {run.info.run_name}",
        "",
        f"Trained on `{spec.task['kind']}` (data `{spec.data_fingerprint[:12]}`) for {result.tokens:,} tokens, "
        f"{spec.dtype} on {result.device}; weights {source}.",
        "",
        "| number | value |",
        "|---|---|",
        *rows,
        "",
        "Losses are nats per token on the validation split; FLOPs are forward, per token.",
        "",
        "Blocks: " + ", ".join(f"{name} {kind}" for name, kind in kinds.items()) + ".",
        "",
        "```python",
        "from load_model import load",
        "",
        "logits, _ = load()(tokens)  # tokens: int64 [batch, time]",
        "```",
        "",
        f"Run `{run.info.run_id}`, spec `{spec.id}`, architecture `{tags[Tag.ARCH]}`.",
    ]
    return "\n".join(lines) + "\n"
