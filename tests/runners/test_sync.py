"""A view rebuilt from the study equals the one that was written while the search ran, and rebuilding is idempotent."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from studied import experiment, uri
from test_search import search
from tracked import free_port

from runners.artifacts import rehome
from runners.dashboard import start, stop
from runners.locks import StudyBusy
from runners.store import Store
from runners.study import Study
from runners.sync import sync
from runners.tracking import Tracker
from search_space.errors import UserError
from search_space.places import locate
from search_space.records import Artifact, Metric, Stage, Status, Tag

ASKED = (
    "search.trials=4",
    "search.pruner={asha: {grace_tokens: 256, factor: 2}}",
    "final={seeds: 2, contrasts: {seed_alone: {}}}",
)
OWN = {Tag.DRIVER, Tag.BEAT, Tag.BATCH, Tag.STUDY, "mlflow.user", "mlflow.source.name", "mlflow.source.type"}
"""Tags that say who wrote, not what was found."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a search that was run without a network, at a place that it was moved to."""
    folder = tmp_path_factory.mktemp("node")
    search(folder / "first", *ASKED)
    shutil.move(folder / "first", folder / "copied home")
    rehome(locate(f"sqlite:///{folder}/copied home/mlflow.db"))
    return folder / "copied home"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A real tracking server."""
    place, port = locate(f"sqlite:///{tmp_path}/server/mlflow.db"), free_port()
    Tracker(place.uri)
    process = start(place, port)
    yield f"http://127.0.0.1:{port}"
    stop(process)


def synced(node: Path, to: str) -> tuple[int, int]:
    store = Store(locate(f"sqlite:///{node}/mlflow.db"))
    done = sync("small", study_uri=uri(node), source=store, tracker=Tracker(to), progress=lambda text: None)
    assert done.without_weights == 0
    return done.written, done.present


def everything(store_uri: str) -> dict[str, Any]:
    """All that a store shows of the search, by key: status, times, tags, parameters, every point of every metric."""
    client = MlflowClient(store_uri)
    found: dict[str, Any] = {}
    experiment_id = client.get_experiment_by_name("small").experiment_id
    for run in client.search_runs([experiment_id], max_results=1000):
        points = {
            name: [(p.step, p.value, p.timestamp) for p in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
        tags = {tag: value for tag, value in run.data.tags.items() if tag not in OWN}
        is_parent = tags.pop("mlflow.parentRunId", None) is None
        found[tags[Tag.KEY]] = {
            "status": run.info.status,
            "times": None if is_parent else (run.info.start_time, run.info.end_time),
            "tags": tags,
            "params": run.data.params,
            "metrics": {name: [p[:2] for p in series] for name, series in points.items()} if is_parent else points,
            "files": sorted(artifact.path for artifact in client.list_artifacts(run.info.run_id)),
        }
    return found


@pytest.mark.slow
def test_a_copied_search_is_shown_by_a_server_with_equal_values_and_once(node: Path, server: str) -> None:
    assert synced(node, server) == (8, 0)
    before = everything(f"sqlite:///{node}/mlflow.db")
    shown = everything(server)
    assert shown.keys() == before.keys()
    for key, run in before.items():
        assert shown[key] == run
    assert len(shown) == 9
    assert synced(node, server) == (0, 8)
    assert everything(server) == shown


def test_a_lost_store_is_rebuilt_in_its_place(node: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(node, copy)
    whole = everything(f"sqlite:///{node}/mlflow.db")
    (copy / "mlflow.db").unlink()
    shutil.rmtree(copy / "artifacts")
    (copy / "small" / "data-000000000000.safetensors").write_bytes(b"what a refused command left")
    done = sync(
        "small", study_uri=uri(copy), source=None, tracker=Tracker(f"sqlite:///{copy}/mlflow.db"), progress=print
    )
    assert (done.written, done.present) == (8, 0)
    finished = [run for run in whole.values() if run["tags"].get(Tag.STATUS) == Status.OK]
    searched = [run for run in finished if run["tags"][Tag.STAGE] == Stage.SEARCH]
    assert done.without_weights == len(searched)
    for run in whole.values():
        run["files"] = [file for file in run["files"] if file != Artifact.MODEL]
    assert everything(f"sqlite:///{copy}/mlflow.db") == whole


def test_trials_that_are_missing_are_added_and_nothing_else(node: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(node, copy)
    store = f"sqlite:///{copy}/mlflow.db"
    whole = everything(store)
    lost = Store(locate(store)).find_run("small/2")
    MlflowClient(store).delete_run(lost.info.run_id)
    assert synced(copy, store) == (1, 7)
    again = everything(store)
    loss = whole["small/0/search/2"]["metrics"].get(Metric.LOSS)
    assert again["small/0/search/2"]["metrics"].get(Metric.LOSS) == loss
    assert {key: run for key, run in again.items() if run["tags"].get(Tag.KIND) == "trial"}.keys() == {
        key for key, run in whole.items() if run["tags"].get(Tag.KIND) == "trial"
    }


def test_what_cannot_be_synchronised_is_refused(node: Path, tmp_path: Path) -> None:
    tracker = Tracker(f"sqlite:///{tmp_path}/mlflow.db")

    def attempt(study: str, name: str = "small") -> None:
        sync(name, study_uri=study, source=None, tracker=tracker, progress=print)

    with pytest.raises(UserError, match="holds no search 'other'"):
        attempt(uri(node), "other")
    (tmp_path / "alone").mkdir()
    shutil.copy(node / "study.db", tmp_path / "alone" / "study.db")
    with pytest.raises(UserError, match="copy the study's whole folder"):
        attempt(uri(tmp_path / "alone"))
    with Study.open(uri(node), experiment(*ASKED)), pytest.raises(StudyBusy):
        attempt(uri(node))
