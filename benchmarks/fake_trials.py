"""Trials that train nothing: each sleeps, and its result follows from its spec alone. For measuring the platform.

Name it to a driver as `fake_trials:made_up`; FAKE_TRIAL_SECONDS in the environment says how long a trial takes.
"""

import os
import time
from pathlib import Path
from typing import Any

from runners.trials import Report, RunJob
from search_space.canon import seed_from
from search_space.records import Metric, Reading, Status, TrialResult, TrialSpec, spec_from_plain

SECONDS = "FAKE_TRIAL_SECONDS"
"""Environment variable: how long a trial takes."""
_ONE_IN = 9
"""One trial in so many diverges."""


def made_up() -> RunJob:
    """What a worker runs instead of training."""
    seconds = float(os.environ.get(SECONDS, "0.05"))

    def run_job(job: dict[str, Any], report: Report) -> TrialResult:
        return _run(spec_from_plain(job["spec"]), seconds, report, job["weights"])

    return run_job


def _run(spec: TrialSpec, seconds: float, report: Report, weights: str) -> TrialResult:
    budget = spec.budget
    drawn = seed_from("fake trial", spec.id) % 1_000_003 / 1_000_003
    steps = range(budget.eval_every, budget.tokens + 1, budget.eval_every)
    curve: list[Reading] = []
    status, reason = Status.OK, ""
    for tokens in steps:
        time.sleep(seconds / len(steps))
        curve.append(Reading(tokens=tokens, loss=2.0 + drawn - tokens / budget.tokens, train_loss=drawn, seconds=0.01))
        if drawn * 1009 % _ONE_IN < 1 and len(curve) > len(steps) // 2:
            status, reason = Status.DIVERGED, "made up"
        elif not report(curve[-1]):
            status, reason = Status.PRUNED, "its loss was not among the better ones"
        if status is not Status.OK:
            break
    if status is Status.OK and weights:
        partial = Path(f"{weights}.partial")
        partial.write_text(spec.id)
        partial.replace(weights)
    found = {Metric.SECONDS: seconds, Metric.TOKENS: float(curve[-1].tokens)}
    if status is Status.OK:
        found[Metric.LOSS] = curve[-1].loss
    return TrialResult(
        status=status, reason=reason, metrics=found, curve=tuple(curve), tokens=curve[-1].tokens, seconds=seconds
    )
