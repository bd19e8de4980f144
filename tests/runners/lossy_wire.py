"""Stands between a client and a server: every request gets through, but answers to some are lost."""

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class LossyWire:
    """A context in which `uri` leads to the server."""

    def __init__(self, uri: str) -> None:
        self._path, self._left = "", 0
        self.lost = 0
        """How many answers were lost."""
        wire, server = self, urlsplit(uri).netloc

        class Hands(BaseHTTPRequestHandler):
            def _hand_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                onward = http.client.HTTPConnection(server, timeout=60)
                onward.request(self.command, self.path, body, dict(self.headers))
                answer = onward.getresponse()
                content = answer.read()
                onward.close()
                self.close_connection = True
                if wire._loses(self.path):
                    return
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _hand_on

            def log_message(self, *words: object) -> None:
                """Nothing is logged."""

        self._front = ThreadingHTTPServer(("127.0.0.1", 0), Hands)
        self.uri = f"http://127.0.0.1:{self._front.server_port}"
        self._thread = threading.Thread(target=self._front.serve_forever)

    def lose(self, path: str, answers: int) -> None:
        """From now on lose so many answers to requests whose path ends so, and no others."""
        self._path, self._left = path, answers

    def _loses(self, path: str) -> bool:
        if self._left == 0 or not path.partition("?")[0].endswith(self._path):
            return False
        self._left -= 1
        self.lost += 1
        return True

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._front.shutdown()
        self._thread.join()
        self._front.server_close()
