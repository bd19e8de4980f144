"""Tests of analysis/server.py, against a server that misbehaves as real ones do."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from analysis import server
from analysis.fastread import StoreError
from analysis.server import Server


@contextmanager
def answering(*statuses: int, closes: bool = False) -> Iterator[tuple[str, list[int]]]:
    """A server that answers with each status in turn, the last one for good; the connections that were opened."""
    left, opened = list(statuses), list[int]()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            opened.append(self.client_address[1])

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            said = json.dumps({"path": self.path}).encode()
            self.send_response(left.pop(0) if len(left) > 1 else left[0])
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)
            # Unsaid, as where a server gives up a connection that was idle for long.
            self.close_connection = closes

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/base", opened
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_PAUSES", (0.0, 0.0))


def test_questions_one_after_the_other_share_a_connection() -> None:
    with answering(200) as (uri, opened), Server(uri) as asked:
        paths = [asked.ask("runs/search", {})["path"] for _ in range(5)]
        assert paths == ["/base/api/2.0/mlflow/runs/search"] * 5
        assert len(opened) == 1
        asked.each(lambda _: asked.ask("runs/search", {}), range(20))
        assert len(opened) <= 1 + server.CONNECTIONS


def test_a_connection_that_the_server_gave_up_is_opened_anew() -> None:
    with answering(200, closes=True) as (uri, opened), Server(uri) as asked:
        assert [asked.ask("runs/search", {})["path"] for _ in range(3)]
        assert len(opened) == 3


def test_a_server_that_fails_is_asked_again_and_one_that_refuses_is_not() -> None:
    with answering(500, 503, 200) as (uri, _), Server(uri) as asked:
        assert asked.ask("runs/search", {})
    with answering(500) as (uri, _), Server(uri) as asked, pytest.raises(StoreError, match="answered with 500"):
        asked.ask("runs/search", {})
    with (
        answering(403, 200) as (uri, _),
        Server(uri) as asked,
        pytest.raises(StoreError, match=r"403.*MLFLOW_TRACKING_"),
    ):
        asked.ask("runs/search", {})


def test_a_server_that_is_not_there_is_named() -> None:
    with Server("http://127.0.0.1:9") as asked, pytest.raises(StoreError, match=r"http://127\.0\.0\.1:9: nothing ans"):
        asked.ask("runs/search", {})
