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
from headwater.counters import COUNTERS
from headwater.errors import (
    GroupNotFound,
    HeadwaterError,
    InvalidRequest,
    LogUnavailable,
    PositionExpired,
    TopicNotFound,
    epoch_changed,
)
from headwater.model import Event, LogState
from headwater.server.callers import TooManyRequests
from headwater.server.door import Limits
from headwater.server.http.rendering import Mark, frame
from headwater.server.http.shapes import MAX_POSITION
from headwater.server.http.stream import Selection, Stream
from headwater.supervisor import supervise
from headwater.telemetry import EPOCH, EPOCH_CHANGED, ERROR, POSITION, READ_TO, logger

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
# How often the log is looked at whose head stays: after a crash it may be the same in another epoch.
LOOK_SECONDS: Final = 0.5
MAX_LOOKS: Final = 5
# How often the subscriptions of streams are said to be in use, and how many of them in one statement.
KEEP_SECONDS: Final = 2.0
KEPT_AT_ONCE: Final = 5000
EVERY_TOPIC: Final = ""


class Kept(NamedTuple):
    """An event of a feed, and the subscriptions that it matched."""

    event: Event
    subscriptions: tuple[int, ...]
    frames: dict[bool, bytes]
    # Which epoch its position is of.
    epoch: int | None

    def frame(self, named: bool) -> bytes:
        """The event as it is written, made once for all."""
        made = self.frames.get(named)
        if made is None:
            made = self.frames[named] = frame(self.event, named=named, epoch=self.epoch)
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
        self._task = supervise("http live feed", self._run)

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
        if stream.position > self.ceiling:
            # It has read on by itself: live, it would get again what this feed is about to read.
            self._waiting.add(stream)
            if self.is_stale():
                self.wake.set()
            return
        missing: list[Kept] = []
        for one in reversed(self._kept):
            if one.event.position <= stream.position:
                break
            missing.append(one)
        missing.reverse()
        if self.give(stream, missing, self.ceiling):
            stream.live = True
            self._groups.setdefault((stream.selection, stream.named), set()).add(stream)

    def holds(self, stream: Stream) -> bool:
        """Whether all that the stream lacks is kept here."""
        return stream.position >= self.floor

    def give(self, stream: Stream, events: Sequence[Kept], to: int) -> bool:
        """Write events to one stream, in pieces, until it takes no more. True: it has got all of them."""
        for piece, end, delivered in pieces(events, stream.selection, stream.named, to):
            if stream.closed or stream.is_paused:
                return False
            if piece:
                stream.write(piece)
                stream.delivered = delivered
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

    def rewind(self, limit: int) -> None:
        """Keep nothing of an epoch that is over: each stream goes on from what it shares with the present one."""
        self._kept.clear()
        self._kept_bytes = 0
        self.floor = self.ceiling = self._live.settled
        for stream in self:
            self._unlive(stream)
            stream.rewind(limit, self._live.epoch)
            self._waiting.add(stream)
        self.wake.set()

    async def read(self, after: int, selection: Selection, gone_to: int = 0) -> Part:
        """What follows a position, for one that is behind and does not lack what retention took up to `gone_to`."""
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
                    before, epoch = self.ceiling, self._live.epoch
                    part = await self._next()
                    if epoch != self._live.epoch:
                        continue
                    self._add(part)
                    if self.ceiling == before and self.is_stale():
                        # A condition ran out of time, and is set aside.
                        await asyncio.sleep(RETRY_SECONDS)
            except (PositionExpired, TopicNotFound, GroupNotFound, InvalidRequest) as error:
                self._give_up(error)
            except (HeadwaterError, psycopg.Error) as error:
                logger.warning("a live feed could not be read", extra={ERROR: str(error)})
                self._live.look()
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
                for piece, end, delivered in made:
                    if stream.closed or stream.is_paused:
                        break
                    if piece:
                        stream.write(piece)
                        stream.delivered = delivered
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


def pieces(events: Sequence[Kept], selection: Selection, named: bool, to: int) -> Iterator[tuple[bytes, int, int]]:
    """What a selection takes of events, in pieces, each with the position that it reaches and that of its last event,
    which is 0 in an empty one."""
    parts: list[bytes] = []
    size = last = 0
    for one in events:
        if selection.fits(one.event, one.subscriptions):
            made = one.frame(named)
            parts.append(made)
            size += len(made)
            last = one.event.position
            if size >= PIECE_BYTES:
                yield b"".join(parts), last, last
                parts, size = [], 0
    yield b"".join(parts), to, last


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

    async def read(self, after: int, selection: Selection, gone_to: int = 0) -> Part:
        names = None if selection.topics is None else sorted(selection.topics)
        return await self._read(names, after, self._live.settled, gone_to)

    async def _read(self, names: list[str] | None, after: int, settled: int, gone_to: int = 0) -> Part:
        epoch = self._live.epoch
        if settled <= after:
            return Part((), after)
        events = await self.log.run(
            calls.read_settled(
                names,
                after=after,
                settled=settled,
                batch_size=BATCH_SIZE,
                max_bytes=BATCH_BYTES,
                gone_to=gone_to,
                epoch=epoch,
            ),
            patience_seconds=0,
        )
        return Part([Kept(event, (), {}, epoch) for event in events], events[-1].position if events else settled)

    def rewind(self, limit: int) -> None:
        self._covered = {}
        super().rewind(limit)

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

    async def read(self, after: int, selection: Selection, gone_to: int = 0) -> Part:
        epoch = self._live.epoch
        call = overview.read_bound(
            self.key[1], after=after, settled=self._live.settled, batch_size=BATCH_SIZE, max_bytes=BATCH_BYTES
        )
        events, to = await self.log.run(call, patience_seconds=0)
        await self._live.refuse_other_epoch(epoch, after)
        return Part([Kept(event, (), {}, epoch) for event in events], to)


class SubscriptionFeed(Feed):
    """What the SQL subscriptions of a group match."""

    async def _next(self) -> Part:
        return await self.read(self.ceiling, Selection())

    async def read(self, after: int, selection: Selection, gone_to: int = 0) -> Part:
        epoch = self._live.epoch
        reading = await self.log.read_next(self.key[1], reader="live", after=after, batch_size=BATCH_SIZE, peek=True)
        await self._live.refuse_other_epoch(epoch, after)
        kept = [Kept(one.event, one.subscription_ids, {}, epoch) for one in reading.events]
        return Part(kept, reading.next_position)


_KINDS: Final[dict[str, type[Feed]]] = {"topics": TopicFeed, "group": BindingFeed, "subscriptions": SubscriptionFeed}


class Live:
    """All live streams of a process."""

    def __init__(self, log: AsyncHeadwater, limits: Limits) -> None:
        self.log = log
        self._limits = limits
        # How far all topics are stable, and in which epoch; 0: that is not known yet.
        self.settled = 0
        self.epoch = 0
        self._known = False
        # The head of the log when it was last looked at; below 0: look again.
        self._drawn = -1
        self._feeds: dict[tuple[str, ...], Feed] = {}
        self._somebody = asyncio.Event()
        self._behind: asyncio.Queue[Stream] = asyncio.Queue()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the log for everybody, until the block is left."""
        tasks = [
            supervise(f"http live {work.__name__.strip('_')}", work)
            for work in (
                self._watch,
                self._look_after,
                self._keep_up,
                self._keep_subscriptions,
                *[self._read_behind] * READERS,
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

    def streams(self) -> list[Stream]:
        return [stream for feed in self._feeds.values() for stream in feed]

    async def start(self, topics: Sequence[str] | None) -> int:
        """Where a stream of these topics begins that is to get what comes from now on: behind their last event, whose
        position, other than that of the head of the log, cannot be issued again after a crash."""
        settled = await self.end()
        last = await self.log.run(calls.read_backwards(topics, before=settled + 1, batch_size=1), patience_seconds=5)
        gone_to = await self.log.run(calls.expired_to(topics), patience_seconds=5)
        return max(gone_to, last[0].position if last else 0)

    async def end(self) -> int:
        """The position of the last settled event, as of now or a moment ago."""
        if not self._known:
            await self._note(await self.log.run(calls.log_state(), patience_seconds=0))
        return self.settled

    async def begin(self, topics: Sequence[str] | None, mark: Mark | None) -> Mark:
        """Where a stream begins, in the present epoch: at its mark, or with what comes from now on.

        EpochChanged for a position that this log never issued.
        """
        for _ in range(MAX_LOOKS):
            await self.end()
            epoch = self.epoch
            if mark is None:
                begins = Mark(await self.start(topics), epoch=epoch)
            else:
                position, present = await self.log.run(calls.resume(mark.epoch, mark.position), patience_seconds=5)
                seen = mark.seen
                if present != mark.epoch and seen > position:
                    known = await self.log.run(calls.common_position(mark.epoch or present, seen), patience_seconds=5)
                    seen = min(known, self.settled)
                begins = Mark(position, seen, present)
                if present != epoch:
                    # Another epoch began in this moment, and the watcher has not seen it yet.
                    await self._note(await self.log.run(calls.log_state(), patience_seconds=5))
            if begins.epoch == self.epoch:
                return begins
        raise LogUnavailable("the epoch of the log changes again and again")

    async def refuse_other_epoch(self, epoch: int, after: int) -> None:
        """EpochChanged, unless the log is in this epoch, and was so for everything that was read before."""
        present = await self.log.run(calls.current_epoch(), patience_seconds=0)
        if present != epoch:
            raise epoch_changed(epoch, after, present, after)

    def look(self) -> None:
        """Look at the log again soon, whatever its head says."""
        self._drawn = -1

    async def _note(self, state: LogState) -> bool:
        """Take in how far the log is; whether it went on. In another epoch all streams go back to what both share."""
        known = self.epoch
        if known == 0:
            self.settled, self.epoch = state.settled, state.epoch
            return True
        if state.epoch > known:
            limit = await self.log.run(calls.common_position(known, MAX_POSITION), patience_seconds=0)
            if self.epoch != known:
                return False
            COUNTERS.add(EPOCH_CHANGED)
            logger.warning("epoch changed", extra={EPOCH: state.epoch, READ_TO: self.settled, POSITION: limit})
            self.settled, self.epoch = state.settled, state.epoch
            for feed in list(self._feeds.values()):
                feed.rewind(limit)
            return True
        if state.epoch < known or state.settled <= self.settled:
            return False
        self.settled = state.settled
        return True

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
        look_at = 0.0
        pause = SHORTEST_POLL_SECONDS
        while True:
            if not self._feeds:
                self._known = False
                self._drawn = -1
                self._somebody.clear()
                await self._somebody.wait()
            try:
                if (
                    self._drawn < 0
                    or time.monotonic() >= look_at
                    # Not "above": a crash may take the head back.
                    or await self.log.run(calls.head(), patience_seconds=0) != self._drawn
                ):
                    state = await self.log.run(calls.log_state(), patience_seconds=0)
                    # While somebody publishes, the log may settle without growing.
                    self._drawn = state.drawn if state.settled >= state.drawn else -1
                    look_at = time.monotonic() + LOOK_SECONDS
                    went_on = await self._note(state)
                    self._known = True
                    if went_on:
                        pause = SHORTEST_POLL_SECONDS
                        for feed in self._feeds.values():
                            feed.wake.set()
            except (HeadwaterError, psycopg.Error) as error:
                logger.warning("the head of the log is not known", extra={ERROR: str(error)})
                self._drawn = -1
                self._known = False
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
            before, epoch = stream.position, self.epoch
            try:
                part = await feed.read(stream.position, stream.selection, stream.gone_to)
            except (PositionExpired, TopicNotFound, GroupNotFound, InvalidRequest) as error:
                stream.end(error.message)
                continue
            except (HeadwaterError, psycopg.Error) as error:
                logger.warning("a live stream could not be read for", extra={ERROR: str(error)})
                self.look()
                await asyncio.sleep(RETRY_SECONDS)
                self._behind.put_nowait(stream)
                continue
            if epoch != self.epoch:
                # What was read is of an epoch that is over.
                feed.serve(stream)
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

    async def _keep_subscriptions(self) -> None:
        """Keep the subscriptions that are followed from expiring; end the streams of those that are gone."""
        while True:
            await asyncio.sleep(KEEP_SECONDS)
            followed: dict[int, list[Stream]] = {}
            for stream in self.streams():
                if stream.selection.subscription is not None:
                    followed.setdefault(stream.selection.subscription, []).append(stream)
            ids = list(followed)
            try:
                for start in range(0, len(ids), KEPT_AT_ONCE):
                    some = ids[start : start + KEPT_AT_ONCE]
                    alive = await self.log.run(calls.keep_alive(some), patience_seconds=0)
                    for gone in set(some) - alive:
                        for stream in followed[gone]:
                            stream.end(f"subscription {gone} was removed or has expired")
            except (HeadwaterError, psycopg.Error) as error:
                logger.warning("subscriptions not kept", extra={ERROR: str(error)})

    async def _keep_up(self) -> None:
        """This process's share of the log's upkeep: what was scheduled by this door enters the log by it."""
        while True:
            await self.log.do_upkeep()
            await asyncio.sleep(0.05)
