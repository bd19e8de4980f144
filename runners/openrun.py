"""One MLflow run being written: what waits to be sent, and what has been sent."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runners.artifacts import ArtifactWriter, write
from runners.rows import checkups_json, cut_tag, is_finite, warned
from search_space.records import Artifact, Metric, Reading, Stage, Tag, TrialResult

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from runners.bulk import Batch, Direct

METRICS_A_BATCH, PARAMS_A_BATCH = 800, 90
"""Below MLflow's own limits of 1000 entities and 100 parameters or tags a request."""


@dataclass
class OpenRun:
    """What waits to be sent, and the steps sent of each metric."""

    run_id: str
    number: int
    stage: Stage
    files: ArtifactWriter
    params: dict[str, str] = field(default_factory=dict)
    metrics: list[tuple[str, float, int, int]] = field(default_factory=list)
    """(name, value, timestamp in ms, step)"""
    tags: dict[str, str] = field(default_factory=dict)
    steps: dict[str, set[int]] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)
    note: str = ""
    """What its page says first."""
    tried: bool = False
    """True when earlier attempts at the trial did not end well."""
    started: float = 0.0
    """Seconds since the epoch from which its points in time count."""
    before: str = ""
    """The status with which the run ended earlier, when it did."""

    def stamp(self, seconds: float) -> int:
        """The point in time so long after the start, in ms; the same whenever it is asked for."""
        return int((self.started + seconds) * 1000)

    def take(self, name: str, value: float, step: int, stamp: int) -> None:
        """Queue a metric unless it is not finite or its step has been logged."""
        steps = self.steps.setdefault(name, set())
        if is_finite(value) and step not in steps:
            self.metrics.append((name, float(value), stamp, step))
            steps.add(step)

    def take_reading(self, reading: Reading, stamp: int) -> None:
        """Queue both losses of a reading."""
        self.take(Metric.VALIDATION_CURVE, reading.loss, reading.tokens, stamp)
        self.take(Metric.TRAIN_CURVE, reading.train_loss, reading.tokens, stamp)

    def take_checkups(self, result: TrialResult, stamp: int) -> None:
        """Queue what the trial's checkups found; the warnings of the last one stand in a tag and on the run's page."""
        for checkup in result.checkups:
            for name, value in checkup.metrics.items():
                self.take(name, value, checkup.tokens, stamp)
        if result.checkups:
            self.files.put_text(Artifact.DIAGNOSTICS, checkups_json(result))
            warnings = "\n".join(result.checkups[-1].warnings)
            self.tags.update({Tag.WARNINGS: cut_tag(warnings)} if warnings else {})
            self.tags[Tag.NOTE] = warned(self.note, result.checkups[-1])

    def send(self, client: "MlflowClient | Batch | Direct") -> None:
        """Send what waits."""
        from mlflow.entities import Metric as Point
        from mlflow.entities import Param, RunTag

        points = [Point(name, value, stamp, step) for name, value, stamp, step in self.metrics]
        params = [Param(name, value) for name, value in self.params.items()]
        tags = [RunTag(name, value) for name, value in self.tags.items()]
        while points or params or tags:
            batch = {
                "metrics": points[:METRICS_A_BATCH],
                "params": params[:PARAMS_A_BATCH],
                "tags": tags[:PARAMS_A_BATCH],
            }
            points, params, tags = points[METRICS_A_BATCH:], params[PARAMS_A_BATCH:], tags[PARAMS_A_BATCH:]
            write(lambda batch=batch: client.log_batch(self.run_id, **batch))  # type: ignore[misc]
        self.metrics, self.params, self.tags = [], {}, {}
