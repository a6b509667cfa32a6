"""The connection protocol of uvicorn, extended: an SSE stream can take it over; slow or surplus clients are limited.

An SSE stream writes its HTTP chunks itself (`chunk`): a task and a response object for each of thousands of
clients were most of the cost of a connection (docs/decisions/0019-one-server.md). To end the request for uvicorn
without ending the response, `hand_over` changes private state of uvicorn: `cycle`, `scope` and `pipeline`. Hence the
upper bound of its version in pyproject.toml; raise it only after tests/integration/test_http_live.py passes.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headwater.errors import InvalidRequest
from headwater.servers.admission import Admission
from headwater.servers.http.errors import PROBLEM, as_problem

CONNECTION: Final = "headwater.connection"
# For the whole head of a request, and for the first request to arrive.
MAX_HEAD_SECONDS: Final = 20.0
MAX_HEAD_BYTES: Final = 128 * 1024

LAST_CHUNK: Final = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """Data in HTTP chunked transfer encoding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


class ConnectionOwner(Protocol):
    """The object that has taken over a connection."""

    def on_pause(self) -> None: ...

    def on_resume(self) -> None: ...

    def on_lost(self) -> None: ...

    def stop(self) -> None: ...


class HttpConnection(HttpToolsProtocol):
    """One client connection."""

    # Above the connection limit: it gets one response and is closed.
    is_surplus: bool = False
    owner: ConnectionOwner | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes: int = 0

    def __init__(self, *arguments: Any, admission: Admission[HttpConnection], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._admission = admission

    def evict(self) -> None:
        """Close at once in favour of another connection: no request has arrived."""
        if self.transport is not None:
            self.transport.abort()

    def hand_over(self, owner: ConnectionOwner) -> None:
        """From now on only `owner` writes to the connection; for uvicorn the request is complete."""
        self.owner = owner
        self.cycle.response_complete = True
        # Free the request, some kilobytes each: there are thousands of streams.
        self.cycle.scope = self.scope = None  # type: ignore[assignment]
        self.headers = []
        self.pipeline.clear()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        self.is_surplus = not self._admission.enter(self, address)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)
        self._admission.leave(self)
        owner, self.owner = self.owner, None
        if owner is not None:
            owner.on_lost()

    def data_received(self, data: bytes) -> None:
        # Data that a client sends during a stream is ignored.
        if self.owner is not None or self.transport.is_closing():
            return
        super().data_received(data)
        if self._head_timer is None:
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"the request head is larger than {MAX_HEAD_BYTES} bytes")

    def send_400_response(self, msg: str) -> None:
        """Respond to invalid HTTP with a problem, as to other errors."""
        body = json.dumps(as_problem(InvalidRequest(msg))).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: {PROBLEM}\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: Any = self.scope
        scope[CONNECTION] = self
        self._start_head_timer()

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        self._admission.prove(self)
        super().on_headers_complete()
        if self.is_surplus:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self.cycle.response_complete and self.owner is None and self.timeout_keep_alive_task is None:
            # The response was complete before the request, so uvicorn has not started the keep-alive timer.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.owner is not None:
            self.owner.on_pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.owner is not None:
            self.owner.on_resume()

    def shutdown(self) -> None:
        if self.owner is not None:
            self.owner.stop()
        else:
            super().shutdown()

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(MAX_HEAD_SECONDS, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()
