"""Following an event store live: one reader for all who follow it in this process.

Whoever waits for events and finds nobody reading reads for all, and stops when it has what it waited for. So there is
one reader however many follow, and none when nobody does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import (
    Awaitable,
    Callable,
    Sequence,
)

from headwater.errors import OrderBroken
from headwater.query import StoreEvent
from headwater.tail import MAX_BYTES, Tail
from headwater.turns import AsyncTurn

BATCH_SIZE = 1000
SHORTEST_WAIT_SECONDS = 0.001

StoreEvents = list[StoreEvent]
ReadAfter = Callable[[int, int], Awaitable[StoreEvents]]


class Feed:
    """The end of one event store, as all who follow it in this process see it."""

    def __init__(self, read_after: ReadAfter, *, poll_seconds: float = 0.01) -> None:
        self._read_after = read_after
        self._poll_seconds = poll_seconds
        self._tail: Tail | None = None
        self._turn = AsyncTurn()

    def holds(self, position: int) -> bool:
        """Whether what comes after the position is kept here."""
        tail = self._tail
        return tail is not None and tail.floor <= position <= tail.ceiling

    def forget_above(self, head: int) -> None:
        """Let go of what is kept if all of it is above the end of the log, as somebody just found it.

        It is of another store, which had this name before; or the log has grown since, and who needs it reads it.
        """
        if self._tail is not None and self._tail.floor > head:
            self._tail = None

    async def after(
        self, position: int, *, limit: int, seconds: float, max_bytes: int = MAX_BYTES
    ) -> Sequence[StoreEvent] | None:
        """The next events after a position; none: none came in time. None: they are no longer kept here.

        The position is not above the end of the log: nobody else could follow from there.
        """
        deadline = time.monotonic() + seconds
        while True:
            tail = self._tail
            if tail is not None and position < tail.floor:
                return None
            if tail is not None and position < tail.ceiling:
                return tail.after(position, limit, max_bytes)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return ()
            if not await self._turn.take_unless(lambda: self._is_beyond(position), remaining):
                continue
            try:
                await self._read(position, deadline)
            finally:
                self._turn.give()

    def _is_beyond(self, position: int) -> bool:
        return self._tail is not None and self._tail.ceiling > position

    async def _read(self, position: int, deadline: float) -> None:
        """Read for all until something comes."""
        tail = self._tail
        if tail is None or tail.ceiling < position:
            # Nobody read for a while, and this reader found its way in the log itself. So will those behind it.
            tail = self._tail = Tail(position, position)
        wait = SHORTEST_WAIT_SECONDS
        while True:
            events = await self._read_after(tail.ceiling, BATCH_SIZE)
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
