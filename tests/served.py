"""MLflow's tracking server within the test's own process: its handlers over a store, on a real socket of loopback."""

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from werkzeug.serving import WSGIRequestHandler, make_server


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server that answers."""

    uri: str
    asked: list[str] = field(default_factory=list)
    """The paths of all requests so far."""


@contextmanager
def served(store_uri: str, root: Path) -> Iterator[Served]:
    """A server over a store; it hands artifacts out itself, from a folder under `root`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of modules that MLflow imports.
        from mlflow.server import app, handlers
        from mlflow.tracking._model_registry import utils as registry
        from mlflow.tracking._tracking_service import utils as tracking

    asked: list[str] = []

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"  # Connections stay open, as with the servers that are used.

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            asked.append(self.path.partition("?")[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("_MLFLOW_SERVER_SERVE_ARTIFACTS", "true")
        patch.setenv("_MLFLOW_SERVER_ARTIFACT_DESTINATION", (root / "served").as_uri())
        # The handlers keep the first store of a process, and make its address that of every client in it.
        for name in ("_artifact_repo", "_tracking_store", "_model_registry_store"):
            patch.setattr(handlers, name, None)
        patch.setattr(tracking, "_tracking_uri", None)
        patch.setattr(registry, "_registry_uri", None)
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
            patch.setenv(name, "")  # So that what is set meanwhile is taken back.
            patch.delenv(name)
        # Without Flask-WTF each search tries anew to import this, in vain and for longer than it searches.
        patch.setitem(sys.modules, "mlflow.server.auth", None)
        handlers.initialize_backend_stores(store_uri, default_artifact_root="mlflow-artifacts:/")
        server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield Served(uri=f"http://127.0.0.1:{server.server_port}", asked=asked)
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
