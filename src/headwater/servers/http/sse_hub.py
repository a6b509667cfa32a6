"""Live streams: one reader follows the head of the log for all of a process, and each feed is read once for all in it.

A feed keeps the last events, in the order of their positions. A stream that has all of them is live and is written to
as events come; one that is behind is served from what is kept, and from the log itself where that does not reach back
far enough. So no event is lost, no memory grows with the number of events, and a stream costs a connection and no task.

A stream waits for open publishers of its own topics only. The feed of topics therefore has an end for each topic, and a
late event of one topic enters what is kept below events of others that were read before it. What must stay true:
- The end of a topic never exceeds its stable position: no event of the topic can still appear at or below it.
- Of a topic, every event above both the floor of the feed and the position from which the topic is covered, and up to
  the topic's end, is kept.
- A stream is written to up to the lowest end of its topics and no further. So a stream of A and B stays below an event
  of A that is not committed yet, while a stream of B goes on, and what is inserted for A is above every stream of A.
- A stream goes on after its position, whether from what is kept or from the log, and gets nothing twice.

Short transactions are not worth a read for each topic. While no publisher is open for longer than HELD_SECONDS, every
topic waits for the stable position of the whole log, and all of them are read together.
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

from headwater import calls
from headwater.aio import AsyncHeadwater
from headwater.calls import overview
from headwater.errors import (
    GroupNotFound,
    HeadwaterError,
    InvalidRequest,
    LogUnavailable,
    PositionExpired,
    TopicNotFound,
    epoch_changed,
)
from headwater.model import Event, LogStateByTopic
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import EPOCH, EPOCH_CHANGED, ERROR, POSITION, READ_TO, logger
from headwater.servers.authentication import TooManyRequests
from headwater.servers.http.event_json import Mark, frame
from headwater.servers.http.requests import MAX_POSITION
from headwater.servers.http.sse_client import Selection, Stream
from headwater.servers.options import Limits
from headwater.supervisor import supervise

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
# A publisher that is open for longer than this holds back its own topics only.
HELD_SECONDS: Final = 0.05
# How often the subscriptions of streams are said to be in use, and how many of them in one statement.
KEEP_SECONDS: Final = 2.0
KEPT_AT_ONCE: Final = 5000
EVERY_TOPIC: Final = ""
_WHOLE_LOG: Final = frozenset((EVERY_TOPIC,))


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
    # Of a feed of topics: after which position these topics were read.
    after: int = 0
    topics: frozenset[str] = frozenset()


def _position(one: Kept) -> int:
    return one.event.position


class Feed:
    """What several streams follow, read once. Subclasses say how it is read. One without streams is gone."""

    def __init__(self, live: Live, key: tuple[str, ...]) -> None:
        self._live = live
        self.key = key
        self.log = live.log
        # Of all that follows `floor`, up to `ceiling`, everything is kept.
        self.floor = self.ceiling = live.settled
        # In the order of positions.
        self._kept: list[Kept] = []
        self._kept_bytes = 0
        # The state of the log in which nothing more was found.
        self._exhausted = -1
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
            if self.has_more_for(stream):
                self._live.read_for(stream)
            else:
                self._waiting.add(stream)
            return
        end = self.end_of(stream.selection)
        if stream.position > end:
            # It has read on by itself: live, it would get again what this feed is about to read.
            self._waiting.add(stream)
            if self.is_stale():
                self.wake.set()
            return
        if self.give(stream, self._between(stream.position, end), end):
            stream.live = True
            self._groups.setdefault((stream.selection, stream.named), set()).add(stream)

    def end_of(self, selection: Selection) -> int:
        """Up to where everything was read that this selection takes."""
        return self.ceiling

    def has_more_for(self, stream: Stream) -> bool:
        """Whether the log may have something for a stream that is behind what is kept."""
        return True

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
        self._exhausted = -1
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
        """Whether there is something to read, or may be: only the database knows how far what it selects is stable."""
        live = self._live
        return self.ceiling < live.settled or (
            live.is_held and self.ceiling < live.drawn and self._exhausted != live.version
        )

    async def _run(self) -> None:
        while True:
            await self.wake.wait()
            self.wake.clear()
            try:
                while self.is_stale():
                    version, epoch = self._live.version, self._live.epoch
                    part = await self._next()
                    if epoch != self._live.epoch:
                        continue
                    if not self._add(part):
                        self._exhausted = version
                        if self.ceiling < self._live.settled and self.is_stale():
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

    def _add(self, part: Part) -> bool:
        """Keep what was read, and write it to all who are live. False: nothing more was read."""
        ends = {selection: self.end_of(selection) for selection, _ in self._groups}
        moved = self._keep(part)
        for (selection, named), streams in list(self._groups.items()):
            after, to = ends[selection], self.end_of(selection)
            if to <= after:
                continue
            made = list(pieces(self._between(after, to), selection, named, to))
            for stream in tuple(streams):
                for piece, end, delivered in made:
                    if stream.closed or stream.is_paused:
                        break
                    if piece:
                        stream.write(piece)
                        stream.delivered = delivered
                    stream.position = end
                if not stream.closed and stream.is_paused and stream.position < to:
                    self._unlive(stream)
        self._trim()
        return moved

    def _keep(self, part: Part) -> bool:
        """Put what was read in its place; whether that reaches further than before."""
        self._kept.extend(part.events)
        self._kept_bytes += sum(len(one.event.payload or b"") for one in part.events)
        before, self.ceiling = self.ceiling, part.to
        return self.ceiling > before

    def _between(self, after: int, to: int) -> list[Kept]:
        """What is kept after a position and up to another."""
        start = bisect_right(self._kept, after, key=_position)
        return self._kept[start : bisect_right(self._kept, to, lo=start, key=_position)]

    def _trim(self) -> None:
        """Keep no more than fits. Streams that would miss what is gone are behind from now on."""
        gone = 0
        while len(self._kept) - gone > KEPT_EVENTS or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept[gone].event.payload or b"")
            gone += 1
        if gone == 0:
            return
        self.floor = self._kept[gone - 1].event.position
        del self._kept[:gone]
        for (selection, _), streams in list(self._groups.items()):
            if self.end_of(selection) < self.floor:
                for stream in tuple(streams):
                    self._unlive(stream)
                    self._waiting.add(stream)

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
    """Events of topics: of all that anybody follows, read together where they are stable equally far."""

    def __init__(self, live: Live, key: tuple[str, ...]) -> None:
        super().__init__(live, key)
        # How many streams follow each topic.
        self._followers: Counter[str] = Counter()
        # From which position on the events of a topic are among those that are read, and up to where they were.
        self._covered: dict[str, int] = {}
        self._ends: dict[str, int] = {}

    @property
    def topics(self) -> list[str]:
        """The topics that streams name."""
        return [topic for topic in self._followers if topic != EVERY_TOPIC]

    def join(self, stream: Stream) -> None:
        super().join(stream)
        self._followers.update(_topics_of(stream))

    def leave(self, stream: Stream) -> None:
        for topic in _topics_of(stream):
            self._followers[topic] -= 1
            if self._followers[topic] <= 0:
                del self._followers[topic]
        super().leave(stream)

    def end_of(self, selection: Selection) -> int:
        return min(self._ends[topic] for topic in _topics_selected(selection))

    def holds(self, stream: Stream) -> bool:
        return super().holds(stream) and all(
            topic in self._covered and stream.position >= self._covered[topic] for topic in _topics_of(stream)
        )

    def has_more_for(self, stream: Stream) -> bool:
        return self._live.stable_of(_topics_of(stream)) > stream.position

    def is_stale(self) -> bool:
        return any(
            topic not in self._ends or self._ends[topic] < self._live.stable_of((topic,)) for topic in self._followers
        )

    def _cover(self) -> None:
        """Begin with topics that are followed now, and end with those that no stream follows any more."""
        whole = (self._covered[EVERY_TOPIC], self._ends[EVERY_TOPIC]) if EVERY_TOPIC in self._ends else None
        covered, ends = {}, {}
        for topic in self._followers:
            end = self._ends.get(topic)
            if end is not None and end >= self.floor:
                covered[topic], ends[topic] = self._covered[topic], end
            elif end is None and whole is not None:
                covered[topic], ends[topic] = whole
            else:
                # Streams behind this read from the log by themselves. So do those of a topic that waited for so long
                # that events above its end are no longer kept.
                covered[topic] = ends[topic] = max(end or 0, self._live.stable_of((topic,)))
        self._covered, self._ends = covered, ends

    async def _next(self) -> Part:
        # Whoever comes while this is read is not covered by it.
        self._cover()
        # Those with the same end and the same stable position are read together, the furthest behind first.
        together: dict[tuple[int, int], set[str]] = {}
        for topic, end in self._ends.items():
            stable = self._live.stable_of((topic,))
            if end < stable:
                together.setdefault((end, stable), set()).add(topic)
        if not together:
            return Part((), 0)
        after, stable = min(together)
        topics = together[after, stable]
        part = await self._read(None if EVERY_TOPIC in topics else sorted(topics), after, stable)
        return part._replace(after=after, topics=frozenset(topics))

    def _keep(self, part: Part) -> bool:
        if not part.topics:
            return False
        for topic, end in self._ends.items():
            # Who reads the whole log reads for each topic.
            if topic in part.topics or (EVERY_TOPIC in part.topics and part.after <= end < part.to):
                self._ends[topic] = part.to
        if not part.events:
            return True
        events = part.events
        later: list[Kept] = []
        if self._kept and self._kept[-1].event.position >= events[0].event.position:
            # Others were read further than these. Some may be kept already: the whole log was read for other streams.
            start = bisect_right(self._kept, events[0].event.position - 1, key=_position)
            later = self._kept[start:]
            known = {one.event.position for one in later}
            events = [one for one in events if one.event.position not in known]
            del self._kept[start:]
        # What is below the floor is of no use: something above it is gone.
        events = [one for one in events if one.event.position > self.floor]
        self._kept.extend(sorted([*later, *events], key=_position) if later else events)
        self._kept_bytes += sum(len(one.event.payload or b"") for one in events)
        return True

    async def read(self, after: int, selection: Selection, gone_to: int = 0) -> Part:
        names = None if selection.topics is None else sorted(selection.topics)
        return await self._read(names, after, self._live.stable_of(_topics_selected(selection)), gone_to)

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
        self._covered, self._ends = {}, {}
        super().rewind(limit)

    def _give_up(self, error: HeadwaterError) -> None:
        """One topic is gone, or was too far behind: who follows others goes on."""
        topic = error.detail.get("topic")
        for stream in self:
            if topic is None or topic in _topics_of(stream) or EVERY_TOPIC in _topics_of(stream):
                stream.end(error.message)
        self._covered, self._ends = {}, {}
        self._kept.clear()
        self._kept_bytes = 0
        for stream in self:
            # What they had up to now they have; the rest they read from the log.
            self._unlive(stream)
            self._waiting.add(stream)
        self.wake.set()


def _topics_selected(selection: Selection) -> frozenset[str]:
    return _WHOLE_LOG if selection.topics is None else selection.topics


def _topics_of(stream: Stream) -> frozenset[str]:
    return _topics_selected(stream.selection)


class BindingFeed(Feed):
    """What the bindings of a queue select. The database says what that is, and nobody else."""

    async def _next(self) -> Part:
        return await self.read(self.ceiling, Selection())

    async def read(self, after: int, selection: Selection, gone_to: int = 0) -> Part:
        epoch = self._live.epoch
        call = overview.read_bound(self.key[1], after=after, batch_size=BATCH_SIZE, max_bytes=BATCH_BYTES)
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
        # The head of the log when that was found out, and the number of different answers until then.
        self.drawn = 0
        self.version = 0
        # Whether a publisher is open for longer than HELD_SECONDS: what the head was that long ago is not stable yet.
        self.is_held = False
        self._old_drawn = self._recent_drawn = 0
        self._recent_at = 0.0
        # While one is: the topics that were asked about, how far those are stable that such publishers hold back, and
        # how far all others of them are.
        self._asked: frozenset[str] = frozenset()
        self._held_to: dict[str, int] = {}
        self._others_to = 0
        self._answer: tuple[Any, ...] = ()
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
        last = await self.log.run(calls.read_backwards(topics, batch_size=1), patience_seconds=5)
        gone_to = await self.log.run(calls.expired_to(topics), patience_seconds=5)
        return max(gone_to, last[0].position if last else 0)

    async def end(self) -> int:
        """The position of the last settled event, as of now or a moment ago."""
        if not self._known:
            await self._note(await self._look())
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
                    await self._note(await self._look())
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

    async def _note(self, state: LogStateByTopic) -> bool:
        """Take in how far the log is; whether it went on. In another epoch all streams go back to what both share."""
        known = self.epoch
        if state.epoch > known > 0:
            limit = await self.log.run(calls.common_position(known, MAX_POSITION), patience_seconds=0)
            if self.epoch != known:
                return False
            COUNTERS.add(EPOCH_CHANGED)
            logger.warning("epoch changed", extra={EPOCH: state.epoch, READ_TO: self.settled, POSITION: limit})
            self._old_drawn = self._recent_drawn = 0
            self._take(state)
            for feed in list(self._feeds.values()):
                feed.rewind(limit)
            return True
        if state.epoch < known or state.settled < self.settled or state.drawn < self.drawn:
            return False
        return self._take(state)

    def _take(self, state: LogStateByTopic) -> bool:
        """Replace what is known of the log, all of it at once; whether it is another than before."""
        now = time.monotonic()
        if now - self._recent_at >= HELD_SECONDS:
            self._old_drawn, self._recent_drawn, self._recent_at = self._recent_drawn, state.drawn, now
        self.drawn, self.settled, self.epoch = state.drawn, state.settled, state.epoch
        self.is_held = state.settled < self._old_drawn
        self._asked = state.topics if self.is_held else frozenset()
        # The bound of a publisher is what the head was when it began.
        self._held_to = {topic: to for topic, to in state.held.items() if to < self._old_drawn}
        self._others_to = min((to for to in state.held.values() if to >= self._old_drawn), default=state.drawn)
        answer = (state, self._held_to, self._others_to) if self.is_held else (state.epoch, state.settled)
        if answer == self._answer:
            return False
        self._answer = answer
        self.version += 1
        return True

    def stable_of(self, topics: Iterable[str]) -> int:
        """Up to where all events of these topics can be read."""
        return min(
            self._held_to.get(topic, self._others_to) if topic in self._asked else self.settled for topic in topics
        )

    async def _look(self) -> LogStateByTopic:
        """How far the log is; while a publisher stays open, for each topic that is followed."""
        if not self.is_held:
            state = await self.log.run(calls.log_state(), patience_seconds=0)
            return LogStateByTopic(*state, bounds=(), topics=frozenset(), held={})
        feed = self._feeds.get(("topics",))
        topics = feed.topics if isinstance(feed, TopicFeed) else []
        return await self.log.run(calls.log_state_by_topic(topics), patience_seconds=0)

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
                    state = await self._look()
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
