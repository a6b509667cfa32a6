"""HTTP endpoints of a bridge: metrics, status, health, stream info and shutdown."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from headwater.errors import InvalidRequest
from headwater.nats.errors import NatsUnavailable

_MAX_REQUESTS: Final = 16
_REQUEST_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class BridgeCallbacks:
    """The functions that provide the responses. They are called from the threads of the HTTP server."""

    metrics: Callable[[], str]
    status: Callable[[], Mapping[str, Any]]
    problems: Callable[[], list[str]]
    """The current problems; empty if the bridge is healthy."""
    stream: Callable[[str], Mapping[str, Any] | None]
    """A stream by its name; None if it does not exist."""
    shutdown: Callable[[], None] | None
    """None if the bridge does not accept POST /shutdown."""


class BridgeHttpServer:
    """Serves the endpoints on one address until it is closed."""

    def __init__(self, answers: BridgeCallbacks, *, host: str, port: int) -> None:
        try:
            self._server: Final = _BoundedServer((host, port), answers)
        except (OSError, OverflowError) as error:
            raise InvalidRequest(
                f"cannot listen on {host}:{port}: {error}", hint="Choose another port, or 0 for a free one."
            ) from error
        self._thread: Final = threading.Thread(
            target=self._server.serve_forever, name="headwater-endpoints", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_REQUEST_SECONDS)


class _BoundedServer(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], answers: BridgeCallbacks) -> None:
        self.answers: Final = answers
        self._free: Final = threading.BoundedSemaphore(_MAX_REQUESTS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connection errors of clients."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_SECONDS
    server: _BoundedServer
    server_version = "headwater"
    sys_version = ""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        answers = self.server.answers
        match url.path:
            case "/metrics":
                self._send(HTTPStatus.OK, answers.metrics().encode(), "text/plain; version=0.0.4; charset=utf-8")
            case "/status":
                self._send_json(HTTPStatus.OK, answers.status())
            case "/health":
                problems = answers.problems()
                self._send_json(
                    HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK,
                    {"status": "unhealthy" if problems else "healthy", "problems": problems},
                )
            case "/streams/info":
                self._send_stream(parse_qs(url.query).get("stream", [""])[0])
            case "/shutdown":
                self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "use POST /shutdown to stop the bridge")
            case _:
                self._refuse(
                    HTTPStatus.NOT_FOUND,
                    "unknown path: use GET /metrics, /status, /health, /streams/info?stream=CDC or POST /shutdown",
                )

    def do_POST(self) -> None:
        if urlsplit(self.path).path != "/shutdown":
            self._refuse(HTTPStatus.NOT_FOUND, "unknown path: only /shutdown accepts POST")
        elif self.headers.get("Origin") is not None:
            # Any web page that is open in a browser on this machine could post here.
            self._refuse(HTTPStatus.FORBIDDEN, "requests from a browser are not allowed")
        elif self.server.answers.shutdown is None:
            self._refuse(HTTPStatus.FORBIDDEN, "shutdown over HTTP is disabled: set allow_shutdown to enable it")
        else:
            self.server.answers.shutdown()
            self._send_json(HTTPStatus.ACCEPTED, {"status": "stopping"})

    def _send_stream(self, name: str) -> None:
        if not name:
            self._refuse(HTTPStatus.BAD_REQUEST, "the stream is missing: use /streams/info?stream=CDC")
            return
        try:
            found = self.server.answers.stream(name)
        except NatsUnavailable as error:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, error.message)
            return
        if found is None:
            self._refuse(HTTPStatus.NOT_FOUND, f"stream {name[:100]!r} does not exist")
        else:
            self._send_json(HTTPStatus.OK, found)

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        self._send_json(status, {"error": reason})

    def _send_json(self, status: HTTPStatus, document: Mapping[str, Any]) -> None:
        self._send(status, json.dumps(document, indent=2).encode() + b"\n", "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""
