"""What the dashboard shows of a search beside its trials: the report, its first answers, and the best loss so far."""

from pathlib import Path
from typing import TYPE_CHECKING

from runners.artifacts import ArtifactWriter, write
from runners.connecting import StoreError
from runners.rows import cut_tag
from runners.store import Store
from search_space.records import Artifact, Metric, Stage, Status, Tag

if TYPE_CHECKING:
    from mlflow.entities import Run

_PAGE = "report.html"
_RULE = "\n\n---\n\n"
"""Stands between what was found and what a search says of itself."""
_POINTS = 800
"""Below MLflow's limit of 1000 metrics a request."""


def publish(store: Store, name: str, folder: Path, found: str) -> None:
    """Put a report's files on the parent run, `found` into its note, and complete the curve of the best loss.

    Done again it changes nothing. StoreError where the store cannot be written.
    """
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    parent = store.parent(name)
    try:
        files = ArtifactWriter(store.client, store.place, parent)
        for file in sorted(path for path in folder.iterdir() if path.suffix in (".html", ".md", ".png")):
            files.put(f"{Artifact.REPORT}/{file.name}", file)
        own = parent.data.tags.get(Tag.NOTE, "").rpartition(_RULE)[2]
        where = f"The whole report: `{Artifact.REPORT}/{_PAGE}` among the artifacts."
        note = cut_tag(f"{found}\n\n{where}{_RULE}{own}")
        write(lambda: store.client.set_tag(parent.info.run_id, Tag.NOTE, note))
        _complete_best(store, parent)
    except (MlflowException, OSError, SQLAlchemyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise StoreError(
            f"report of {name}: lies in {folder}, but could not be stored in {store.place.uri} ({reason}); check the "
            "rights to the store, then write the report again"
        ) from error


def _complete_best(store: Store, parent: "Run") -> None:
    """The lowest final loss after so many finished trials, on the parent; what it holds already is left alone."""
    from mlflow.entities import Metric as Point

    done = [run for run in store.children(parent) if _has_finished(run)]
    done.sort(key=lambda run: (run.info.end_time, int(run.data.tags[Tag.NUMBER])))
    held = {point.step for point in store.client.get_metric_history(parent.info.run_id, Metric.BEST_SO_FAR)}
    points, best = [], float("inf")
    for place, run in enumerate(done, 1):
        best = min(best, run.data.metrics[Metric.LOSS])
        if place not in held:
            points.append(Point(Metric.BEST_SO_FAR, best, run.info.end_time, place))
    for first in range(0, len(points), _POINTS):
        batch = points[first : first + _POINTS]
        write(lambda batch=batch: store.client.log_batch(parent.info.run_id, metrics=batch))  # type: ignore[misc]


def _has_finished(run: "Run") -> bool:
    tags = run.data.tags
    return tags[Tag.STAGE] == Stage.SEARCH and tags.get(Tag.STATUS) == Status.OK and Metric.LOSS in run.data.metrics
