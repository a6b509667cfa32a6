"""Subscribing to an event store, alone or competing with others. The same on Postgres and on SQLite."""
# Generated from eventstore/subscribe.py by tools/unasync.py: write there.

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import (
    Callable,
    Iterator,
    Sequence,
)
from functools import partial
from typing import Any, TypeVar

from headwater.calls import EncodedAppend
from headwater.client.eventstore.group_commit import Lane, Verdicts
from headwater.client.eventstore.live_reader import Feed, StoreEvents
from headwater.errors import CursorMoved, EpochChanged, InvalidRequest, LeaseLost, epoch_changed
from headwater.eventstore.limits import refuse_bad_competitor
from headwater.eventstore.query import EVERYTHING, Query, StoreEvent, StoreLease, StorePage, refuse_beyond
from headwater.eventstore.recent_events import MAX_BYTES
from headwater.log.steps import OnEpochChange
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import EPOCH, EPOCH_CHANGED, POSITION, READ_TO, logger

T = TypeVar("T")
# A connection of the kind that the store has, in a transaction, and the events.
StoreHandler = Callable[[Any, Sequence[StoreEvent]], None]

# How long a subscriber waits for live events before it looks after its cursor and the log's upkeep.
LIVE_SECONDS = 0.5
IDLE_SAVE_SECONDS = 30.0
# How long a competitor waits at first before it looks again, and how often what the dead have left goes to the living.
SHORTEST_WAIT_SECONDS = 0.001
REAP_SECONDS = 1.0


class Subscribing(ABC):
    """What every event store can do once it can append a group, read a batch, keep a cursor and give leases."""

    def __init__(self, topic: str, *, overlaps: bool = False) -> None:
        self.topic = topic
        self._lane = Lane(self._send, overlaps=overlaps)
        self._feed = Feed(self._read_after)

    @abstractmethod
    def _send(self, appends: Sequence[EncodedAppend]) -> Verdicts:
        """Append a group in one transaction."""

    @abstractmethod
    def _read_after(self, position: int, batch_size: int, epoch: int) -> StoreEvents:
        """The next events of the store, whatever they are. Asks for little while there can be none.

        EpochChanged if the log is in another epoch than this one, which the position is of.
        """

    @abstractmethod
    def _read_batch(
        self,
        query: Query,
        after: int,
        before: int | None,
        backwards: bool,
        batch_size: int,
        max_bytes: int = MAX_BYTES,
        epoch: int | None = None,
    ) -> StoreEvents:
        """Events that match, between two positions; one of them whatever its size. EpochChanged as above."""

    @abstractmethod
    def _end(self) -> tuple[int, int]:
        """The position of the last event, 0 if there is none, and the present epoch."""

    @abstractmethod
    def _resume(self, epoch: int | None, position: int) -> tuple[int, int]:
        """Where a reader from this epoch goes on, and the present epoch; EpochChanged if there was no such position."""

    @abstractmethod
    def _open_cursor(self, name: str, start_after: int) -> int:
        """Where the cursor stands; made if there is none."""

    @abstractmethod
    def _find_cursor(self, name: str) -> int | None:
        """Where the cursor stands; None if there is none."""

    @abstractmethod
    def _move_cursor(self, name: str, from_position: int, to_position: int, epoch: int | None = None) -> None:
        """Move the cursor on; CursorMoved if it is elsewhere, EpochChanged if the log is in another epoch."""

    @abstractmethod
    def _apply(
        self,
        handler: StoreHandler,
        events: Sequence[StoreEvent],
        cursor: str,
        from_position: int,
        to_position: int,
        epoch: int,
    ) -> None:
        """Run a handler and move the cursor, both in one transaction; errors as those of moving."""

    @abstractmethod
    def _has_group(self, group: str) -> bool:
        """Whether there is a group of this name."""

    @abstractmethod
    def _open_group(self, group: str) -> None:
        """Make the group if it is missing; refuse one that is not of this store alone."""

    @abstractmethod
    def _reap(self, group: str) -> None:
        """Give the events of leases that ran out to others; those that had all of their tries are dead letters."""

    @abstractmethod
    def _claim(
        self, group: str, query: Query, worker: str, batch_size: int, lease_seconds: float | None
    ) -> StoreLease | None:
        """A lease on events that nobody has; some of them may be no match. None: there is nothing to do now."""

    @abstractmethod
    def _settle(self, lease: StoreLease) -> None:
        """All events of a lease are done; LeaseLost if it is too late."""

    @abstractmethod
    def _do_upkeep(self) -> None:
        """This process's share of the log's upkeep."""

    @abstractmethod
    def _patiently(self, act: Callable[[], T], patience_seconds: float | None) -> T:
        """Do it, again and again while the database cannot be reached, until patience ends."""

    def read_all(
        self,
        query: Query = EVERYTHING,
        *,
        after: int = 0,
        before: int | None = None,
        backwards: bool = False,
        batch_size: int = 1000,
    ) -> Iterator[StoreEvent]:
        """All events that match and are there now, batch by batch."""
        end, epoch = self._end()
        if before is None:
            before = end + 1
        while True:
            events = self._read_batch(query, after, before, backwards, batch_size, epoch=epoch)
            for event in events:
                yield event
            if not events:
                return
            if backwards:
                before = events[-1].position
            else:
                after = events[-1].position

    def subscribe(
        self,
        query: Query = EVERYTHING,
        *,
        after: int | None = None,
        epoch: int | None = None,
        from_end: bool = False,
        cursor: str | None = None,
        batch_size: int = 1000,
        stop_when_caught_up: bool = False,
        on_epoch_change: OnEpochChange = "rewind",
        patience_seconds: float | None = 60.0,
    ) -> Iterator[StoreEvent]:
        """Every event that matches, one by one: catches up, then stays live. See subscribe_batches."""
        for events in self.subscribe_batches(
            query,
            after=after,
            epoch=epoch,
            from_end=from_end,
            cursor=cursor,
            batch_size=batch_size,
            stop_when_caught_up=stop_when_caught_up,
            on_epoch_change=on_epoch_change,
            patience_seconds=patience_seconds,
        ):
            for event in events:
                yield event

    def subscribe_batches(
        self,
        query: Query = EVERYTHING,
        *,
        after: int | None = None,
        epoch: int | None = None,
        from_end: bool = False,
        cursor: str | None = None,
        batch_size: int = 1000,
        max_bytes: int = MAX_BYTES,
        stop_when_caught_up: bool = False,
        on_epoch_change: OnEpochChange = "rewind",
        patience_seconds: float | None = 60.0,
    ) -> Iterator[Sequence[StoreEvent]]:
        """Every event that matches, in order, in batches: catches up, then stays live.

        A named cursor is where to start if it exists, and is saved when the next batch is asked for: a crash
        repeats at most the batch in hand. However many subscribe, one of them reads for all; one that is slow
        reads the log by itself.

        If positions may have been issued again (Postgres crashed, failed over or was restored), it goes on from the
        cursor, or without one from the last common position, and skips nothing; with `on_epoch_change="error"` it
        raises EpochChanged. `epoch` is the one that `after` is of: see read_page.
        """
        pages = self.subscribe_pages(
            query,
            after=after,
            epoch=epoch,
            from_end=from_end,
            cursor=cursor,
            batch_size=batch_size,
            max_bytes=max_bytes,
            stop_when_caught_up=stop_when_caught_up,
            on_epoch_change=on_epoch_change,
            patience_seconds=patience_seconds,
        )
        for page in pages:
            yield page.events

    def subscribe_pages(
        self,
        query: Query = EVERYTHING,
        *,
        after: int | None = None,
        epoch: int | None = None,
        from_end: bool = False,
        cursor: str | None = None,
        batch_size: int = 1000,
        max_bytes: int = MAX_BYTES,
        stop_when_caught_up: bool = False,
        on_epoch_change: OnEpochChange = "rewind",
        patience_seconds: float | None = 60.0,
    ) -> Iterator[StorePage]:
        """The same, each batch with the epoch that its positions are of: for those who remember them themselves."""
        place, present = self._patiently(
            partial(self._begin, after, epoch, from_end, cursor, on_epoch_change), patience_seconds
        )
        saved = place
        save_at = time.monotonic() + IDLE_SAVE_SECONDS
        while True:
            try:
                place, events = self._next(
                    query, place, present, batch_size, stop_when_caught_up, patience_seconds, max_bytes
                )
                if events:
                    yield StorePage(events, present)
                if cursor is not None:
                    # A cursor that sees no match still moves on, or the next start would read all of it again.
                    if events or stop_when_caught_up or time.monotonic() > save_at:
                        move = partial(self._move_cursor, cursor, saved, place, present)
                        self._patiently(move, patience_seconds)
                        saved = place
                        save_at = time.monotonic() + IDLE_SAVE_SECONDS
                    elif (found := self._look_at(cursor, patience_seconds)) != saved:
                        place = saved = found
            except CursorMoved:
                if cursor is None:
                    raise
                # Somebody set it, or our own move was done and its answer lost.
                place = saved = self._look_at(cursor, patience_seconds)
            except EpochChanged as error:
                place, present = self._rewound(error, place, present, cursor, on_epoch_change, patience_seconds)
                saved = place
                continue
            if stop_when_caught_up and not events:
                return
            self._do_upkeep()

    def process(
        self,
        query: Query,
        handler: StoreHandler,
        *,
        cursor: str,
        after: int | None = None,
        epoch: int | None = None,
        from_end: bool = False,
        batch_size: int = 1000,
        stop_when_caught_up: bool = False,
        on_epoch_change: OnEpochChange = "rewind",
        patience_seconds: float | None = 60.0,
    ) -> None:
        """Run `handler(connection, events)` on every batch that matches, its transaction moving the cursor too.

        What the handler writes on that connection and the position commit together, so each event has its
        effect exactly once. On SQLite that is a connection to the store's own file, and nobody appends meanwhile.
        """
        place, present = self._patiently(
            partial(self._begin, after, epoch, from_end, cursor, on_epoch_change), patience_seconds
        )
        saved = place
        while True:
            try:
                place, events = self._next(query, place, present, batch_size, stop_when_caught_up, patience_seconds)
                if events:
                    apply = partial(self._apply, handler, events, cursor, saved, place, present)
                    self._patiently(apply, patience_seconds)
                    saved = place
                elif stop_when_caught_up:
                    return
                elif (found := self._look_at(cursor, patience_seconds)) != saved:
                    place = saved = found
            except CursorMoved:
                # Another one is at it, or our own commit was done and its answer lost.
                place = saved = self._look_at(cursor, patience_seconds)
            except EpochChanged as error:
                place, present = self._rewound(error, place, present, cursor, on_epoch_change, patience_seconds)
                saved = place
                continue
            self._do_upkeep()

    def compete(
        self,
        group: str,
        query: Query = EVERYTHING,
        *,
        worker: str,
        batch_size: int = 100,
        lease_seconds: float | None = None,
        stop_when_caught_up: bool = False,
        poll_seconds: float = 0.05,
    ) -> Iterator[Sequence[StoreEvent]]:
        """Batches of events that match, each given to one of all who compete in the group, which is made if missing.

        A batch is done when the next one is asked for. Whoever dies or takes too long loses its batch to others, who
        get its events one by one; an event whose lease ran out five times when it was alone is a dead letter. What is
        no match is done at once. A lease is 30 seconds, unless the group or `lease_seconds` says otherwise. A group
        that is bound to anything else, too, is refused.
        """
        refuse_bad_competitor(group, worker, batch_size, lease_seconds)
        self._open_group(group)
        wait = SHORTEST_WAIT_SECONDS
        reap_at = time.monotonic()
        while True:
            self._do_upkeep()
            if time.monotonic() >= reap_at:
                # What the dead have left goes to the living.
                self._reap(group)
                reap_at = time.monotonic() + REAP_SECONDS
            lease = self._claim(group, query, worker, batch_size, lease_seconds)
            if lease is None:
                if stop_when_caught_up:
                    return
                time.sleep(wait)
                wait = min(wait * 2, poll_seconds)
                continue
            wait = SHORTEST_WAIT_SECONDS
            events = [event for event in lease.events if query.matches(event)]
            if events:
                yield events
            try:
                self._settle(lease)
            except LeaseLost:
                # Too late: the events are another's now.
                continue

    def _begin(
        self,
        after: int | None,
        epoch: int | None,
        from_end: bool,
        cursor: str | None,
        on_epoch_change: OnEpochChange,
    ) -> tuple[int, int]:
        """Where to start, and the present epoch, which that is of: it is asked for before the cursor is."""
        if after is not None and from_end:
            raise InvalidRequest("say where to start once: after or from_end")
        refuse_beyond(after)
        start, present = self._end() if from_end else self._resume(epoch, after or 0)
        if epoch is not None and epoch != present and cursor is None and on_epoch_change == "error":
            raise epoch_changed(epoch, after or 0, present, start)
        return (start if cursor is None else self._open_cursor(cursor, start)), present

    def _rewound(
        self,
        error: EpochChanged,
        place: int,
        epoch: int,
        cursor: str | None,
        on_epoch_change: OnEpochChange,
        patience_seconds: float | None,
    ) -> tuple[int, int]:
        """Where to go on in another epoch: at the cursor, which lives beside the events, or at the common position."""
        common, present = self._patiently(partial(self._resume, epoch, place), patience_seconds)
        if present == epoch or on_epoch_change == "error":
            # In the same epoch it would be refused for ever.
            raise error
        if cursor is not None:
            common = self._look_at(cursor, patience_seconds)
        COUNTERS.add(EPOCH_CHANGED)
        logger.warning("epoch changed", extra={EPOCH: present, READ_TO: place, POSITION: common})
        return common, present

    def _next(
        self,
        query: Query,
        place: int,
        epoch: int,
        batch_size: int,
        only_caught_up: bool,
        patience_seconds: float | None,
        max_bytes: int = MAX_BYTES,
    ) -> tuple[int, Sequence[StoreEvent]]:
        """How far it is read now, and what matched on the way. None: none came in time, or the end is reached."""
        end = place
        if only_caught_up or not self._feed.holds(place, epoch):
            # Not at hand: look in the log, and wait only at its end.
            head, present = self._patiently(self._end, patience_seconds)
            if present != epoch:
                raise epoch_changed(epoch, place, present, min(place, head))
            if head > place:
                read = partial(self._read_batch, query, place, head + 1, False, batch_size, max_bytes, epoch)
                events = self._patiently(read, patience_seconds)
                return (events[-1].position if events else head), events
            if only_caught_up:
                return place, ()
            # Whoever is ahead of the log waits at its end with the others, and passes over what comes up to its place.
            end = head
            self._feed.forget_above(head)
        live = self._patiently(partial(self._live, end, epoch, batch_size, max_bytes), patience_seconds)
        if not live:
            return place, ()
        events = [event for event in live if event.position > place and query.matches(event)]
        return max(place, live[-1].position), events

    def _live(self, place: int, epoch: int, batch_size: int, max_bytes: int) -> Sequence[StoreEvent] | None:
        return self._feed.after(place, epoch=epoch, limit=batch_size, seconds=LIVE_SECONDS, max_bytes=max_bytes)

    def _look_at(self, cursor: str, patience_seconds: float | None) -> int:
        """Where the cursor stands. One that was deleted ends its subscriber, which must not make it anew."""
        found = self._patiently(partial(self._find_cursor, cursor), patience_seconds)
        if found is None:
            raise CursorMoved(f'cursor "{cursor}" was deleted', detail={"cursor": cursor, "actual_position": None})
        return found
