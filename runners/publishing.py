"""What the dashboard shows of a search beside its trials: the report, its first answers, and the best loss so far."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from runners.artifacts import ArtifactWriter, write
from runners.best import Ended, missing_points
from runners.connecting import StoreError
from runners.rows import cut_tag
from runners.store import Store
from search_space.records import Artifact, Metric, Tag

if TYPE_CHECKING:
    from mlflow.entities import Run

_PAGE = "report.html"
_RULE = "\n\n---\n\n"
"""Stands between what was found and what a search says of itself."""
_POINTS = 800
"""Below MLflow's limit of 1000 metrics a request."""


def publish(store: Store, name: str, folder: Path, found: str, ended: Iterable[Ended]) -> None:
    """Put a report's files on the parent run, `found` into its note, and complete the curve of the best loss.

    `ended` are the search's finished trials. Done again it changes nothing. StoreError where the store cannot be
    written.
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
        _complete_best(store, parent, ended)
    except (MlflowException, OSError, SQLAlchemyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise StoreError(
            f"report of {name}: lies in {folder}, but could not be stored in {store.place.uri} ({reason}); check the "
            "rights to the store, then write the report again"
        ) from error


def _complete_best(store: Store, parent: "Run", ended: Iterable[Ended]) -> None:
    """Add the points that the curve of the best loss lacks; those that it has are left alone."""
    from mlflow.entities import Metric as Entry

    history = store.client.get_metric_history(parent.info.run_id, Metric.BEST_SO_FAR)
    points = missing_points(ended, {point.step: point.value for point in history})
    entries = [Entry(Metric.BEST_SO_FAR, point.loss, point.milliseconds, point.step) for point in points]
    for first in range(0, len(entries), _POINTS):
        batch = entries[first : first + _POINTS]
        write(lambda batch=batch: store.client.log_batch(parent.info.run_id, metrics=batch))  # type: ignore[misc]
