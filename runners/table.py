"""The trials of a search in tables on its parent, so that who reads thousands of them asks the store for few."""

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runners.artifacts import ArtifactWriter, write
from runners.store import every_run
from search_space.batches import (
    COVERS,
    SIZE,
    Coverage,
    batch_name,
    is_settled,
    newest,
    newest_tag,
    own_place,
)
from search_space.canon import digest
from search_space.records import Artifact, Tag

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient


class TrialTable:
    """Counts the batches of one driver, and stores those that are whole as the store holds them."""

    def __init__(
        self, client: "MlflowClient", parent: "Run", files: ArtifactWriter, *, driver: str = "", is_served: bool
    ) -> None:
        """`parent` as it was before this driver; `driver` keeps apart one that works beside another.

        Whole batches are stored where `is_served`: a database is read as fast without them.
        """
        self._client = client
        self._parent = parent
        self._files = files
        self._who = digest(driver) if driver else ""
        self._is_served = is_served
        self._number = newest(parent.data.tags).get(self._who, 0) + 1
        self._ended = 0

    @property
    def mark(self) -> str:
        """What a trial that is written now is marked with, under Tag.BATCH."""
        return batch_name(self._number, self._who)

    @property
    def begun(self) -> dict[str, str]:
        """The parent's tag that says so; it must be there before the first trial is marked."""
        return {newest_tag(self._who): str(self._number)}

    def add(self) -> None:
        """Count a trial that has ended; the next batch begins when this one is full."""
        self._ended += 1
        if self._ended < SIZE:
            return
        before = self.mark
        tag, number = newest_tag(self._who), self._number + 1
        write(lambda: self._client.set_tag(self._parent.info.run_id, tag, str(number)))
        self._number, self._ended = number, 0
        if self._is_served:
            experiments = [self._parent.info.experiment_id]
            runs = every_run(self._client, experiments, f"tags.`{Tag.BATCH}` = '{before}'")
            self._put(f"{number - 1:06d}.{self._who}", runs, Coverage(single=frozenset([before])))

    def close(self, runs: Sequence["Run"], tags: Mapping[str, str]) -> None:
        """Put one table in the place of all others; `tags` are the parent's, read before the `runs` of its experiment.

        No other driver may write meanwhile. Of a search that fits into one batch there is none.
        """
        ended = [run for run in runs if is_settled(run.info.status, run.data.tags)]
        if len(ended) < SIZE:
            return
        others = self._files.names(Artifact.TRIALS)
        kept = self._put(f"{self._number:06d}.all", ended, Coverage(through=newest(tags)))
        for path in others:
            if path != kept:
                self._files.remove(path)

    def _put(self, name: str, runs: Iterable["Run"], covers: Coverage) -> str:
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        rows = [_row(run, self._parent) for run in runs if is_settled(run.info.status, run.data.tags)]
        path = f"{Artifact.TRIALS}/{name}.parquet"
        if not rows:
            return path
        table = arrow.Table.from_pylist(rows).replace_schema_metadata({COVERS: covers.to_text()})
        with tempfile.TemporaryDirectory(prefix="assay-trials-") as folder:
            file = Path(folder) / Path(path).name
            parquet.write_table(table, file, compression="zstd")
            self._files.put(path, file)
        return path


def _row(run: "Run", parent: "Run") -> dict[str, Any]:
    """A run under search_space.batches.COLUMNS."""
    info, data = run.info, run.data
    beside = own_place(parent.info.artifact_uri, parent.info.run_id, info.run_id)
    return {
        "run_id": info.run_id,
        "name": info.run_name or "",
        "state": info.status,
        "start": (info.start_time or 0) / 1000,
        "end": (info.end_time or 0) / 1000,
        "artifact_uri": "" if info.artifact_uri == beside else info.artifact_uri,
        "params": json.dumps(dict(data.params)),
        "metrics": json.dumps({name: value for name, value in data.metrics.items() if abs(value) < float("inf")}),
        "tags": json.dumps(dict(data.tags)),
    }
