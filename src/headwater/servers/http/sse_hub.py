"""The SSE streams of a process: one task follows the head of the log, and each feed is read once for all its streams.

A feed buffers its latest events in the order of their positions. A stream that has all of them is live and gets new
events as they are read. A stream that is behind is served from the buffer, or from the log if the buffer does not reach
back far enough. So no event is lost, memory does not grow with the number of events, and a stream needs no task.

A stream waits only for open publishing transactions of its own topics. So the topic feed has an end for each topic, and
a late event of one topic may be inserted into the buffer below events of other topics. Invariants:
- The end of a topic never exceeds its stable position: no event of the topic can still appear at or below it.
- The buffer contains every event of a topic that is above the feed's floor and above the position from which the topic
  is covered, up to the topic's end.
- A stream is written to up to the lowest end of its topics. So a stream of A and B stays below an uncommitted event of
  A while a stream of B continues, and an event inserted for A is above the position of every stream of A.
- A stream continues after its position, from the buffer or from the log, and gets no event twice.

While no publishing transaction is open for longer than HELD_SECONDS, a read for each topic is not worth it: every topic
waits for the stable position of the whole log, and all topics are read together.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import psycopg

from headwater.aio import AsyncHeadwater
from headwater.calls import log as log_calls
from headwater.calls import overview
from headwater.calls import reading as reading_calls
from headwater.calls import subscriptions as subscription_calls
from headwater.errors import (
    HeadwaterError,
    InvalidRequest,
    LogUnavailable,
    PositionExpired,
    QueueNotFound,
    TopicNotFound,
    epoch_changed_error,
)
from headwater.log.model import Event, LogStateByTopic
from headwater.log.sse_frames import FrameStyle, ResumePoint, frame
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import EPOCH, EPOCH_CHANGED, ERROR, POSITION, READ_TO, logger
from headwater.servers.authentication import TooManyRequests
from headwater.servers.http.requests import MAX_POSITION
from headwater.servers.http.sse_client import SseStream, StreamSelection
from headwater.servers.http.uvicorn_protocol import chunk
from headwater.servers.options import ServerLimits
from headwater.supervisor import supervise

MAX_BUFFERED_EVENTS: Final = 4096
MAX_BUFFERED_BYTES: Final = 16 * 1024 * 1024
BATCH_SIZE: Final = 500
BATCH_BYTES: Final = 4 * 1024 * 1024
# Written to one client at once, before checking whether it reads.
PIECE_BYTES: Final = 32 * 1024
RETRY_SECONDS: Final = 0.5
# How many tasks read the log for streams that are behind.
BEHIND_READERS: Final = 3
MAX_FEEDS: Final = 1000
# How often the state is read although the head has not moved: after a crash it may be the same in a new epoch.
STATE_SECONDS: Final = 0.5
MAX_BEGIN_ATTEMPTS: Final = 5
# A publishing transaction that is open for longer than this holds back only its own topics.
HELD_SECONDS: Final = 0.05
# How often the subscriptions of streams are kept alive, and how many in one statement.
KEEP_ALIVE_SECONDS: Final = 2.0
KEEP_ALIVE_BATCH: Final = 5000
EVERY_TOPIC: Final = ""
_WHOLE_LOG: Final = frozenset((EVERY_TOPIC,))


class BufferedEvent(NamedTuple):
    """A buffered event of a feed, and the subscriptions that it matches."""

    event: Event
    subscriptions: tuple[int, ...]
    frames: dict[FrameStyle, bytes]
    # The epoch of its position.
    epoch: int | None

    def frame(self, style: FrameStyle) -> bytes:
        """The event as an SSE frame, built once for all streams."""
        data = self.frames.get(style)
        if data is None:
            data = self.frames[style] = chunk(frame(self.event, style=style, epoch=self.epoch))
        return data


class FeedBatch(NamedTuple):
    """Events after a position, and the position up to which they are complete."""

    events: Sequence[BufferedEvent]
    to: int
    # For a topic feed: these topics were read after this position.
    after: int = 0
    topics: frozenset[str] = frozenset()


def _position(one: BufferedEvent) -> int:
    return one.event.position


class Feed:
    """Events that several streams follow, read once. Subclasses define how. A feed without streams is dropped."""

    def __init__(self, hub: SseHub, key: tuple[str, ...]) -> None:
        self._hub = hub
        self.key = key
        self.log = hub.log
        # Every event after `floor` and up to `ceiling` is buffered.
        self.floor = self.ceiling = hub.stable
        # Ordered by position.
        self._buffer: list[BufferedEvent] = []
        self._buffer_bytes = 0
        # The state version in which the last read found nothing more.
        self._exhausted = -1
        self._streams: set[SseStream] = set()
        # Live streams by selection: their output is the same and is built once.
        self._live_streams: dict[tuple[StreamSelection, FrameStyle], set[SseStream]] = {}
        # Streams that wait for the next read of this feed.
        self._waiting: set[SseStream] = set()
        self.wake = asyncio.Event()
        self._task = supervise("sse feed", self._run)

    # --- streams ---

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[SseStream]:
        return iter(tuple(self._streams))

    def join(self, stream: SseStream) -> None:
        stream.feed = self
        self._streams.add(stream)

    def leave(self, stream: SseStream) -> None:
        self._streams.discard(stream)
        self._waiting.discard(stream)
        self._make_not_live(stream)
        if not self._streams:
            self._hub.drop(self)

    def close(self) -> None:
        self._task.cancel()

    def serve(self, stream: SseStream) -> None:
        """Write the buffered events that a stream lacks, which makes it live. Older events are read from the log."""
        if not self.holds(stream):
            if self.has_more_for(stream):
                self._hub.read_for(stream)
            else:
                self._waiting.add(stream)
            return
        end = self.end_of(stream.selection)
        if stream.position > end:
            # It has read ahead of this feed: the feed would deliver those events again.
            self._waiting.add(stream)
            if self.is_stale():
                self.wake.set()
            return
        if self.write_to(stream, self._between(stream.position, end), end):
            stream.live = True
            self._live_streams.setdefault((stream.selection, stream.style), set()).add(stream)

    def end_of(self, selection: StreamSelection) -> int:
        """The position up to which every event of this selection was read."""
        return self.ceiling

    def has_more_for(self, stream: SseStream) -> bool:
        """Whether the log may have events for a stream that is behind the buffer."""
        return True

    def holds(self, stream: SseStream) -> bool:
        """Whether every event that the stream lacks is buffered."""
        return stream.position >= self.floor

    def write_to(self, stream: SseStream, events: Sequence[BufferedEvent], to: int) -> bool:
        """Write events to one stream in pieces until its buffer is full. True: all were written."""
        for piece, end, delivered in pieces(events, stream.selection, stream.style, to):
            if stream.closed or stream.is_paused:
                return False
            if piece:
                stream.write(piece)
                stream.delivered = delivered
            stream.position = max(stream.position, end)
        return not stream.closed and not stream.is_paused

    def _make_not_live(self, stream: SseStream) -> None:
        if stream.live:
            stream.live = False
            key = (stream.selection, stream.style)
            self._live_streams[key].discard(stream)
            if not self._live_streams[key]:
                del self._live_streams[key]

    # --- reading ---

    def rewind(self, limit: int) -> None:
        """Drop the buffer of an epoch that has ended: each stream continues from what both epochs share."""
        self._buffer.clear()
        self._buffer_bytes = 0
        self._exhausted = -1
        self.floor = self.ceiling = self._hub.stable
        for stream in self:
            self._make_not_live(stream)
            stream.rewind(limit, self._hub.epoch)
            self._waiting.add(stream)
        self.wake.set()

    async def read(self, after: int, selection: StreamSelection, expired_to: int = 0) -> FeedBatch:
        """Read after a position for a stream that is behind. It does not miss events removed up to `expired_to`."""
        raise NotImplementedError

    async def _next(self) -> FeedBatch:
        """Read after the ceiling, for all streams."""
        raise NotImplementedError

    def is_stale(self) -> bool:
        """Whether there may be something to read: only the database knows how far the selected events are stable."""
        hub = self._hub
        return self.ceiling < hub.stable or (hub.is_held and self.ceiling < hub.head and self._exhausted != hub.version)

    async def _run(self) -> None:
        while True:
            await self.wake.wait()
            self.wake.clear()
            try:
                while self.is_stale():
                    version, epoch = self._hub.version, self._hub.epoch
                    batch = await self._next()
                    if epoch != self._hub.epoch:
                        continue
                    if not self._add(batch):
                        self._exhausted = version
                        if self.ceiling < self._hub.stable and self.is_stale():
                            # A filter timed out and is being stopped.
                            await asyncio.sleep(RETRY_SECONDS)
            except (PositionExpired, TopicNotFound, QueueNotFound, InvalidRequest) as error:
                self._give_up(error)
            except (HeadwaterError, psycopg.Error) as error:
                logger.warning("an SSE feed could not be read", extra={ERROR: str(error)})
                self._hub.read_state_soon()
                self.wake.set()
                await asyncio.sleep(RETRY_SECONDS)
            waiting, self._waiting = self._waiting, set()
            for stream in waiting:
                self.serve(stream)

    def _add(self, batch: FeedBatch) -> bool:
        """Buffer a batch and write it to all live streams. False: nothing new was read."""
        ends = {selection: self.end_of(selection) for selection, _ in self._live_streams}
        moved = self._buffer_batch(batch)
        for (selection, style), streams in list(self._live_streams.items()):
            after, to = ends[selection], self.end_of(selection)
            if to <= after:
                continue
            written = list(pieces(self._between(after, to), selection, style, to))
            for stream in tuple(streams):
                for piece, end, delivered in written:
                    if stream.closed or stream.is_paused:
                        break
                    if piece:
                        stream.write(piece)
                        stream.delivered = delivered
                    stream.position = end
                if not stream.closed and stream.is_paused and stream.position < to:
                    self._make_not_live(stream)
        self._trim()
        return moved

    def _buffer_batch(self, batch: FeedBatch) -> bool:
        """Buffer a batch; whether it reaches further than before."""
        self._buffer.extend(batch.events)
        self._buffer_bytes += sum(len(one.event.payload or b"") for one in batch.events)
        before, self.ceiling = self.ceiling, batch.to
        return self.ceiling > before

    def _between(self, after: int, to: int) -> list[BufferedEvent]:
        """The buffered events after a position and up to another."""
        start = bisect_right(self._buffer, after, key=_position)
        return self._buffer[start : bisect_right(self._buffer, to, lo=start, key=_position)]

    def _trim(self) -> None:
        """Drop the oldest events above the limits. Live streams that lack them are behind from now on."""
        dropped = 0
        while len(self._buffer) - dropped > MAX_BUFFERED_EVENTS or self._buffer_bytes > MAX_BUFFERED_BYTES:
            self._buffer_bytes -= len(self._buffer[dropped].event.payload or b"")
            dropped += 1
        if dropped == 0:
            return
        self.floor = self._buffer[dropped - 1].event.position
        del self._buffer[:dropped]
        for (selection, _), streams in list(self._live_streams.items()):
            if self.end_of(selection) < self.floor:
                for stream in tuple(streams):
                    self._make_not_live(stream)
                    self._waiting.add(stream)

    def _give_up(self, error: HeadwaterError) -> None:
        """The feed cannot be read any more: end its streams. A client that reconnects gets the error."""
        for stream in self:
            stream.end(error.message)

    def wait(self, stream: SseStream) -> None:
        """Serve the stream after the next read of this feed."""
        self._waiting.add(stream)
        self.wake.set()


def pieces(
    events: Sequence[BufferedEvent], selection: StreamSelection, style: FrameStyle, to: int
) -> Iterator[tuple[bytes, int, int]]:
    """The frames of the selected events in pieces, each with the position that it reaches and the position of its last
    event (0 in an empty piece)."""
    parts: list[bytes] = []
    size = last = 0
    for one in events:
        if selection.matches(one.event, one.subscriptions):
            data = one.frame(style)
            parts.append(data)
            size += len(data)
            last = one.event.position
            if size >= PIECE_BYTES:
                yield b"".join(parts), last, last
                parts, size = [], 0
    yield b"".join(parts), to, last


class TopicFeed(Feed):
    """The feed of all topic streams. Topics with the same stable position are read together."""

    def __init__(self, hub: SseHub, key: tuple[str, ...]) -> None:
        super().__init__(hub, key)
        # How many streams follow each topic.
        self._followers: Counter[str] = Counter()
        # From which position the events of a topic are buffered, and up to which position they were read.
        self._covered: dict[str, int] = {}
        self._ends: dict[str, int] = {}

    @property
    def topics(self) -> list[str]:
        """The topics that streams follow by name."""
        return [topic for topic in self._followers if topic != EVERY_TOPIC]

    def join(self, stream: SseStream) -> None:
        super().join(stream)
        self._followers.update(_topics_of(stream))

    def leave(self, stream: SseStream) -> None:
        for topic in _topics_of(stream):
            self._followers[topic] -= 1
            if self._followers[topic] <= 0:
                del self._followers[topic]
        super().leave(stream)

    def end_of(self, selection: StreamSelection) -> int:
        return min(self._ends[topic] for topic in _topics_selected(selection))

    def holds(self, stream: SseStream) -> bool:
        return super().holds(stream) and all(
            topic in self._covered and stream.position >= self._covered[topic] for topic in _topics_of(stream)
        )

    def has_more_for(self, stream: SseStream) -> bool:
        return self._hub.stable_of(_topics_of(stream)) > stream.position

    def is_stale(self) -> bool:
        return any(
            topic not in self._ends or self._ends[topic] < self._hub.stable_of((topic,)) for topic in self._followers
        )

    def _cover(self) -> None:
        """Add topics that streams follow now, and drop those that no stream follows any more."""
        whole = (self._covered[EVERY_TOPIC], self._ends[EVERY_TOPIC]) if EVERY_TOPIC in self._ends else None
        covered, ends = {}, {}
        for topic in self._followers:
            end = self._ends.get(topic)
            if end is not None and end >= self.floor:
                covered[topic], ends[topic] = self._covered[topic], end
            elif end is None and whole is not None:
                covered[topic], ends[topic] = whole
            else:
                # Streams behind this position read from the log. So do those of a topic that was held back for so
                # long that events above its end are no longer buffered.
                covered[topic] = ends[topic] = max(end or 0, self._hub.stable_of((topic,)))
        self._covered, self._ends = covered, ends

    async def _next(self) -> FeedBatch:
        # Streams that join during the read are not covered by it.
        self._cover()
        # Topics with the same end and stable position are read together, the furthest behind first.
        together: dict[tuple[int, int], set[str]] = {}
        for topic, end in self._ends.items():
            stable = self._hub.stable_of((topic,))
            if end < stable:
                together.setdefault((end, stable), set()).add(topic)
        if not together:
            return FeedBatch((), 0)
        after, stable = min(together)
        topics = together[after, stable]
        batch = await self._read(None if EVERY_TOPIC in topics else sorted(topics), after, stable)
        return batch._replace(after=after, topics=frozenset(topics))

    def _buffer_batch(self, batch: FeedBatch) -> bool:
        if not batch.topics:
            return False
        for topic, end in self._ends.items():
            # A read of the whole log counts for each topic.
            if topic in batch.topics or (EVERY_TOPIC in batch.topics and batch.after <= end < batch.to):
                self._ends[topic] = batch.to
        if not batch.events:
            return True
        events = batch.events
        later: list[BufferedEvent] = []
        if self._buffer and self._buffer[-1].event.position >= events[0].event.position:
            # Other topics were read further. Some of these events may be buffered, from a read of the whole log.
            start = bisect_right(self._buffer, events[0].event.position - 1, key=_position)
            later = self._buffer[start:]
            known = {one.event.position for one in later}
            events = [one for one in events if one.event.position not in known]
            del self._buffer[start:]
        # Events at or below the floor are of no use: later ones were dropped.
        events = [one for one in events if one.event.position > self.floor]
        self._buffer.extend(sorted([*later, *events], key=_position) if later else events)
        self._buffer_bytes += sum(len(one.event.payload or b"") for one in events)
        return True

    async def read(self, after: int, selection: StreamSelection, expired_to: int = 0) -> FeedBatch:
        names = None if selection.topics is None else sorted(selection.topics)
        return await self._read(names, after, self._hub.stable_of(_topics_selected(selection)), expired_to)

    async def _read(self, names: list[str] | None, after: int, stable: int, expired_to: int = 0) -> FeedBatch:
        epoch = self._hub.epoch
        if stable <= after:
            return FeedBatch((), after)
        events = await self.log.run(
            reading_calls.read_stable(
                names,
                after=after,
                stable=stable,
                batch_size=BATCH_SIZE,
                max_bytes=BATCH_BYTES,
                gone_to=expired_to,
                epoch=epoch,
            ),
        )
        return FeedBatch(
            [BufferedEvent(event, (), {}, epoch) for event in events], events[-1].position if events else stable
        )

    def rewind(self, limit: int) -> None:
        self._covered, self._ends = {}, {}
        super().rewind(limit)

    def _give_up(self, error: HeadwaterError) -> None:
        """One topic was deleted or its events have expired: end its streams; streams of other topics continue."""
        topic = error.detail.get("topic")
        for stream in self:
            if topic is None or topic in _topics_of(stream) or EVERY_TOPIC in _topics_of(stream):
                stream.end(error.message)
        self._covered, self._ends = {}, {}
        self._buffer.clear()
        self._buffer_bytes = 0
        for stream in self:
            # They keep their position and read the rest from the log.
            self._make_not_live(stream)
            self._waiting.add(stream)
        self.wake.set()


def _topics_selected(selection: StreamSelection) -> frozenset[str]:
    return _WHOLE_LOG if selection.topics is None else selection.topics


def _topics_of(stream: SseStream) -> frozenset[str]:
    return _topics_selected(stream.selection)


class BindingFeed(Feed):
    """The events that the bindings of a queue select. Only the database evaluates bindings."""

    async def _next(self) -> FeedBatch:
        return await self.read(self.ceiling, StreamSelection())

    async def read(self, after: int, selection: StreamSelection, expired_to: int = 0) -> FeedBatch:
        epoch = self._hub.epoch
        call = overview.read_bound(self.key[1], after=after, batch_size=BATCH_SIZE, max_bytes=BATCH_BYTES)
        events, to = await self.log.run(call)
        await self._hub.check_epoch(epoch, after)
        return FeedBatch([BufferedEvent(event, (), {}, epoch) for event in events], to)


class SubscriptionFeed(Feed):
    """The events that the SQL subscriptions of a queue match."""

    async def _next(self) -> FeedBatch:
        return await self.read(self.ceiling, StreamSelection())

    async def read(self, after: int, selection: StreamSelection, expired_to: int = 0) -> FeedBatch:
        epoch = self._hub.epoch
        reading = await self.log.read_next(self.key[1], reader="sse", after=after, batch_size=BATCH_SIZE, peek=True)
        await self._hub.check_epoch(epoch, after)
        events = [BufferedEvent(one.event, one.subscription_ids, {}, epoch) for one in reading.events]
        return FeedBatch(events, reading.next_position)


_KINDS: Final[dict[str, type[Feed]]] = {"topics": TopicFeed, "queue": BindingFeed, "subscriptions": SubscriptionFeed}


class SseHub:
    """All SSE streams of a process, their feeds, and the state of the log."""

    def __init__(self, log: AsyncHeadwater, limits: ServerLimits) -> None:
        # The loops of the hub retry by themselves.
        self.log = log.with_patience(0)
        self._requests = log
        self._limits = limits
        # The stable position of the whole log, and its epoch; 0: not known yet.
        self.stable = 0
        self.epoch = 0
        # The head when they were read, and the number of state changes so far.
        self.head = 0
        self.version = 0
        # Whether a publishing transaction is open for longer than HELD_SECONDS: the head of then is not stable yet.
        self.is_held = False
        self._old_head = self._recent_head = 0
        self._recent_at = 0.0
        # In that case: the topics whose state was read, the stable positions of those that are held back, and the
        # stable position of the others.
        self._state_topics: frozenset[str] = frozenset()
        self._held_to: dict[str, int] = {}
        self._others_to = 0
        self._last_state: tuple[Any, ...] = ()
        self._known = False
        self._growth = self.log.watcher.waiter()
        self._feeds: dict[tuple[str, ...], Feed] = {}
        self._has_feeds = asyncio.Event()
        self._behind: asyncio.Queue[SseStream] = asyncio.Queue()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the log for all streams until the block is left."""
        tasks = [
            supervise(f"sse {work.__name__.strip('_')}", work)
            for work in (
                self._watch,
                self._check_streams,
                self._maintain,
                self._keep_subscriptions,
                *[self._read_behind] * BEHIND_READERS,
            )
        ]
        try:
            yield
        finally:
            for stream in self.streams():
                stream.stop()
            for task in tasks:
                task.cancel()
            for feed in list(self._feeds.values()):
                feed.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    def streams(self) -> list[SseStream]:
        return [stream for feed in self._feeds.values() for stream in feed]

    async def start(self, topics: Sequence[str] | None) -> int:
        """Where a stream of new events of these topics starts: after their last event. Unlike the head, the position of
        an existing event cannot be assigned again after a crash."""
        last = await self._requests.run(reading_calls.read_backwards(topics, batch_size=1))
        expired_to = await self._requests.run(reading_calls.expired_to(topics))
        return max(expired_to, last[0].position if last else 0)

    async def end(self) -> int:
        """The stable position, current or a moment old."""
        if not self._known:
            await self._update(await self._read_state())
        return self.stable

    async def begin(self, topics: Sequence[str] | None, point: ResumePoint | None) -> ResumePoint:
        """Where a stream starts in the current epoch: at its resume point, or with new events.

        Raises EpochChanged for a position that this log never assigned.
        """
        for _ in range(MAX_BEGIN_ATTEMPTS):
            await self.end()
            epoch = self.epoch
            if point is None:
                start = ResumePoint(await self.start(topics), epoch=epoch)
            else:
                position, present = await self._requests.run(log_calls.resume(point.epoch, point.position))
                seen = point.seen
                if present != point.epoch and seen > position:
                    known = await self._requests.run(log_calls.common_position(point.epoch or present, seen))
                    seen = min(known, self.stable)
                start = ResumePoint(position, seen, present)
                if present != epoch:
                    # A new epoch has just begun, and the watcher has not read it yet.
                    await self._update(await self._read_state())
            if start.epoch == self.epoch:
                return start
        raise LogUnavailable("the epoch of the log changes repeatedly")

    async def check_epoch(self, epoch: int, after: int) -> None:
        """Raise EpochChanged unless the log still has this epoch, so that everything read before belongs to it."""
        present = await self.log.run(log_calls.current_epoch())
        if present != epoch:
            raise epoch_changed_error(epoch, after, present, after)

    def read_state_soon(self) -> None:
        """Read the state of the log again soon, even if the head has not moved."""
        self._growth.wake()

    async def _update(self, state: LogStateByTopic) -> bool:
        """Apply a new state of the log; whether it changed. In a new epoch streams go back to the common position."""
        known = self.epoch
        if state.epoch > known > 0:
            limit = await self.log.run(log_calls.common_position(known, MAX_POSITION))
            if self.epoch != known:
                return False
            COUNTERS.add(EPOCH_CHANGED)
            logger.warning("epoch changed", extra={EPOCH: state.epoch, READ_TO: self.stable, POSITION: limit})
            self._old_head = self._recent_head = 0
            self._apply(state)
            for feed in list(self._feeds.values()):
                feed.rewind(limit)
            return True
        if state.epoch < known or state.stable < self.stable or state.head < self.head:
            return False
        return self._apply(state)

    def _apply(self, state: LogStateByTopic) -> bool:
        """Replace the known state at once; whether it differs from the last one."""
        now = time.monotonic()
        if now - self._recent_at >= HELD_SECONDS:
            self._old_head, self._recent_head, self._recent_at = self._recent_head, state.head, now
        self.head, self.stable, self.epoch = state.head, state.stable, state.epoch
        self.is_held = state.stable < self._old_head
        self._state_topics = state.topics if self.is_held else frozenset()
        # The bound of a publishing transaction is the head at its start.
        self._held_to = {topic: to for topic, to in state.held.items() if to < self._old_head}
        self._others_to = min((to for to in state.held.values() if to >= self._old_head), default=state.head)
        summary = (state, self._held_to, self._others_to) if self.is_held else (state.epoch, state.stable)
        if summary == self._last_state:
            return False
        self._last_state = summary
        self.version += 1
        return True

    def stable_of(self, topics: Iterable[str]) -> int:
        """The stable position of these topics."""
        return min(
            self._held_to.get(topic, self._others_to) if topic in self._state_topics else self.stable
            for topic in topics
        )

    async def _read_state(self) -> LogStateByTopic:
        """Read the state of the log; while a publishing transaction stays open, for each followed topic."""
        if not self.is_held:
            state = await self.log.run(log_calls.log_state())
            return LogStateByTopic(*state, bounds=(), topics=frozenset(), held={})
        feed = self._feeds.get(("topics",))
        topics = feed.topics if isinstance(feed, TopicFeed) else []
        return await self.log.run(log_calls.log_state_by_topic(topics))

    def check_feed_limit(self) -> None:
        """Raise TooManyRequests if there are too many feeds, while an error response can still be sent."""
        if len(self._feeds) >= MAX_FEEDS:
            raise TooManyRequests(f"too many followed queues: this process supports {MAX_FEEDS}")

    def join(self, stream: SseStream, key: tuple[str, ...]) -> None:
        """Add a stream to the feed of its key: topics, a queue's bindings, or a queue's subscriptions."""
        feed = self._feeds.get(key)
        if feed is None:
            feed = self._feeds[key] = _KINDS[key[0]](self, key)
        feed.join(stream)
        self._has_feeds.set()
        feed.wake.set()

    def drop(self, feed: Feed) -> None:
        """Drop a feed that has no streams."""
        if self._feeds.get(feed.key) is feed:
            del self._feeds[feed.key]
        if not self._feeds:
            # No stream follows the state any more: the next stream reads it.
            self._known = False
        feed.close()

    def read_for(self, stream: SseStream) -> None:
        """Queue a stream that is behind to be served from the log."""
        self._behind.put_nowait(stream)

    async def _watch(self) -> None:
        """Follow the state of the log while there are feeds."""
        while True:
            if not self._feeds:
                self._known = False
                self._has_feeds.clear()
                await self._has_feeds.wait()
            seconds = STATE_SECONDS
            try:
                state = await self._read_state()
                if state.stable < state.head:
                    # Only time tells which open transactions hold back their own topics alone.
                    seconds = HELD_SECONDS
                changed = await self._update(state)
                self._known = True
                if changed:
                    for feed in self._feeds.values():
                        feed.wake.set()
            except (HeadwaterError, psycopg.Error) as error:
                logger.warning("the state of the log could not be read", extra={ERROR: str(error)})
                self._known = False
                await asyncio.sleep(RETRY_SECONDS)
            await self._growth.wait(seconds)

    async def _read_behind(self) -> None:
        """Read the log for streams that are behind, one batch for each in turn."""
        while True:
            stream = await self._behind.get()
            if stream.closed or stream.is_paused or stream.live:
                continue
            feed = stream.feed
            before, epoch = stream.position, self.epoch
            try:
                batch = await feed.read(stream.position, stream.selection, stream.expired_to)
            except (PositionExpired, TopicNotFound, QueueNotFound, InvalidRequest) as error:
                stream.end(error.message)
                continue
            except (HeadwaterError, psycopg.Error) as error:
                logger.warning("the log could not be read for an SSE stream", extra={ERROR: str(error)})
                self.read_state_soon()
                await asyncio.sleep(RETRY_SECONDS)
                self._behind.put_nowait(stream)
                continue
            if epoch != self.epoch:
                # The batch belongs to an epoch that has ended.
                feed.serve(stream)
                continue
            if stream.live or stream.position != before:
                continue
            if feed.write_to(stream, batch.events, batch.to):
                if feed.holds(stream) or stream.position > before:
                    feed.serve(stream)
                else:
                    feed.wait(stream)

    async def _check_streams(self) -> None:
        """Send heartbeats, and end streams that are too slow or no longer allowed."""
        limits = self._limits
        while True:
            await asyncio.sleep(min(1.0, limits.heartbeat_seconds / 4, limits.slow_seconds / 4))
            now = time.monotonic()
            for number, stream in enumerate(self.streams()):
                stream.check_timers(now, heartbeat_seconds=limits.heartbeat_seconds, slow_seconds=limits.slow_seconds)
                if number % 500 == 499:
                    await asyncio.sleep(0)

    async def _keep_subscriptions(self) -> None:
        """Keep followed subscriptions from expiring; end the streams of subscriptions that no longer exist."""
        while True:
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            followed: dict[int, list[SseStream]] = {}
            for stream in self.streams():
                if stream.selection.subscription is not None:
                    followed.setdefault(stream.selection.subscription, []).append(stream)
            ids = list(followed)
            try:
                for start in range(0, len(ids), KEEP_ALIVE_BATCH):
                    batch = ids[start : start + KEEP_ALIVE_BATCH]
                    alive = await self.log.run(subscription_calls.keep_alive(batch))
                    for missing in set(batch) - alive:
                        for stream in followed[missing]:
                            stream.end(f"subscription {missing} was deleted or has expired")
            except (HeadwaterError, psycopg.Error) as error:
                logger.warning("subscriptions could not be kept alive", extra={ERROR: str(error)})

    async def _maintain(self) -> None:
        """Run this process's share of the log's maintenance, which also publishes scheduled events."""
        while True:
            await self.log.run_maintenance()
            await asyncio.sleep(0.05)
