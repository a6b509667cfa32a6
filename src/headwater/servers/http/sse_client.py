"""One SSE stream: a client connection that its feed writes to. It has no task of its own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headwater.log.model import Event
from headwater.log.sse_frames import FrameStyle, ResumePoint, closing_frame, heartbeat_frame, opening_frame
from headwater.servers.http.uvicorn_protocol import CONNECTION, LAST_CHUNK, HttpConnection, chunk

if TYPE_CHECKING:
    from headwater.servers.http.sse_hub import Feed, SseHub

# How long a client may take to read the closing frame.
LINGER_SECONDS: Final = 5.0
RETRY_MS: Final = 1000


@dataclass(frozen=True, slots=True)
class StreamSelection:
    """Which events a client wants: those that match every given field."""

    # None: every topic.
    topics: frozenset[str] | None = None
    type: str | None = None
    key: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    # For a subscription feed: the SQL subscription.
    subscription: int | None = None

    def matches(self, event: Event, subscriptions: tuple[int, ...] = ()) -> bool:
        return (
            (self.topics is None or event.topic in self.topics)
            and (self.type is None or event.type == self.type)
            and (self.key is None or event.key == self.key)
            and all(_header_text(event, name) == value for name, value in self.headers)
            and (self.subscription is None or self.subscription in subscriptions)
        )

    @property
    def takes_everything(self) -> bool:
        """Whether it selects every event of its topics."""
        return self.type is None and self.key is None and not self.headers and self.subscription is None


def _header_text(event: Event, name: str) -> str | None:
    value = (event.headers or {}).get(name)
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"))


class SseStream:
    """A client that follows a feed. It is `live` while it has every buffered event of its feed, otherwise behind."""

    __slots__ = (
        "_connection",
        "_stalled_at",
        "_written_at",
        "allowed",
        "closed",
        "delivered",
        "ends_at",
        "epoch",
        "expired_to",
        "feed",
        "is_paused",
        "live",
        "position",
        "reported_seen",
        "selection",
        "selective",
        "style",
    )

    feed: Feed

    def __init__(
        self,
        selection: StreamSelection,
        start: ResumePoint,
        *,
        style: FrameStyle,
        allowed: Callable[[], bool],
        ends_at: float | None,
        selective: bool = False,
        expired_to: int = 0,
    ) -> None:
        self.selection = selection
        # Whether it skips events of its topics: then its ids contain how far the log was searched.
        self.selective = selective
        # Events up to here that retention removed are not missing in this stream.
        self.expired_to = expired_to
        # Everything up to here was written. While the stream is live, the end of its feed counts instead.
        self.position = start.position
        # The last event written, or the last one before the stream began: the position in its ids.
        self.delivered = start.position
        self.reported_seen = start.seen
        # The epoch of these three.
        self.epoch = start.epoch
        self.style = style
        self.allowed = allowed
        self.ends_at = ends_at
        self.live = False
        self.closed = False
        self.is_paused = False
        self._connection: HttpConnection | None = None
        self._written_at = self._stalled_at = time.monotonic()

    def take(self, connection: HttpConnection) -> None:
        """Take over the connection."""
        self._connection = connection
        connection.hand_over(self)
        if connection.transport.is_closing():
            self.on_lost()
        else:
            self.is_paused = connection.flow.write_paused
            if not self.is_paused:
                self.on_resume()

    def write(self, data: bytes) -> None:
        """Write bytes to the client. Writers of much data check `is_paused` in between."""
        if self._connection is not None:
            self._written_at = time.monotonic()
            self._connection.transport.write(data)

    def seen(self) -> int:
        """How far the log was searched for this stream."""
        return max(self.position, self.feed.end_of(self.selection)) if self.live else self.position

    def resume_point(self) -> ResumePoint:
        """Where the client can resume. Only selective streams need to know how far the log was searched."""
        return ResumePoint(self.delivered, max(self.seen(), self.reported_seen) if self.selective else 0, self.epoch)

    def rewind(self, limit: int, epoch: int) -> None:
        """Continue in another epoch that shares only the positions up to the limit. Called by the feed."""
        self.position = min(self.position, limit)
        self.delivered = min(self.delivered, limit)
        self.reported_seen = min(self.reported_seen, limit)
        self.epoch = epoch

    def check_timers(self, now: float, *, heartbeat_seconds: float, slow_seconds: float) -> None:
        """Send a heartbeat if it is due, or end the stream if it is too old, too slow or no longer allowed."""
        if self.ends_at is not None and now >= self.ends_at:
            self.end("stream closed after 1 hour: reconnect and authenticate again")
        elif not self.allowed():
            self.end("no longer allowed")
        elif self.is_paused:
            if now - self._stalled_at > slow_seconds:
                self.end("the client reads too slowly")
        elif now - self._written_at >= heartbeat_seconds:
            point = self.resume_point()
            self.write(chunk(heartbeat_frame(point if point.seen > self.reported_seen else None)))
            self.reported_seen = max(self.reported_seen, point.seen)

    def end(self, reason: str) -> None:
        """Send the closing frame with the resume point. A client that does not read it is dropped a little later."""
        if self.closed or self._connection is None:
            return
        transport = self._connection.transport
        # The buffer before it is bounded: a paused stream gets nothing but this frame.
        closing = closing_frame(reason, self.resume_point(), retry_ms=RETRY_MS)
        transport.write(chunk(closing) + LAST_CHUNK)
        self._close()
        transport.close()
        asyncio.get_running_loop().call_later(LINGER_SECONDS, transport.abort)

    # Callbacks of the connection.

    def on_pause(self) -> None:
        self.is_paused = True
        self._stalled_at = time.monotonic()

    def on_resume(self) -> None:
        self.is_paused = False
        if not self.closed and not self.live:
            self.feed.serve(self)

    def on_lost(self) -> None:
        if not self.closed:
            self._close()

    def stop(self) -> None:
        self.end("the server is shutting down")

    def _close(self) -> None:
        self.closed = True
        self._connection = None
        self.feed.leave(self)


class SseResponse(Response):
    """The response to a follow request: sends the head, then hands the connection to the stream."""

    media_type = "text/event-stream"

    def __init__(self, hub: SseHub, key: tuple[str, ...], stream: SseStream) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._hub = hub
        self._key = key
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": b""})
            return
        connection: HttpConnection = scope[CONNECTION]
        headers = [*self.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        stream = self._stream
        first = opening_frame(ResumePoint(stream.delivered, stream.reported_seen, stream.epoch), retry_ms=RETRY_MS)
        await send({"type": "http.response.body", "body": first, "more_body": True})
        self._hub.join(stream, self._key)
        stream.take(connection)
        if stream.epoch != self._hub.epoch:
            # The epoch changed just now: the client reconnects with its id, which contains the old epoch.
            stream.end("the epoch of the log changed")
