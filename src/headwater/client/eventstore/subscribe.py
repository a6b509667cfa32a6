"""Subscriptions of an event store, exclusive or competing. The same on Postgres and on SQLite.

`StoreSubscriptions` is the base class of all stores. A subscription reads the log until it has caught up, then gets
events from the live reader that all subscriptions of the process share; one that falls behind reads the log again.
Competing consumers share the events of a queue by leases.
"""
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

from headwater.calls.store import EncodedAppend
from headwater.client.eventstore.group_commit import AppendResults, GroupCommit
from headwater.client.eventstore.live_reader import LiveReader, StoreEvents, WaitForGrowth
from headwater.errors import CursorMoved, EpochChanged, InvalidRequest, LeaseLost, epoch_changed_error
from headwater.eventstore.limits import check_competitor
from headwater.eventstore.query import EVERYTHING, Query, StoreEvent, StoreLease, StorePage, check_positions
from headwater.eventstore.recent_events import MAX_BYTES
from headwater.log.steps import OnEpochChange
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import EPOCH, EPOCH_CHANGED, POSITION, READ_TO, logger

T = TypeVar("T")
# Called with a connection of the store's kind, in a transaction, and the events.
StoreHandler = Callable[[Any, Sequence[StoreEvent]], None]

# How long a subscriber waits for live events before it checks its cursor and runs maintenance.
LIVE_SECONDS = 0.5
IDLE_SAVE_SECONDS = 30.0
# The waits of a competing consumer without events, if nothing watches the log, and how often it reaps expired leases.
MIN_WAIT_SECONDS = 0.001
MAX_WAIT_SECONDS = 0.05
REAP_SECONDS = 1.0


class StoreSubscriptions(ABC):
    """What every event store can do once it can append a group, read a batch, and keep cursors and leases."""

    def __init__(self, topic: str, *, overlaps: bool = False) -> None:
        self.topic = topic
        self._group_commit = GroupCommit(self._send, overlaps=overlaps)
        self._live_reader = LiveReader(self._read_after, self._growth(None))

    @abstractmethod
    def _send(self, appends: Sequence[EncodedAppend]) -> AppendResults:
        """Append a group in one transaction."""

    def _growth(self, queue: str | None) -> WaitForGrowth | None:
        """Waits until the log has grown, or this queue has changed. None: nothing watches the log, so poll."""
        return None

    @abstractmethod
    def _read_after(self, position: int, batch_size: int, epoch: int) -> StoreEvents:
        """The next events of the store, without a query. Cheap while there are none.

        Raises EpochChanged if the log is in another epoch than `epoch`, the epoch of the position.
        """

    @abstractmethod
    def read(
        self,
        query: Query = EVERYTHING,
        *,
        after: int = 0,
        before: int | None = None,
        backwards: bool = False,
        batch_size: int = 100,
        max_bytes: int = MAX_BYTES,
        epoch: int | None = None,
    ) -> list[StoreEvent]:
        """Matching events between two positions; at least one, whatever its size. Raises EpochChanged like
        _read_after."""

    @abstractmethod
    def _end(self) -> tuple[int, int]:
        """The position of the last event, 0 if the store is empty, and the current epoch."""

    @abstractmethod
    def resumed_position(self, epoch: int | None, position: int) -> tuple[int, int]:
        """The position to continue from for a reader of this epoch, and the current epoch. Raises EpochChanged if the
        position never existed."""

    @abstractmethod
    def open_cursor(self, name: str, start_after: int) -> int:
        """The position of the cursor; a missing one is created."""

    @abstractmethod
    def _find_cursor(self, name: str) -> int | None:
        """The position of the cursor; None if it does not exist."""

    @abstractmethod
    def move_cursor(self, name: str, from_position: int, to_position: int, epoch: int | None = None) -> None:
        """Move the cursor. Raises CursorMoved if it is elsewhere, EpochChanged if the log is in another epoch."""

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
        """Run a handler and move the cursor in one transaction. Raises the same errors as move_cursor."""

    @abstractmethod
    def has_queue(self, queue: str) -> bool:
        """Whether the queue exists."""

    @abstractmethod
    def _open_queue(self, queue: str) -> None:
        """Create the queue if it is missing. Raises InvalidRequest if it is not bound to this store only."""

    @abstractmethod
    def _reap(self, queue: str) -> None:
        """Return the events of expired leases to the queue; those without attempts left become dead letters."""

    @abstractmethod
    def _claim(
        self, queue: str, query: Query, worker: str, batch_size: int, lease_seconds: float | None
    ) -> StoreLease | None:
        """Lease events that no other consumer has; some may not match the query. None: no event is ready."""

    @abstractmethod
    def _settle(self, lease: StoreLease) -> None:
        """Mark all events of a lease as done. Raises LeaseLost if the lease has expired."""

    @abstractmethod
    def _run_maintenance(self) -> None:
        """Run this process's share of the log's maintenance."""

    @abstractmethod
    def _patiently(self, act: Callable[[], T], patience_seconds: float | None) -> T:
        """Retry `act` while the database is unavailable, for up to `patience_seconds`."""

    def read_all(
        self,
        query: Query = EVERYTHING,
        *,
        after: int = 0,
        before: int | None = None,
        backwards: bool = False,
        batch_size: int = 1000,
    ) -> Iterator[StoreEvent]:
        """Yield all matching events that exist now, read in batches."""
        end, epoch = self._end()
        if before is None:
            before = end + 1
        while True:
            events = self.read(
                query, after=after, before=before, backwards=backwards, batch_size=batch_size, epoch=epoch
            )
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
        """Yield every matching event: existing events first, then new ones as they are appended. See
        subscribe_batches."""
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
        """Yield every matching event in order, in batches: existing events first, then new ones as they are appended.

        If the named cursor exists, reading starts there. The cursor is saved when the next batch is requested, so a
        crash repeats at most the current batch (at-least-once). However many subscribers there are, one of them reads
        for all; a slow one reads the log by itself.

        If positions may have been reassigned (Postgres crashed, failed over or was restored), reading continues from
        the cursor, or without one from the last common position, and skips nothing; with `on_epoch_change="error"` it
        raises EpochChanged. `epoch` is the epoch of `after`: see read_page.
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
        """Like subscribe_batches, but each batch has the epoch of its positions: for readers that store positions
        themselves."""
        position, present = self._patiently(
            partial(self._begin, after, epoch, from_end, cursor, on_epoch_change), patience_seconds
        )
        saved = position
        save_at = time.monotonic() + IDLE_SAVE_SECONDS
        while True:
            try:
                position, events = self._next(
                    query, position, present, batch_size, stop_when_caught_up, patience_seconds, max_bytes
                )
                if events:
                    yield StorePage(events, present)
                if cursor is not None:
                    # A cursor without matches is still moved, or the next start would read everything again.
                    if events or stop_when_caught_up or time.monotonic() > save_at:
                        move = partial(self.move_cursor, cursor, saved, position, present)
                        self._patiently(move, patience_seconds)
                        saved = position
                        save_at = time.monotonic() + IDLE_SAVE_SECONDS
                    elif (found := self._cursor_position(cursor, patience_seconds)) != saved:
                        position = saved = found
            except CursorMoved:
                if cursor is None:
                    raise
                # The cursor was set, or an earlier move succeeded and its response was lost.
                position = saved = self._cursor_position(cursor, patience_seconds)
            except EpochChanged as error:
                position, present = self._rewind(error, position, present, cursor, on_epoch_change, patience_seconds)
                saved = position
                continue
            if stop_when_caught_up and not events:
                return
            self._run_maintenance()

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
        """Run `handler(connection, events)` on every batch of matching events, in the transaction that also moves the
        cursor.

        What the handler writes on that connection and the new position commit together, so each event takes effect
        exactly once. On SQLite, the connection is to the store's own file, and appends wait meanwhile.
        """
        position, present = self._patiently(
            partial(self._begin, after, epoch, from_end, cursor, on_epoch_change), patience_seconds
        )
        saved = position
        while True:
            try:
                position, events = self._next(
                    query, position, present, batch_size, stop_when_caught_up, patience_seconds
                )
                if events:
                    apply = partial(self._apply, handler, events, cursor, saved, position, present)
                    self._patiently(apply, patience_seconds)
                    saved = position
                elif stop_when_caught_up:
                    return
                elif (found := self._cursor_position(cursor, patience_seconds)) != saved:
                    position = saved = found
            except CursorMoved:
                # Another process uses the cursor, or an earlier commit succeeded and its response was lost.
                position = saved = self._cursor_position(cursor, patience_seconds)
            except EpochChanged as error:
                position, present = self._rewind(error, position, present, cursor, on_epoch_change, patience_seconds)
                saved = position
                continue
            self._run_maintenance()

    def compete(
        self,
        queue: str,
        query: Query = EVERYTHING,
        *,
        worker: str,
        batch_size: int = 100,
        lease_seconds: float | None = None,
        stop_when_caught_up: bool = False,
    ) -> Iterator[Sequence[StoreEvent]]:
        """Yield batches of matching events, each delivered to one of all consumers that compete in the queue. A missing
        queue is created.

        A batch is done when the next one is requested. If a consumer crashes or takes too long, others get the events
        of its batch one by one; an event whose own lease expires five times becomes a dead letter. Events that do not
        match are done at once. A lease is 30 seconds, unless the queue or `lease_seconds` sets another length. A queue
        with other bindings is rejected.
        """
        check_competitor(queue, worker, batch_size, lease_seconds)
        self._open_queue(queue)
        wait_for_growth = self._growth(queue)
        wait = MIN_WAIT_SECONDS
        reap_at = time.monotonic()
        while True:
            self._run_maintenance()
            if time.monotonic() >= reap_at:
                # Return the events of expired leases to the queue.
                self._reap(queue)
                reap_at = time.monotonic() + REAP_SECONDS
            lease = self._claim(queue, query, worker, batch_size, lease_seconds)
            if lease is None:
                if stop_when_caught_up:
                    return
                if wait_for_growth is not None:
                    wait_for_growth(REAP_SECONDS)
                    continue
                time.sleep(wait)
                wait = min(wait * 2, MAX_WAIT_SECONDS)
                continue
            wait = MIN_WAIT_SECONDS
            events = [event for event in lease.events if query.matches(event)]
            if events:
                yield events
            try:
                self._settle(lease)
            except LeaseLost:
                # The lease has expired: another consumer may have the events.
                continue

    def _begin(
        self,
        after: int | None,
        epoch: int | None,
        from_end: bool,
        cursor: str | None,
        on_epoch_change: OnEpochChange,
    ) -> tuple[int, int]:
        """The start position and the current epoch, which is read before the cursor."""
        if after is not None and from_end:
            raise InvalidRequest("give only one of after and from_end")
        check_positions(after)
        start, present = self._end() if from_end else self.resumed_position(epoch, after or 0)
        if epoch is not None and epoch != present and cursor is None and on_epoch_change == "error":
            raise epoch_changed_error(epoch, after or 0, present, start)
        return (start if cursor is None else self.open_cursor(cursor, start)), present

    def _rewind(
        self,
        error: EpochChanged,
        position: int,
        epoch: int,
        cursor: str | None,
        on_epoch_change: OnEpochChange,
        patience_seconds: float | None,
    ) -> tuple[int, int]:
        """The position to continue from in another epoch: the cursor's, which is in the same database, or the common
        one."""
        common, present = self._patiently(partial(self.resumed_position, epoch, position), patience_seconds)
        if present == epoch or on_epoch_change == "error":
            # In the same epoch, the call would be rejected forever.
            raise error
        if cursor is not None:
            common = self._cursor_position(cursor, patience_seconds)
        COUNTERS.add(EPOCH_CHANGED)
        logger.warning("epoch changed", extra={EPOCH: present, READ_TO: position, POSITION: common})
        return common, present

    def _next(
        self,
        query: Query,
        position: int,
        epoch: int,
        batch_size: int,
        only_caught_up: bool,
        patience_seconds: float | None,
        max_bytes: int = MAX_BYTES,
    ) -> tuple[int, Sequence[StoreEvent]]:
        """The position read up to now, and the events that matched. No events: none came in time, or the end is
        reached."""
        end = position
        if only_caught_up or not self._live_reader.holds(position, epoch):
            # Not cached: read from the log, and wait only at its end.
            head, present = self._patiently(self._end, patience_seconds)
            if present != epoch:
                raise epoch_changed_error(epoch, position, present, min(position, head))
            if head > position:
                read = partial(self.read, query, after=position, before=head + 1, epoch=epoch)
                page = partial(read, batch_size=batch_size, max_bytes=max_bytes)
                events = self._patiently(page, patience_seconds)
                return (events[-1].position if events else head), events
            if only_caught_up:
                return position, ()
            # A reader ahead of the log waits at its end with the others, and skips the events up to its own position.
            end = head
            self._live_reader.forget_above(head)
        live = self._patiently(partial(self._live, end, epoch, batch_size, max_bytes), patience_seconds)
        if not live:
            return position, ()
        events = [event for event in live if event.position > position and query.matches(event)]
        return max(position, live[-1].position), events

    def _live(self, position: int, epoch: int, batch_size: int, max_bytes: int) -> Sequence[StoreEvent] | None:
        return self._live_reader.after(
            position, epoch=epoch, limit=batch_size, seconds=LIVE_SECONDS, max_bytes=max_bytes
        )

    def _cursor_position(self, cursor: str, patience_seconds: float | None) -> int:
        """The position of the cursor. If it was deleted, the subscriber ends with an error rather than creating it
        again."""
        found = self._patiently(partial(self._find_cursor, cursor), patience_seconds)
        if found is None:
            raise CursorMoved(f'cursor "{cursor}" was deleted', detail={"cursor": cursor, "actual_position": None})
        return found
