"""Live streams: one reader follows the head of the log for all of a process, and each feed is read once for all in it.

A feed keeps the last events. Who has all of them is live and is written to as events come; who is behind is served from
what is kept, and from the log itself where that does not reach back far enough. So nobody loses anything, no memory
grows with the number of events, and a stream costs a connection and no task.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import psycopg

from headwater import calls
from headwater.aio import AsyncHeadwater
from headwater.calls import overview
from headwater.errors import GroupNotFound, HeadwaterError, InvalidRequest, PositionExpired, TopicNotFound
from headwater.model import Event
from headwater.server.callers import TooManyRequests
from headwater.server.door import Limits
from headwater.server.http.rendering import frame
from headwater.server.http.stream import Selection, Stream
from headwater.telemetry import ERROR, logger

KEPT_EVENTS: Final = 4096
KEPT_BYTES: Final = 16 * 1024 * 1024
BATCH_SIZE: Final = 500
BATCH_BYTES: Final = 4 * 1024 * 1024
# Written at once to one client, before looking whether it takes it.
PIECE_BYTES: Final = 32 * 1024
SHORTEST_POLL_SECONDS: Final = 0.002
LONGEST_POLL_SECONDS: Final = 0.02
RETRY_SECONDS: Final = 0.5
# How many read the log at the same time for those who are behind.
READERS: Final = 3
MAX_FEEDS: Final = 1000
EVERY_TOPIC: Final = ""


class Kept(NamedTuple):
    """An event of a feed, and the subscriptions that it matched."""

    event: Event
    subscriptions: tuple[int, ...]
    frames: dict[bool, bytes]

    def frame(self, named: bool) -> bytes:
        """The event as it is written, made once for all."""
        made = self.frames.get(named)
        if made is None:
            made = self.frames[named] = frame(self.event, named=named)
        return made


class Part(NamedTuple):
    """Some of what follows a position, and up to where that is all."""

    events: Sequence[Kept]
    to: int


class Feed:
    """What several streams follow, read once. Subclasses say how it is read. One without streams is gone."""

    def __init__(self, live: Live, key: tuple[str, ...]) -> None:
        self._live = live
        self.key = key
        self.log = live.log
        # Of all that follows `floor`, up to `ceiling`, everything is kept.
        self.floor = self.ceiling = live.settled
        self._kept: deque[Kept] = deque()
        self._kept_bytes = 0
        self._streams: set[Stream] = set()
        # Those that are live, by what they select: what is the same for all of them is made once.
        self._groups: dict[tuple[Selection, bool], set[Stream]] = {}
        # Behind, and what they need is not kept yet.
        self._waiting: set[Stream] = set()
        self.wake = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda task: None if task.cancelled() else live.failed.set())

    # --- streams ---

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter(tuple(self._streams))

    def join(self, stream: Stream) -> None:
        stream.feed = self
        self._streams.add(stream)

    def leave(self, stream: Stream) -> None:
        self._streams.discard(stream)
        self._waiting.discard(stream)
        self._unlive(stream)
        if not self._streams:
            self._live.drop(self)

    def close(self) -> None:
        self._task.cancel()

    def serve(self, stream: Stream) -> None:
        """Give a stream what is kept of what it lacks; it is live after that. Who lacks more is read for."""
        if not self.holds(stream):
            self._live.read_for(stream)
            return
        missing: list[Kept] = []
        for one in reversed(self._kept):
            if one.event.position <= stream.position:
                break
            missing.append(one)
        missing.reverse()
        if self.give(stream, missing, max(self.ceiling, stream.position)):
            stream.live = True
            self._groups.setdefault((stream.selection, stream.named), set()).add(stream)

    def holds(self, stream: Stream) -> bool:
        """Whether all that the stream lacks is kept here."""
        return stream.position >= self.floor

    def give(self, stream: Stream, events: Sequence[Kept], to: int) -> bool:
        """Write events to one stream, in pieces, until it takes no more. True: it has got all of them."""
        for piece, end in pieces(events, stream.selection, stream.named, to):
            if stream.closed or stream.is_paused:
                return False
            if piece:
                stream.write(piece)
            stream.position = max(stream.position, end)
        return not stream.closed and not stream.is_paused

    def _unlive(self, stream: Stream) -> None:
        if stream.live:
            stream.live = False
            key = (stream.selection, stream.named)
            self._groups[key].discard(stream)
            if not self._groups[key]:
                del self._groups[key]

    # --- reading ---

    async def read(self, after: int, selection: Selection) -> Part:
        """What follows a position, for one that is behind."""
        raise NotImplementedError

    async def _next(self) -> Part:
        """What follows the ceiling, for all."""
        raise NotImplementedError

    def is_stale(self) -> bool:
        """Whether there is something to read."""
        return self.ceiling < self._live.settled

    async def _run(self) -> None:
        while True:
            await self.wake.wait()
            self.wake.clear()
            try:
                while self.is_stale():
                    before = self.ceiling
                    self._add(await self._next())
                    if self.ceiling == before and self.is_stale():
                        # A condition ran out of time, and is set aside.
                        await asyncio.sleep(RETRY_SECONDS)
            except (PositionExpired, TopicNotFound, GroupNotFound, InvalidRequest) as error:
                self._give_up(error)
            except (HeadwaterError, psycopg.Error) as error:
                logger.warning("a live feed could not be read", extra={ERROR: str(error)})
                self.wake.set()
                await asyncio.sleep(RETRY_SECONDS)
            waiting, self._waiting = self._waiting, set()
            for stream in waiting:
                self.serve(stream)

    def _add(self, part: Part) -> None:
        """Keep what was read, and write it to all who are live."""
        for (selection, named), streams in list(self._groups.items()):
            made = list(pieces(part.events, selection, named, part.to))
            for stream in tuple(streams):
                for piece, end in made:
                    if stream.closed or stream.is_paused:
                        break
                    if piece:
                        stream.write(piece)
                    stream.position = end
                if not stream.closed and stream.is_paused and stream.position < part.to:
                    self._unlive(stream)
        self._kept.extend(part.events)
        self._kept_bytes += sum(len(one.event.payload or b"") for one in part.events)
        while len(self._kept) > KEPT_EVENTS or self._kept_bytes > KEPT_BYTES:
            gone = self._kept.popleft()
            self._kept_bytes -= len(gone.event.payload or b"")
            self.floor = gone.event.position
        self.ceiling = part.to

    def _give_up(self, error: HeadwaterError) -> None:
        """Nothing more can be read: everybody is told, and who comes again is told why."""
        for stream in self:
            stream.end(error.message)

    def wait(self, stream: Stream) -> None:
        """The stream has all that there is, and yet not all that this feed will have."""
        self._waiting.add(stream)
        self.wake.set()


def pieces(events: Sequence[Kept], selection: Selection, named: bool, to: int) -> Iterator[tuple[bytes, int]]:
    """What a selection takes of events, in pieces, each with the position that it reaches."""
    parts: list[bytes] = []
    size = 0
    for one in events:
        if selection.fits(one.event, one.subscriptions):
            made = one.frame(named)
            parts.append(made)
            size += len(made)
            if size >= PIECE_BYTES:
                yield b"".join(parts), one.event.position
                parts, size = [], 0
    yield b"".join(parts), to


class TopicFeed(Feed):
    """Events of topics: of all that anybody follows, read together."""

    def __init__(self, live: Live, key: tuple[str, ...]) -> None:
        super().__init__(live, key)
        # From which position on the events of a topic are among those that are read.
        self._covered: dict[str, int] = {}

    def holds(self, stream: Stream) -> bool:
        return super().holds(stream) and all(
            topic in self._covered and stream.position >= self._covered[topic] for topic in _topics_of(stream)
        )

    def is_stale(self) -> bool:
        return super().is_stale() or not self._wanted() <= self._covered.keys()

    def _wanted(self) -> set[str]:
        return {topic for stream in self._streams for topic in _topics_of(stream)}

    async def _next(self) -> Part:
        wanted = self._wanted()
        before, settled = self.ceiling, max(self.ceiling, self._live.settled)
        # Whoever comes while this is read is not covered by it.
        everything = self._covered.get(EVERY_TOPIC)
        self._covered = {
            topic: self._covered.get(topic, before if everything is None else everything) for topic in wanted
        }
        if not wanted:
            return Part((), settled)
        names = None if EVERY_TOPIC in wanted else sorted(wanted)
        return await self._read(names, before, settled)

    async def read(self, after: int, selection: Selection) -> Part:
        names = None if selection.topics is None else sorted(selection.topics)
        return await self._read(names, after, self._live.settled)

    async def _read(self, names: list[str] | None, after: int, settled: int) -> Part:
        if settled <= after:
            return Part((), after)
        events = await self.log.run(
            calls.read_settled(
                names, after=after, settled=settled, batch_size=BATCH_SIZE, max_bytes=BATCH_BYTES, gone_to=0
            ),
            patience_seconds=0,
        )
        return Part([Kept(event, (), {}) for event in events], events[-1].position if events else settled)

    def _give_up(self, error: HeadwaterError) -> None:
        """One topic is gone, or was too far behind: who follows others goes on."""
        topic = error.detail.get("topic")
        for stream in self:
            if topic is None or topic in _topics_of(stream) or EVERY_TOPIC in _topics_of(stream):
                stream.end(error.message)
        self._covered = {}
        self._kept.clear()
        self._kept_bytes = 0
        self.floor = self.ceiling = max(self.ceiling, self._live.settled)
        for stream in self:
            # What they had up to now they have; the rest they read from the log.
            self._unlive(stream)
            self._waiting.add(stream)
        self.wake.set()


def _topics_of(stream: Stream) -> frozenset[str]:
    topics = stream.selection.topics
    return frozenset((EVERY_TOPIC,)) if topics is None else topics


class BindingFeed(Feed):
    """What the bindings of a queue select. The database says what that is, and nobody else."""

    async def _next(self) -> Part:
        return await self.read(self.ceiling, Selection())

    async def read(self, after: int, selection: Selection) -> Part:
        call = overview.read_bound(
            self.key[1], after=after, settled=self._live.settled, batch_size=BATCH_SIZE, max_bytes=BATCH_BYTES
        )
        events, to = await self.log.run(call, patience_seconds=0)
        return Part([Kept(event, (), {}) for event in events], to)


class SubscriptionFeed(Feed):
    """What the SQL subscriptions of a group match."""

    async def _next(self) -> Part:
        return await self.read(self.ceiling, Selection())

    async def read(self, after: int, selection: Selection) -> Part:
        reading = await self.log.read_next(self.key[1], reader="live", after=after, batch_size=BATCH_SIZE, peek=True)
        kept = [Kept(one.event, one.subscription_ids, {}) for one in reading.events]
        return Part(kept, reading.next_position)


_KINDS: Final[dict[str, type[Feed]]] = {"topics": TopicFeed, "group": BindingFeed, "subscriptions": SubscriptionFeed}


class Live:
    """All live streams of a process."""

    def __init__(self, log: AsyncHeadwater, limits: Limits) -> None:
        self.log = log
        self._limits = limits
        self.settled = 0
        self._known = False
        self._feeds: dict[tuple[str, ...], Feed] = {}
        self._somebody = asyncio.Event()
        self._behind: asyncio.Queue[Stream] = asyncio.Queue()
        self.failed = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the log for everybody, until the block is left."""
        tasks = [
            asyncio.create_task(work())
            for work in (self._watch, self._look_after, self._keep_up, *[self._read_behind] * READERS)
        ]
        for task in tasks:
            task.add_done_callback(lambda _: self.failed.set())
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

    def streams(self) -> list[Stream]:
        return [stream for feed in self._feeds.values() for stream in feed]

    async def end(self) -> int:
        """The position of the last settled event, as of now or a moment ago."""
        if not self._known:
            state = await self.log.run(calls.log_state(), patience_seconds=0)
            if not self._known:
                self.settled = max(self.settled, state.settled)
        return self.settled

    def refuse_too_many(self) -> None:
        """Say it now, while the client can still be told in full."""
        if len(self._feeds) >= MAX_FEEDS:
            raise TooManyRequests(f"more than {MAX_FEEDS} different groups are followed here")

    def join(self, stream: Stream, key: tuple[str, ...]) -> None:
        """Begin with a stream: of topics, of a group's bindings, or of a group's subscriptions."""
        feed = self._feeds.get(key)
        if feed is None:
            feed = self._feeds[key] = _KINDS[key[0]](self, key)
        feed.join(stream)
        self._somebody.set()
        feed.wake.set()

    def drop(self, feed: Feed) -> None:
        """Nobody follows it any more."""
        if self._feeds.get(feed.key) is feed:
            del self._feeds[feed.key]
        feed.close()

    def read_for(self, stream: Stream) -> None:
        """Have the log read for a stream that is behind."""
        self._behind.put_nowait(stream)

    async def _watch(self) -> None:
        """Follow the head of the log, as long as anybody follows anything."""
        drawn = -1
        pause = SHORTEST_POLL_SECONDS
        while True:
            if not self._feeds:
                self._known = False
                drawn = -1
                self._somebody.clear()
                await self._somebody.wait()
            try:
                if drawn < 0 or await self.log.run(calls.head(), patience_seconds=0) > drawn:
                    state = await self.log.run(calls.log_state(), patience_seconds=0)
                    # While somebody publishes, the log may settle without growing.
                    drawn = state.drawn if state.settled >= state.drawn else -1
                    self._known = True
                    if state.settled > self.settled:
                        self.settled = state.settled
                        pause = SHORTEST_POLL_SECONDS
                        for feed in self._feeds.values():
                            feed.wake.set()
            except (HeadwaterError, psycopg.Error) as error:
                logger.warning("the head of the log is not known", extra={ERROR: str(error)})
                drawn = -1
                await asyncio.sleep(RETRY_SECONDS)
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, LONGEST_POLL_SECONDS)

    async def _read_behind(self) -> None:
        """Read the log for those who are behind, a batch each in turn."""
        while True:
            stream = await self._behind.get()
            if stream.closed or stream.is_paused or stream.live:
                continue
            feed = stream.feed
            before = stream.position
            try:
                part = await feed.read(stream.position, stream.selection)
            except (PositionExpired, TopicNotFound, GroupNotFound, InvalidRequest) as error:
                stream.end(error.message)
                continue
            except (HeadwaterError, psycopg.Error) as error:
                logger.warning("a live stream could not be read for", extra={ERROR: str(error)})
                await asyncio.sleep(RETRY_SECONDS)
                self._behind.put_nowait(stream)
                continue
            if stream.live or stream.position != before:
                continue
            if feed.give(stream, part.events, part.to):
                if feed.holds(stream) or stream.position > before:
                    feed.serve(stream)
                else:
                    feed.wait(stream)

    async def _look_after(self) -> None:
        """Heartbeats, and the end for those who are too slow or no longer allowed."""
        limits = self._limits
        while True:
            await asyncio.sleep(min(1.0, limits.heartbeat_seconds / 4, limits.slow_seconds / 4))
            now = time.monotonic()
            for place, stream in enumerate(self.streams()):
                stream.look_after(now, heartbeat_seconds=limits.heartbeat_seconds, slow_seconds=limits.slow_seconds)
                if place % 500 == 499:
                    await asyncio.sleep(0)

    async def _keep_up(self) -> None:
        """This process's share of the log's upkeep: what was scheduled by this door enters the log by it."""
        while True:
            await self.log.do_upkeep()
            await asyncio.sleep(0.05)
