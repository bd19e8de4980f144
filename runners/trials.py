"""How a worker comes to what runs its trials: by the import path that its driver names."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from search_space.records import Reading, TrialResult, spec_from_plain

TRAINED = "runners.trials:trained"
"""Import path, MODULE:FUNCTION, of what makes the trials of every search; measurements of the platform name others."""

Report = Callable[[Reading], bool]
"""Takes a reading; False when the trial is to end with it."""
RunJob = Callable[[dict[str, Any], Report], TrialResult]
"""Runs one job, as the local engine sends it."""


def named(path: str) -> RunJob:
    """What the function at an import path makes; it is called once per worker, so it may import at its leisure."""
    module, _, function = path.partition(":")
    run_job: RunJob = getattr(importlib.import_module(module), function)()
    return run_job


def trained() -> RunJob:
    """Trials that train their candidate; data are loaded once, and all code before the first of them."""
    from runners.candidate import full_space
    from runners.checkpoints import Checkpointing
    from runners.tasks.data import TaskData
    from runners.train import run_trial

    full_space()
    _train_once()
    data: dict[str, TaskData] = {}

    def checkpointing(kept: dict[str, Any] | None) -> Checkpointing | None:
        if kept is None:
            return None
        shared = Path(kept["shared"]) if kept["shared"] else None
        return Checkpointing(**{**kept, "folder": Path(kept["folder"]), "shared": shared})

    def run_job(job: dict[str, Any], report: Report) -> TrialResult:
        if job["data"] not in data:
            data.clear()
            data[job["data"]] = TaskData.load(Path(job["data"]))
        return run_trial(
            spec_from_plain(job["spec"]),
            data[job["data"]],
            report,
            weights=Path(job["weights"]) if job["weights"] else None,
            test=job["test"],
            checkpoint=checkpointing(job["checkpoint"]),
            micro_batch_tokens=job["micro_batch_tokens"],
        )

    return run_job


def _train_once() -> None:
    """Have torch load now what it otherwise loads at the first step and at the first tensor without memory."""
    import torch

    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.zeros(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cat([torch.zeros(1, device="meta")] * 2)
