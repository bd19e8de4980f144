"""What all trials of a search share, stored once on its parent run: the experiment, its space, the code, the data."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from runners import rows
from runners.artifacts import ArtifactWriter
from runners.environment import Environment
from search_space.records import Artifact

if TYPE_CHECKING:
    from runners.tasks.data import TaskData
    from search_space.experiment import Experiment

DATA_LIMIT = 16 * 2**20
"""Bytes up to which a search's data is kept in the store."""


def store_shared(files: ArtifactWriter, experiment: "Experiment", data: "TaskData", environment: Environment) -> None:
    """Store it; a later environment goes beside the first."""
    for path, text in rows.experiment_files(experiment).items():
        files.put_text(path, text)
    store_environment(files, environment)
    target = f"{Artifact.DATA}/{data.fingerprint}.safetensors"
    if data.size_bytes <= DATA_LIMIT and files.read(target) is None:
        with tempfile.TemporaryDirectory(prefix="assay-data-") as temporary:
            file = Path(temporary) / f"{data.fingerprint}.safetensors"
            data.save(file)
            files.put(target, file)


def store_environment(files: ArtifactWriter, environment: Environment) -> None:
    """Store the code; a later environment goes beside the first."""
    recorded = rows.environment_files(environment)
    first = files.read_text(Artifact.ENVIRONMENT)
    beside = f"{Artifact.ENVIRONMENTS}/{environment.id}/"
    folder = "" if first in ("", recorded[Artifact.ENVIRONMENT]) else beside
    for path, text in recorded.items():
        files.put_text(f"{folder}{path}", text)


def kept_data(data: "TaskData", folder: Path) -> Path:
    """The one file under a study's folder that workers read the search's data from."""
    file = folder / f"data-{data.fingerprint[:12]}.safetensors"
    data.save(file)
    return file
