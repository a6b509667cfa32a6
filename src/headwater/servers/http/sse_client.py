"""One live stream: a connection that events are written to, without a task of its own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headwater.model import Event
from headwater.servers.http.event_json import Mark, beginning, ending, heartbeat
from headwater.servers.http.uvicorn_protocol import CONNECTION, Connection

if TYPE_CHECKING:
    from headwater.servers.http.sse_hub import Feed, Live

# How long a client that was told the end may take to read it.
LINGER_SECONDS: Final = 5.0
RETRY_MS: Final = 1000


@dataclass(frozen=True, slots=True)
class Selection:
    """Which events somebody asked for: all that fit every part given."""

    # None: of every topic.
    topics: frozenset[str] | None = None
    type: str | None = None
    key: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    # Of a feed of subscriptions: this one.
    subscription: int | None = None

    def fits(self, event: Event, subscriptions: tuple[int, ...] = ()) -> bool:
        return (
            (self.topics is None or event.topic in self.topics)
            and (self.type is None or event.type == self.type)
            and (self.key is None or event.key == self.key)
            and all(_header_text(event, name) == value for name, value in self.headers)
            and (self.subscription is None or self.subscription in subscriptions)
        )

    @property
    def takes_everything(self) -> bool:
        """Of its topics, that is."""
        return self.type is None and self.key is None and not self.headers and self.subscription is None


def _header_text(event: Event, name: str) -> str | None:
    value = (event.headers or {}).get(name)
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"))


class Stream:
    """A client that follows. It is live while it has all that its feed has, and behind otherwise."""

    __slots__ = (
        "_connection",
        "_heard_at",
        "_stalled_at",
        "allowed",
        "closed",
        "delivered",
        "ends_at",
        "epoch",
        "feed",
        "gone_to",
        "is_paused",
        "live",
        "named",
        "position",
        "selection",
        "selective",
        "told_seen",
    )

    feed: Feed

    def __init__(
        self,
        selection: Selection,
        mark: Mark,
        *,
        named: bool,
        allowed: Callable[[], bool],
        ends_at: float | None,
        selective: bool = False,
        gone_to: int = 0,
    ) -> None:
        self.selection = selection
        # Whether it passes over events of its topics: then its ids say how far it has looked.
        self.selective = selective
        # What retention took up to here is not missing to this stream.
        self.gone_to = gone_to
        # Up to here everything was written. While the stream is live, the feed knows better.
        self.position = mark.position
        # The last event that was written, or the last before the stream began: what its ids say.
        self.delivered = mark.position
        self.told_seen = mark.seen
        # Which epoch these three are of.
        self.epoch = mark.epoch
        self.named = named
        self.allowed = allowed
        self.ends_at = ends_at
        self.live = False
        self.closed = False
        self.is_paused = False
        self._connection: Connection | None = None
        self._heard_at = self._stalled_at = time.monotonic()

    def take(self, connection: Connection) -> None:
        """The connection is this stream's from now on."""
        self._connection = connection
        connection.hand_over(self)
        if connection.transport.is_closing():
            self.lost()
        else:
            self.is_paused = connection.flow.write_paused
            if not self.is_paused:
                self.resumed()

    def write(self, data: bytes) -> None:
        """Bytes for the client. Whoever writes much looks at `is_paused` in between."""
        if self._connection is not None:
            self._heard_at = time.monotonic()
            self._connection.transport.write(data)

    def seen(self) -> int:
        """How far the log was looked through for this stream."""
        return max(self.position, self.feed.end_of(self.selection)) if self.live else self.position

    def mark(self) -> Mark:
        """Where the client may take up again. Which events of its topics a stream that takes all of them lacks, it
        can tell by itself; others must know how far they looked."""
        return Mark(self.delivered, max(self.seen(), self.told_seen) if self.selective else 0, self.epoch)

    def rewind(self, limit: int, epoch: int) -> None:
        """Go on in another epoch, of which only what is up to the limit is the same. Only for the feed."""
        self.position = min(self.position, limit)
        self.delivered = min(self.delivered, limit)
        self.told_seen = min(self.told_seen, limit)
        self.epoch = epoch

    def look_after(self, now: float, *, heartbeat_seconds: float, slow_seconds: float) -> None:
        """What time brings: a heartbeat, or the end."""
        if self.ends_at is not None and now >= self.ends_at:
            self.end("an hour is over: come again, and say who you are")
        elif not self.allowed():
            self.end("no longer allowed")
        elif self.is_paused:
            if now - self._stalled_at > slow_seconds:
                self.end("too slow")
        elif now - self._heard_at >= heartbeat_seconds:
            mark = self.mark()
            self.write(heartbeat(mark if mark.seen > self.told_seen else None))
            self.told_seen = max(self.told_seen, mark.seen)

    def end(self, reason: str) -> None:
        """Tell the client the end, and where to resume. One that does not listen is dropped a little later."""
        if self.closed or self._connection is None:
            return
        transport = self._connection.transport
        # What is in front of it is bounded: a stream that is paused gets nothing more but this.
        transport.write(ending(reason, self.mark(), retry_ms=RETRY_MS))
        self._close()
        transport.close()
        asyncio.get_running_loop().call_later(LINGER_SECONDS, transport.abort)

    # What the connection says.

    def paused(self) -> None:
        self.is_paused = True
        self._stalled_at = time.monotonic()

    def resumed(self) -> None:
        self.is_paused = False
        if not self.closed and not self.live:
            self.feed.serve(self)

    def lost(self) -> None:
        if not self.closed:
            self._close()

    def stop(self) -> None:
        self.end("the server stops")

    def _close(self) -> None:
        self.closed = True
        self._connection = None
        self.feed.leave(self)


class EventStream(Response):
    """The answer to who follows: its head, and then the connection belongs to the stream."""

    media_type = "text/event-stream"

    def __init__(self, live: Live, key: tuple[str, ...], stream: Stream) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._live = live
        self._key = key
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": b""})
            return
        connection: Connection = scope[CONNECTION]
        headers = [*self.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        stream = self._stream
        begins = beginning(Mark(stream.delivered, stream.told_seen, stream.epoch), retry_ms=RETRY_MS)
        await send({"type": "http.response.body", "body": begins, "more_body": True})
        self._live.join(stream, self._key)
        stream.take(connection)
        if stream.epoch != self._live.epoch:
            # Changed in this moment: the client comes again with its id, which has the epoch.
            stream.end("positions may have been issued again")
