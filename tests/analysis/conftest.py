"""One synthetic search, written once and copied for each test that changes it."""

import os
import shutil
from pathlib import Path

import pytest
import synthetic

from analysis.frame import Search
from analysis.load import load_search

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tracking store that holds no search; its schema is made once."""
    from mlflow.tracking import MlflowClient

    root = tmp_path_factory.mktemp("empty store")
    MlflowClient(store_uri(root)).search_experiments(max_results=1)
    return root


@pytest.fixture(scope="session")
def store(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store that holds the search 'quickstart' (30 trials, 16 finals)."""
    root = tmp_path_factory.mktemp("store") / "mlruns"
    shutil.copytree(empty_store, root)
    synthetic.write(store_uri(root), root)
    return root


@pytest.fixture(scope="session")
def uri(store: Path) -> str:
    return store_uri(store)


@pytest.fixture(scope="session")
def search(uri: str) -> Search:
    return load_search(uri, "quickstart")


def store_uri(root: Path) -> str:
    return f"sqlite:///{root}/mlflow.db"
