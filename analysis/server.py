"""A tracking server's REST interface over connections that stay open: no tracking client to import.

Every other way to sign in than a user with a password or a token is left to the tracking client.
"""

import base64
import http.client
import json
import os
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar
from urllib.parse import urlencode, urlsplit

from analysis.fastread import StoreError

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

CONNECTIONS = 4
"""Requests in flight at a time."""
_SECONDS = 120.0
_ANSWER_SECONDS = 5.0
_PAUSES = (0.05, 0.2, 0.8)
"""Seconds before a question is asked again that the server failed to answer."""
_LEFT_TO_CLIENT = ("MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4", "MLFLOW_TRACKING_CLIENT_CERT_PATH")


def speaks_to(uri: str) -> bool:
    """True for the address of a server to which this module can sign in."""
    return urlsplit(uri).scheme in ("http", "https") and not any(os.environ.get(name) for name in _LEFT_TO_CLIENT)


def check_answers(uri: str) -> None:
    """StoreError when nothing answers at the address."""
    place = urlsplit(uri)
    port = place.port or (443 if place.scheme == "https" else 80)
    try:
        socket.create_connection((place.hostname or "", port), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        raise StoreError(
            f"tracking store {uri}: nothing answers there ({error}); start the server, or name another --tracking-uri"
        ) from error


def by_id(run_ids: Iterable[str]) -> str:
    """The query for runs with these ids."""
    return f"attributes.run_id IN ({', '.join(repr(run_id) for run_id in run_ids)})"


class Server:
    """One server, spoken to over a connection a thread; all are closed at the end of its `with` block."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._place = urlsplit(uri)
        self._own = threading.local()
        self._open: list[http.client.HTTPConnection] = []
        self._pool: ThreadPoolExecutor | None = None
        proxies = urllib.request.getproxies()
        self._is_direct = self._place.scheme not in proxies or bool(
            urllib.request.proxy_bypass(self._place.hostname or "")
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        for connection in self._open:
            connection.close()

    def each(self, call: Callable[[Asked], Answer], asked: Iterable[Asked]) -> list[Answer]:
        """The answer to each, in order, a few at a time."""
        everything = list(asked)
        if len(everything) < 2:
            return [call(one) for one in everything]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(CONNECTIONS)
        return list(self._pool.map(call, everything))

    def ask(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a question of the API, such as runs/search."""
        return self._json(what, "POST", f"api/2.0/mlflow/{what}", json.dumps(body).encode())

    def look_up(self, what: str, query: Mapping[str, Any]) -> dict[str, Any]:
        """The same for what is asked by address, such as artifacts/list."""
        return self._json(what, "GET", f"api/2.0/mlflow/{what}?{urlencode(query, doseq=True)}", None)

    def file(self, path: str, query: Mapping[str, Any]) -> bytes | None:
        """What lies at a path of the server; None when it hands out no such thing."""
        status, said = self._send("GET", f"{path}?{urlencode(query, doseq=True)}", None)
        return said if status == http.client.OK else None

    def _json(self, what: str, method: str, target: str, body: bytes | None) -> dict[str, Any]:
        status, said = self._send(method, target, body)
        if status != http.client.OK:
            words = said.decode(errors="replace")[:500]
            raise StoreError(
                f"tracking store {self.uri}: {what} was answered with {status} ({words}); see that the address is that "
                "of a tracking server and that MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or _TOKEN, let "
                "you in"
            )
        try:
            found: dict[str, Any] = json.loads(said)
        except ValueError as error:
            raise self._silent(error) from error
        return found

    def _send(self, method: str, target: str, body: bytes | None) -> tuple[int, bytes]:
        """The answer; asked for again where the server fails, as MLflow 3.17 does when two searches begin at once."""
        for pause in _PAUSES:
            status, said = self._once(method, target, body)
            if status < http.client.INTERNAL_SERVER_ERROR:
                return status, said
            time.sleep(pause)
        return self._once(method, target, body)

    def _once(self, method: str, target: str, body: bytes | None) -> tuple[int, bytes]:
        path = f"{self._place.path.rstrip('/')}/{target}"
        headers = {"Content-Type": "application/json", **_signed_in()}
        try:
            if not self._is_direct:
                return self._by_proxy(method, path, body, headers)
            try:
                return self._directly(method, path, body, headers)
            except (http.client.HTTPException, ConnectionError):
                # A server closes what was idle for long; once more, over a fresh connection.
                return self._directly(method, path, body, headers)
        except (OSError, http.client.HTTPException) as error:
            raise self._silent(error) from error

    def _directly(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> tuple[int, bytes]:
        connection = getattr(self._own, "connection", None)
        if connection is None:
            connection = self._own.connection = self._connect()
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            connection.close()
            self._own.connection = None
            raise

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._place.hostname or "", self._place.port
        connection = (
            http.client.HTTPSConnection(host, port, timeout=_ANSWER_SECONDS, context=_trust())
            if self._place.scheme == "https"
            else http.client.HTTPConnection(host, port, timeout=_ANSWER_SECONDS)
        )
        connection.connect()
        # Where something listens, an answer may take long.
        connection.sock.settimeout(_SECONDS)
        self._open.append(connection)
        return connection

    def _by_proxy(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> tuple[int, bytes]:
        address = f"{self._place.scheme}://{self._place.netloc}{path}"
        request = urllib.request.Request(address, data=body, headers=dict(headers), method=method)
        context = _trust() if self._place.scheme == "https" else None
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS, context=context) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def _silent(self, error: Exception) -> StoreError:
        return StoreError(
            f"tracking store {self.uri}: nothing answers there ({error}); start the server, or name another "
            "--tracking-uri"
        )


def _signed_in() -> dict[str, str]:
    user, password = (os.environ.get(f"MLFLOW_TRACKING_{name}", "") for name in ("USERNAME", "PASSWORD"))
    token = os.environ.get("MLFLOW_TRACKING_TOKEN", "")
    if user and password:
        return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}
    return {"Authorization": f"Bearer {token}"} if token else {}


def _trust() -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or None)
    if os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() == "true":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
