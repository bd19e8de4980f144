"""Exported models in MLflow's model registry, under the name of their search; safetensors and text, nothing pickled."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from runners.artifacts import ArtifactWriter, write
from runners.connecting import StoreError
from runners.store import Store
from search_space.records import Artifact, Metric, Tag

if TYPE_CHECKING:
    from mlflow.entities import Run

BEST = "best"
"""The alias of the version whose run has the lowest loss of its search."""


def register(store: Store, run: "Run", folder: Path) -> str:
    """Keep an exported folder on its run and enter it as a version of the model NAME: 'models:/NAME/VERSION'.

    A run is entered once; its version is brought up to date after that. Empty where the store has no registry.
    """
    from mlflow.exceptions import MlflowException

    name = run.data.tags[Tag.SEARCH]
    files = ArtifactWriter(store.client, store.place, run)
    try:
        found = store.client.search_model_versions(f"name = '{name}'")
    except MlflowException as error:
        if error.error_code in ("FEATURE_DISABLED", "ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED"):
            return ""
        raise
    try:
        for file in sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
            files.put(f"{Artifact.EXPORT}/{file.relative_to(folder).as_posix()}", file)
        version = _version(store.client, name, run, [entry for entry in found if entry.run_id == run.info.run_id])
    except (MlflowException, OSError) as error:
        raise StoreError(
            f"model {name}: lies in {folder}, but could not be registered in {store.place.uri} ({error}); check the "
            "rights to the store, then export it to another folder"
        ) from error
    if store.find_run(f"{name}/{BEST}").info.run_id == run.info.run_id:
        write(lambda: store.client.set_registered_model_alias(name, BEST, version))
    return f"models:/{name}/{version}"


def _version(client: Any, name: str, run: "Run", found: list[Any]) -> str:
    """The version of this run, made where there is none."""
    from mlflow.exceptions import MlflowException

    if found:
        return str(found[0].version)
    about = f"Models that were exported from the search {name}. Each version: safetensors, config.json, load_model.py."
    try:
        write(lambda: client.create_registered_model(name, description=about))
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    run_id = run.info.run_id
    # Named by its run, a version is found after its store was moved.
    made = write(
        lambda: client.create_model_version(
            name,
            f"runs:/{run_id}/{Artifact.EXPORT}",
            run_id,
            tags={Tag.SPEC: run.data.tags[Tag.SPEC], Tag.ARCH: run.data.tags[Tag.ARCH]},
            description=_described(run),
        )
    )
    return str(made.version)


def _described(run: "Run") -> str:
    metrics, tags = run.data.metrics, run.data.tags
    numbers = [f"{metric} {metrics[metric]:.6g}" for metric in (Metric.LOSS, Metric.PARAMS) if metric in metrics]
    return (
        f"Run `{run.info.run_name}` ({', '.join(numbers)}). Load it without any store: download the version, then\n\n"
        f"```\nfrom load_model import load\n```\n\nTrain it again: `assay replay {tags[Tag.SEARCH]}/{tags[Tag.NUMBER]}`"
    )
