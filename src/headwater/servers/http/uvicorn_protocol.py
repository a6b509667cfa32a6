"""A connection of uvicorn's that can be handed over to a live stream, and that waits for nobody for ever."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headwater.errors import InvalidRequest
from headwater.servers.admission import Admission
from headwater.servers.http.errors import PROBLEM, as_problem

CONNECTION: Final = "headwater.connection"
# For the whole head of a request, and for a first one to come at all.
HEAD_SECONDS: Final = 20.0
HEAD_BYTES: Final = 128 * 1024


class Taker(Protocol):
    """Who has taken a connection over."""

    def paused(self) -> None: ...

    def resumed(self) -> None: ...

    def lost(self) -> None: ...

    def stop(self) -> None: ...


class Connection(HttpToolsProtocol):
    """One connection of a client."""

    # Whether it is one more than the server takes: then it gets one answer, and is closed.
    is_surplus: bool = False
    taker: Taker | None = None
    _impatient: asyncio.TimerHandle | None = None
    _head_bytes: int = 0

    def __init__(self, *arguments: Any, room: Admission[Connection], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._room = room

    def evict(self) -> None:
        """Close at once, in favour of another: no request has come."""
        if self.transport is not None:
            self.transport.abort()

    def hand_over(self, taker: Taker) -> None:
        """From here on only `taker` writes, without a task of its own; the request is over for uvicorn."""
        self.taker = taker
        self.cycle.response_complete = True
        # A request is some kilobytes, and there are thousands of streams.
        self.cycle.scope = self.scope = None  # type: ignore[assignment]
        self.headers = []
        self.pipeline.clear()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        self.is_surplus = not self._room.enter(self, address)
        self._hurry()

    def connection_lost(self, exc: Exception | None) -> None:
        self._relax()
        super().connection_lost(exc)
        self._room.leave(self)
        taker, self.taker = self.taker, None
        if taker is not None:
            taker.lost()

    def data_received(self, data: bytes) -> None:
        # What a client sends while it gets a stream means nothing.
        if self.taker is not None or self.transport.is_closing():
            return
        super().data_received(data)
        if self._impatient is None:
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES:
            self.send_400_response(f"the head of a request has up to {HEAD_BYTES} bytes")

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused in the same shape as all else."""
        body = json.dumps(as_problem(InvalidRequest(msg))).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: {PROBLEM}\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: Any = self.scope
        scope[CONNECTION] = self
        self._hurry()

    def on_headers_complete(self) -> None:
        self._relax()
        self._room.prove(self)
        super().on_headers_complete()
        if self.is_surplus:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self.cycle.response_complete and self.taker is None and self.timeout_keep_alive_task is None:
            # It was answered before it was sent to its end, and nobody waits for the next one.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.taker is not None:
            self.taker.paused()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.taker is not None:
            self.taker.resumed()

    def shutdown(self) -> None:
        if self.taker is not None:
            self.taker.stop()
        else:
            super().shutdown()

    def _hurry(self) -> None:
        self._relax()
        self._impatient = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _relax(self) -> None:
        if self._impatient is not None:
            self._impatient.cancel()
            self._impatient = None

    def _give_up(self) -> None:
        self._impatient = None
        if not self.transport.is_closing():
            self.transport.close()
