"""Files in the tracking store: written in place for a local store, uploaded for a server, and re-homed after a move."""

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from search_space.places import Place, present_path

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

Answer = TypeVar("Answer")

WRITE_ATTEMPTS = 6


def write(call: Callable[[], Answer]) -> Answer:
    """The answer of a call that writes, tried again while another process holds the SQLite store's lock."""
    from mlflow.exceptions import MlflowException

    for attempt in range(WRITE_ATTEMPTS):
        try:
            return call()
        except MlflowException as error:
            if "database is locked" not in str(error) or attempt == WRITE_ATTEMPTS - 1:
                raise
            time.sleep(0.2 * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


class ArtifactWriter:
    """The artifacts of one run; each file appears whole or not at all."""

    def __init__(self, client: "MlflowClient", place: Place, run: "Run") -> None:
        self._client = client
        self._run_id = run.info.run_id
        self._uri = run.info.artifact_uri
        self._folder = present_path(run.info.artifact_uri, place)

    def put(self, path: str, file: Path) -> None:
        """Store a local file under a path."""
        if self._folder is None:
            self._upload(path, file)
            return
        self._place(path, lambda partial: shutil.copyfile(file, partial))

    def _place(self, path: str, fill: Callable[[Path], object]) -> None:
        """Fill a file of the local folder, under another name until it is whole."""
        assert self._folder is not None, "only a server can write there"
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        fill(partial)
        partial.replace(target)

    def put_text(self, path: str, text: str, *, keep: bool = False) -> None:
        """Store a text under a path; with `keep`, one that is there already stays."""
        if keep and self.read(path) is not None:
            return
        if self._folder is not None:
            self._place(path, lambda partial: partial.write_text(text))
            return
        with tempfile.TemporaryDirectory(prefix="assay-put-") as folder:
            file = Path(folder) / Path(path).name
            file.write_text(text)
            self._upload(path, file)

    def _upload(self, path: str, file: Path) -> None:
        folder, name = str(Path(path).parent), Path(path).name
        with tempfile.TemporaryDirectory(prefix="assay-put-") as temporary:
            named = file
            if file.name != name:
                named = Path(temporary) / name
                shutil.copyfile(file, named)
            self._client.log_artifact(self._run_id, str(named), "" if folder == "." else folder)

    def remove(self, path: str) -> None:
        """Delete a file; nothing happens where there is none."""
        if self._folder is not None:
            (self._folder / path).unlink(missing_ok=True)
            return
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        if self._is_listed(path):
            get_artifact_repository(self._uri, self._client.tracking_uri).delete_artifacts(path)

    def read(self, path: str) -> Path | None:
        """A file or folder as it lies now, downloaded when only a server has it; None when absent."""
        if self._folder is not None:
            return self._folder / path if (self._folder / path).exists() else None
        return Path(self._client.download_artifacts(self._run_id, path)) if self._is_listed(path) else None

    def names(self, folder: str) -> list[str]:
        """The paths of the files in a folder."""
        if self._folder is not None:
            return sorted(f"{folder}/{file.name}" for file in (self._folder / folder).glob("*") if file.is_file())
        return sorted(entry.path for entry in self._client.list_artifacts(self._run_id, folder) if not entry.is_dir)

    def _is_listed(self, path: str) -> bool:
        parent = str(Path(path).parent)
        listed = self._client.list_artifacts(self._run_id, None if parent == "." else parent)
        return any(entry.path == path for entry in listed)

    def read_text(self, path: str) -> str:
        """The text of a file; empty when absent."""
        file = self.read(path)
        return file.read_text() if file else ""


def whole_file(place: Place) -> None:
    """Bring the log of a SQLite store into its one file, so that the file alone can be copied."""
    if place.database is None:
        return
    with closing(sqlite3.connect(place.database, timeout=20)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def rehome(place: Place) -> None:
    """Point a moved SQLite store at its artifacts' present place, so that MLflow's own pages find them too."""
    if place.database is None:
        return
    with closing(sqlite3.connect(place.database, timeout=20)) as connection, connection:
        rows = connection.execute("SELECT experiment_id, artifact_location FROM experiments").fetchall()
        for experiment, recorded in rows:
            present = place.artifacts / Path(recorded or "").name
            if not recorded or recorded == present.as_uri() or not present.is_dir() or present == place.artifacts:
                continue
            connection.execute(
                "UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?", (present.as_uri(), experiment)
            )
            connection.execute(
                "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?)"
                " WHERE experiment_id = ? AND substr(artifact_uri, 1, ?) = ?",
                (present.as_uri(), len(recorded) + 1, experiment, len(recorded), recorded),
            )
