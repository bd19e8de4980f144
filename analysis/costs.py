"""What a search cost as a whole: time, tokens, FLOPs, and on which machine."""

import json
import math

from analysis import load
from analysis.frame import Search
from analysis.tables import quantity
from search_space.records import Artifact, Metric

_TRAINING = 3
"""FLOPs of a training step over those of its forward pass: the backward pass takes twice as many."""


def cost_lines(search: Search) -> list[str]:
    """Totals over everything that was trained, pruned and failed trials included."""
    trained = search.trainings
    ends = [end for end in (search.parent.run.end, *trained["end"]) if end > 0]
    wall = max(ends) - search.parent.run.start if ends else math.nan
    lines = [f"{len(trained)} trainings, finals and all"]
    if wall > 0:
        lines.append(f"wall time: {_duration(wall)} from the start of the search to the last end")
    if Metric.SECONDS in trained and trained[Metric.SECONDS].notna().any():
        lines.append(f"sum of the trainings' own time: {_duration(float(trained[Metric.SECONDS].sum()))}")
    lines.append(f"training tokens: {quantity(float(trained[Metric.TOKENS].sum()))}")
    if Metric.FLOPS in trained:
        flops = float((_TRAINING * trained[Metric.FLOPS] * trained[Metric.TOKENS]).sum())
        lines.append(f"training FLOPs: {quantity(flops)} (3 × forward × tokens; evaluation not counted)")
    return [*lines, *_machines(search)]


def _machines(search: Search) -> list[str]:
    """The processors that the finished trials name, and how many ran at a time."""
    names: dict[str, None] = {}
    told = search.trainings.drop_duplicates(["stage", "status"])["run_id"]
    for row in load.runs_by_id(search.uri, list(told)):
        file = load.artifact(search.uri, row, Artifact.RESULT)
        if file is None:
            continue
        result = json.loads(file.read_text(encoding="utf-8"))
        held = result.get("environment", {})
        model = held.get("gpu") if result.get("device") == "cuda" else held.get("cpu_model")
        threads = f", {held['threads']} threads a training" if held.get("threads", "1") != "1" else ""
        names[f"{model or held.get('machine', '')} ({result.get('device', '')}{threads})"] = None
    lines = [f"machine: {', '.join(names)}"] if names else []
    jobs = search.parent.experiment.get("engine", {}).get("jobs")
    return [*lines, f"jobs at a time: {jobs} (as the file asks)"] if jobs else lines


def _duration(seconds: float) -> str:
    """A time in the two units that tell it best."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes} min {left} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
