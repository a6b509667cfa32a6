"""The live reader of an event store: one reader for all live subscribers of this process.

The first subscriber that waits for events becomes the leader: it reads for all, and stops when it has the events that
it waited for. So there is one reader however many subscribers there are, and none without subscribers.

The cached events belong to one epoch. If a read finds the log in another epoch, it raises EpochChanged and the cache is
dropped; a subscriber of another epoch than the cache reads from the log itself.
"""
# Generated from eventstore/live_reader.py by tools/unasync.py: write there.

from __future__ import annotations

import time
from collections.abc import (
    Callable,
    Sequence,
)

from headwater.errors import EpochChanged, OrderBroken
from headwater.eventstore.leader_lock import LeaderLock
from headwater.eventstore.query import StoreEvent
from headwater.eventstore.recent_events import MAX_BYTES, RecentEvents

BATCH_SIZE = 1000
MIN_WAIT_SECONDS = 0.001
MAX_WAIT_SECONDS = 0.01

StoreEvents = list[StoreEvent]
# Reads after a position: the position, the maximal number of events, and the epoch of the position.
ReadAfter = Callable[[int, int, int], StoreEvents]
# Waits until the log has grown since the last such wait, at most this many seconds.
WaitForGrowth = Callable[[float], object]


class LiveReader:
    """The most recent events of one event store, shared by all its subscribers in this process."""

    def __init__(self, read_after: ReadAfter, wait_for_growth: WaitForGrowth | None = None) -> None:
        self._read_after = read_after
        # None: there is no watcher, so it polls.
        self._wait_for_growth = wait_for_growth
        self._tail: RecentEvents | None = None
        self._leader = LeaderLock()

    def holds(self, position: int, epoch: int = 0) -> bool:
        """Whether the events after the position are cached or will be."""
        tail = self._tail
        return tail is not None and tail.epoch == epoch and tail.floor <= position <= tail.ceiling

    def forget_above(self, head: int) -> None:
        """Drop the cache if all of it is above the end of the log, which the caller has just read.

        The cached events belong to a deleted store of the same name; or the log has grown since, and subscribers read
        it themselves.
        """
        if self._tail is not None and self._tail.floor > head:
            self._tail = None

    def after(
        self, position: int, *, epoch: int = 0, limit: int, seconds: float, max_bytes: int = MAX_BYTES
    ) -> Sequence[StoreEvent] | None:
        """The next events after a position. An empty sequence: none came in time. None: they are no longer cached.

        The position must not be above the end of the log, since others could not continue from there.
        """
        deadline = time.monotonic() + seconds
        while True:
            tail = self._tail
            if tail is not None and (position < tail.floor or tail.epoch > epoch):
                return None
            if tail is not None and tail.epoch == epoch and position < tail.ceiling:
                return tail.after(position, limit, max_bytes)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return ()
            if not self._leader.acquire_unless(lambda: self._is_beyond(position, epoch), remaining):
                continue
            try:
                self._read(position, epoch, deadline)
            finally:
                self._leader.release()

    def _is_beyond(self, position: int, epoch: int) -> bool:
        tail = self._tail
        return tail is not None and (tail.epoch > epoch or (tail.epoch == epoch and tail.ceiling > position))

    def _read(self, position: int, epoch: int, deadline: float) -> None:
        """Read for all subscribers until there are events."""
        tail = self._tail
        if tail is not None and tail.epoch > epoch:
            return
        if tail is None or tail.epoch < epoch or tail.ceiling < position:
            # There was no reader for a while, and this subscriber caught up in the log itself. The others will do so,
            # too.
            tail = self._tail = RecentEvents(position, position, epoch=epoch)
        wait = MIN_WAIT_SECONDS
        while True:
            try:
                events = self._read_after(tail.ceiling, BATCH_SIZE, epoch)
            except EpochChanged:
                self._tail = None
                raise
            if events:
                try:
                    self._tail = tail.extended(events)
                except OrderBroken:
                    # The next reader starts from the log, not from events that do not belong to it.
                    self._tail = None
                    raise
                return
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            if self._wait_for_growth is not None:
                self._wait_for_growth(remaining)
                continue
            time.sleep(min(wait, remaining))
            wait = min(wait * 2, MAX_WAIT_SECONDS)
