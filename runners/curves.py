"""All readings of a search as Parquet shards on its parent run: thousands of curves are read at once."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from runners.artifacts import ArtifactWriter
from search_space.canon import digest
from search_space.records import Artifact, Reading, Stage

SHARD_TRIALS = 64
"""Finished trials that fill a shard."""
_MOST = 8
"""Shards that are left apart when a search ends."""


class CurveShards:
    """Collects the curves of finished trials and hands them on as shards; a trial in a shard is not repeated."""

    def __init__(self, folder: Path | None, put: Callable[[str, Path], None], driver: str = "") -> None:
        """`folder` holds the shards written so far, None when there are none; `put` stores a file as an artifact.

        `driver` keeps apart the shards of one that works beside another.
        """
        import pyarrow.parquet as parquet

        self._put = put
        self._held: dict[str, int] = {}
        self._rows: dict[str, list[dict[str, object]]] = {}
        shards = sorted(folder.glob("*.parquet")) if folder else []
        self._next = 1 + max(map(_number, shards), default=-1)
        self._ending = f"-{digest(driver)}" if driver else ""
        for shard in shards:
            for run in parquet.read_table(shard, columns=["run"])["run"].to_pylist():
                self._held[run] = self._held.get(run, 0) + 1

    def holds(self, run: str, readings: int) -> bool:
        """True when at least so many readings of the run are in a shard or about to be."""
        return max(self._held.get(run, 0), len(self._rows.get(run, ()))) >= readings

    def add(self, run: str, number: int, stage: Stage, curve: tuple[Reading, ...]) -> None:
        """Take a finished trial's curve; a full shard is stored."""
        if self.holds(run, len(curve)):
            return
        self._rows[run] = [
            {
                "run": run,
                "number": number,
                "stage": str(stage),
                "tokens": reading.tokens,
                "loss": reading.loss,
                "train_loss": reading.train_loss,
                "seconds": reading.seconds,
            }
            for reading in curve
        ]
        if len(self._rows) >= SHARD_TRIALS:
            self.flush()

    def flush(self) -> None:
        """Store what has been collected, if anything."""
        if not self._rows:
            return
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        table = arrow.Table.from_pylist([row for rows in self._rows.values() for row in rows])
        with tempfile.TemporaryDirectory(prefix="assay-curves-") as folder:
            shard = Path(folder) / f"{self._next:05d}{self._ending}.parquet"
            parquet.write_table(table, shard)
            self._put(f"{Artifact.CURVES}/{shard.name}", shard)
        self._held.update({run: len(rows) for run, rows in self._rows.items()})
        self._rows.clear()
        self._next += 1

    def join(self, files: ArtifactWriter) -> None:
        """Put one shard in the place of many; no other driver may write meanwhile.

        A reader that meets both sees each reading once.
        """
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        self.flush()
        paths = files.names(Artifact.CURVES)
        whole = files.read(Artifact.CURVES) if len(paths) > _MOST else None
        if whole is None:
            return
        parts = [parquet.read_table(file) for file in sorted(whole.glob("*.parquet"))]
        self._next = 1 + max(map(_number, paths))
        with tempfile.TemporaryDirectory(prefix="assay-curves-") as folder:
            shard = Path(folder) / f"{self._next:05d}.parquet"
            parquet.write_table(arrow.concat_tables(parts, promote_options="permissive"), shard)
            files.put(f"{Artifact.CURVES}/{shard.name}", shard)
        self._next += 1
        for path in paths:
            files.remove(path)


def _number(path: Path | str) -> int:
    return int(Path(path).stem.partition("-")[0])
