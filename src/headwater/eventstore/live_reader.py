"""Following an event store live: one reader for all who follow it in this process.

Whoever waits for events and finds nobody reading reads for all, and stops when it has what it waited for. So there is
one reader however many follow, and none when nobody does.

What is kept is of one epoch. A reader that finds the log in another gets EpochChanged, and nothing is kept any more; a
reader from another epoch than what is kept has to look in the log itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import (
    Awaitable,
    Callable,
    Sequence,
)

from headwater.errors import EpochChanged, OrderBroken
from headwater.eventstore.leader_lock import AsyncTurn
from headwater.eventstore.query import StoreEvent
from headwater.eventstore.recent_events import MAX_BYTES, Tail

BATCH_SIZE = 1000
SHORTEST_WAIT_SECONDS = 0.001

StoreEvents = list[StoreEvent]
# After which position, how many at most, and of which epoch the position is.
ReadAfter = Callable[[int, int, int], Awaitable[StoreEvents]]


class Feed:
    """The end of one event store, as all who follow it in this process see it."""

    def __init__(self, read_after: ReadAfter, *, poll_seconds: float = 0.01) -> None:
        self._read_after = read_after
        self._poll_seconds = poll_seconds
        self._tail: Tail | None = None
        self._turn = AsyncTurn()

    def holds(self, position: int, epoch: int = 0) -> bool:
        """Whether what comes after the position is kept here."""
        tail = self._tail
        return tail is not None and tail.epoch == epoch and tail.floor <= position <= tail.ceiling

    def forget_above(self, head: int) -> None:
        """Let go of what is kept if all of it is above the end of the log, as somebody just found it.

        It is of another store, which had this name before; or the log has grown since, and who needs it reads it.
        """
        if self._tail is not None and self._tail.floor > head:
            self._tail = None

    async def after(
        self, position: int, *, epoch: int = 0, limit: int, seconds: float, max_bytes: int = MAX_BYTES
    ) -> Sequence[StoreEvent] | None:
        """The next events after a position; none: none came in time. None: they are no longer kept here.

        The position is not above the end of the log: nobody else could follow from there.
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
            if not await self._turn.take_unless(lambda: self._is_beyond(position, epoch), remaining):
                continue
            try:
                await self._read(position, epoch, deadline)
            finally:
                self._turn.give()

    def _is_beyond(self, position: int, epoch: int) -> bool:
        tail = self._tail
        return tail is not None and (tail.epoch > epoch or (tail.epoch == epoch and tail.ceiling > position))

    async def _read(self, position: int, epoch: int, deadline: float) -> None:
        """Read for all until something comes."""
        tail = self._tail
        if tail is not None and tail.epoch > epoch:
            return
        if tail is None or tail.epoch < epoch or tail.ceiling < position:
            # Nobody read for a while, and this reader found its way in the log itself. So will those behind it.
            tail = self._tail = Tail(position, position, epoch=epoch)
        wait = SHORTEST_WAIT_SECONDS
        while True:
            try:
                events = await self._read_after(tail.ceiling, BATCH_SIZE, epoch)
            except EpochChanged:
                self._tail = None
                raise
            if events:
                try:
                    self._tail = tail.extended(events)
                except OrderBroken:
                    # The next reader starts from the log, and not from what does not belong to it.
                    self._tail = None
                    raise
                return
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            await asyncio.sleep(min(wait, remaining))
            wait = min(wait * 2, self._poll_seconds)
