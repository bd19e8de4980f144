"""What a longer training is asked to be, and the spec that comes of it."""

import dataclasses
import os
from dataclasses import dataclass

from runners.candidate import check_budget, pick_device
from search_space.errors import UserError
from search_space.records import Metric, TrialResult, TrialSpec

NO_LIMIT_SECONDS = 1e9
"""budget.max_seconds of a training that ends by its tokens alone."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user wants trained."""

    run: str
    tokens: int
    devices: int = 1
    strategy: str = "ddp"
    resume: bool = False
    data_path: str = ""
    name: str = ""
    device: str = ""
    """'cpu' or 'cuda'; empty: what the run was trained on."""
    checkpoint_tokens: int = 0
    """Tokens between two checkpoints; 0: about a hundredth of the budget."""


def in_whole_batches(asked: Asked, batch: int) -> Asked:
    """What is asked for with tokens rounded to whole batches of so many, at least one."""

    def rounded(tokens: int) -> int:
        return max(round(tokens / batch), 1) * batch if tokens else 0

    return dataclasses.replace(asked, tokens=rounded(asked.tokens), checkpoint_tokens=rounded(asked.checkpoint_tokens))


def longer(spec: TrialSpec, asked: Asked, recorded: TrialResult | None) -> TrialSpec:
    """The spec of a longer training: the same candidate, seeds and number of readings over another budget.

    The tokens asked for are whole batches.
    """
    budget = spec.budget
    batch = budget.batch_tokens
    readings = -(-budget.tokens // budget.eval_every)
    micro = int(recorded.metrics.get(Metric.MICRO_BATCH_TOKENS, 0)) if recorded else 0
    following = dataclasses.replace(
        budget,
        tokens=asked.tokens,
        eval_every=max(asked.tokens // batch // readings, 1) * batch,
        micro_batch_tokens=micro or budget.micro_batch_tokens,
        max_seconds=NO_LIMIT_SECONDS,
    )
    check_budget(following, int(spec.candidate["model"]["train_len"]))
    return dataclasses.replace(
        spec, budget=following, device=pick_device(asked.device or spec.device), diagnostics=False
    )


def check_devices(spec: TrialSpec, devices: int) -> None:
    """UserError unless there are so many devices and they share a batch evenly."""
    if spec.device == "cuda":
        import torch

        there, what = torch.cuda.device_count(), "CUDA devices"
    else:
        there, what = len(os.sched_getaffinity(0)), "CPU cores"
    if devices > there:
        raise UserError(f"--devices {devices}: this machine lends {there} {what}; write at most {there}")
    length = int(spec.candidate["model"]["train_len"])
    rows = spec.budget.batch_tokens // length
    if rows % devices:
        able = [str(count) for count in range(1, min(rows, there) + 1) if rows % count == 0]
        raise UserError(
            f"--devices {devices}: each takes the same number of the {rows} sequences of a batch; "
            f"write {' or '.join(able)}"
        )
