"""Train a run again from what the tracking store holds of it, and say whether it is the same."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runners import environment as environments
from runners.comparison import CURVE_ONLY, ReplayReport, Spread, compare, spread_of
from runners.mutations import replayed
from runners.rows import finite_curve
from runners.store import Store
from search_space.errors import UserError
from search_space.places import locate
from search_space.records import (
    DEVICES,
    Artifact,
    Metric,
    Stage,
    Status,
    Tag,
    TrialResult,
    TrialSpec,
    result_from_plain,
    to_plain,
)

if TYPE_CHECKING:
    from mlflow.entities import Run

STOPPED_FROM_OUTSIDE = (Status.PRUNED, *CURVE_ONLY)
"""Statuses that a replay meets by stopping at the last recorded reading."""
ISA_PREFIX = "env/"
_ISA = {
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "AVX512": {"MKL_ENABLE_INSTRUCTIONS": "AVX512"},
}
"""What holds oneDNN and MKL to a recorded CPU capability on a machine that has more."""


class ReplayError(UserError):
    """A run that cannot be trained again here; the message says what is missing."""


def replay(
    run: str,
    uri: str = "",
    data_path: str = "",
    *,
    recorded_blocks: bool = False,
    weights: Path | None = None,
    begins: Callable[[], None] = lambda: None,
) -> ReplayReport:
    """Train a run again in a fresh process under its recorded conditions, and compare every number.

    `data_path` names the data when the store does not hold it. `recorded_blocks` runs the source of the user's block
    modules as the store holds it; without it they must be importable and unchanged. `weights` is where the trained
    model is written, `begins` is called before it trains.
    """
    store = Store(locate(uri))
    found = store.find_run(run)
    spec, recorded, alone = store.spec(found), store.result(found), 0
    if Tag.MUTATIONS in found.data.tags:
        spec, alone = replayed(spec, store.text(found, Artifact.MUTATIONS))
    if DEVICES in recorded.environment:
        raise ReplayError(
            f"run {run}: was trained on several devices ({recorded.environment[DEVICES]}), and a replay runs on one, "
            f"whose sums round otherwise; train it again by assay train with another --name, and compare the two"
        )
    was = store.environment(found)
    changed = _changed_blocks(spec.blocks, was.get("blocks", {}))
    if changed and not recorded_blocks:
        raise ReplayError(_refusal(store, found, changed))
    kept = store.environment_file(found, Artifact.BLOCKS) if changed else None
    code = environments.differences({**was, "blocks": {}}, environments.capture())
    begins()
    again = _train(store, found, spec, recorded, data_path, str(kept or ""), weights)
    return compare(
        run=f"{found.data.tags[Tag.SEARCH]}: {found.info.run_name} ({found.info.run_id[:8]})",
        spec=spec,
        recorded=_after(recorded, alone),
        replayed=_after(again, alone),
        spread=_spread(store, found),
        code=[*code, *(f"blocks.{module}: {how}; the store's source was run" for module, how in changed.items())],
    )


def _train(
    store: Store,
    run: "Run",
    spec: TrialSpec,
    recorded: TrialResult,
    data_path: str,
    block_path: str,
    weights: Path | None,
) -> TrialResult:
    with tempfile.TemporaryDirectory(prefix="assay-replay-") as folder:
        result_file = Path(folder) / "result.json"
        parent = store.parent_of(run)
        held = store.artifact(parent, f"{Artifact.DATA}/{spec.data_fingerprint}.safetensors", required=False)
        job = {
            "spec": to_plain(replace(spec, budget=replace(spec.budget, max_seconds=1e9))),
            "data": "" if data_path or held is None else str(held),
            "data_path": data_path,
            "stop_after": _stop_after(recorded),
            "test": run.data.tags[Tag.STAGE] in (Stage.FINAL, Stage.LADDER),
            "seeds_parts": run.data.tags[Tag.STAGE] == Stage.TRAIN,
            "weights": str(weights) if weights else "",
            "micro_batch_tokens": int(recorded.metrics.get(Metric.MICRO_BATCH_TOKENS, 0)),
            "result": str(result_file),
        }
        job_file = Path(folder) / "job.json"
        job_file.write_text(json.dumps(job))
        done = subprocess.run(
            [sys.executable, "-m", "runners.replay_worker", str(job_file)],
            env=imposed_environment(spec, recorded, block_path),
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if not result_file.exists():
            last = "\n".join(done.stderr.strip().splitlines()[-15:])
            raise ReplayError(
                f"run {run.info.run_name}: cannot be trained again here (exit code {done.returncode}):\n{last}"
            )
        again = result_from_plain(json.loads(result_file.read_text()))
        return replace(again, curve=finite_curve(again.curve))


def _after(result: TrialResult, alone: int) -> TrialResult:
    """Without what a trial of a population read before it went on, after so many tokens, from another one's state."""
    if not alone:
        return result
    curve = tuple(reading for reading in result.curve if reading.tokens > alone)
    metrics = {name: value for name, value in result.metrics.items() if name != Metric.BEST_LOSS}
    return replace(result, curve=curve, metrics=metrics)


def _stop_after(recorded: TrialResult) -> int:
    """Tokens after which the replay is stopped; 0: it ends by itself."""
    if recorded.status not in STOPPED_FROM_OUTSIDE or not recorded.curve:
        return 0
    return recorded.curve[-1].tokens


def imposed_environment(spec: TrialSpec, recorded: TrialResult, block_path: str = "") -> dict[str, str]:
    """This process's environment with every variable that moves numbers as it was recorded, or unset."""
    from runners.conditions import ISA_VARIABLES

    kept = {name: value for name, value in os.environ.items() if name not in ISA_VARIABLES}
    was = recorded.environment
    capability = was.get("cpu_capability", "")
    imposed = {"OMP_NUM_THREADS": str(spec.threads), "MKL_NUM_THREADS": str(spec.threads)}
    if capability and spec.device == "cpu":
        imposed["ATEN_CPU_CAPABILITY"] = capability.lower()
        if was.get("cpu_model") != environments.cpu_model():
            imposed.update(_ISA.get(capability, {}))
    imposed.update({name[len(ISA_PREFIX) :]: value for name, value in was.items() if name.startswith(ISA_PREFIX)})
    if block_path:
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (block_path, kept.get("PYTHONPATH", ""))))
    return {**kept, **imposed}


def _changed_blocks(modules: tuple[str, ...], recorded: Mapping[str, str]) -> dict[str, str]:
    """The user's block modules that are not here as they were recorded, and in which way."""
    changed = {}
    for module in modules:
        try:
            here = environments.module_digest(module)
        except UserError:
            changed[module] = "cannot be imported here"
            continue
        if here != recorded.get(module):
            changed[module] = f"recorded {recorded.get(module, 'nothing')[:12]}, here {here[:12]}"
    return changed


def _refusal(store: Store, run: "Run", changed: Mapping[str, str]) -> str:
    listed = "; ".join(f"{module}: {how}" for module, how in changed.items())
    kept = store.environment_file(run, Artifact.BLOCKS)
    remedy = f"read the recorded source in {kept}, then pass --recorded-blocks to run it" if kept else "restore them"
    return f"run {run.info.run_name}: its block modules are not here as recorded ({listed}); {remedy}"


def _spread(store: Store, run: "Run") -> Spread:
    """How much the finals of this search vary from seed to seed."""
    losses: dict[str, dict[str, float]] = {}
    for child in store.children(store.parent_of(run)):
        if child.data.tags[Tag.STAGE] == Stage.FINAL and Metric.LOSS in child.data.metrics:
            replicas = losses.setdefault(child.data.tags[Tag.POINT], {})
            replicas[child.data.tags[Tag.SPEC]] = child.data.metrics[Metric.LOSS]
    return spread_of({point: list(replicas.values()) for point, replicas in losses.items()})
