"""A cache of the last events of an event store, shared by all its live subscribers. Immutable: reading needs no
lock."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from headwater.errors import OrderBroken
from headwater.eventstore.query import StoreEvent, size_of

MAX_EVENTS = 4096
MAX_BYTES = 16_777_216


@dataclass(frozen=True, slots=True)
class RecentEvents:
    """All events after `floor` and up to `ceiling`. A reader below the floor must read from the log itself.

    `bytes_before` has, for each event, the number of bytes before it, counted from an arbitrary event, and `bytes_to`
    the number up to the end. They are stored because counting the bytes of an event costs as much as sending it.
    """

    floor: int
    ceiling: int
    events: Sequence[StoreEvent] = ()
    bytes_before: Sequence[int] = ()
    bytes_to: int = 0
    # The epoch of the positions.
    epoch: int = 0

    def after(self, position: int, limit: int, max_bytes: int = MAX_BYTES) -> Sequence[StoreEvent]:
        """The next events for a reader between floor and ceiling; at least one, whatever its size."""
        start = bisect_right(self.events, position, key=lambda event: event.position)
        if start == len(self.events):
            return ()
        stop = bisect_left(self.bytes_before, self.bytes_before[start] + max_bytes, lo=start + 1)
        return self.events[start : min(start + limit, stop)]

    def extended(
        self, events: Sequence[StoreEvent], *, max_events: int = MAX_EVENTS, max_bytes: int = MAX_BYTES
    ) -> RecentEvents:
        """A new value with events that come right after the ceiling. Drops the oldest events above the limits."""
        if not events:
            return self
        last = self.events[-1] if self.events else None
        for event in events:
            if (last is not None and event.topic_offset != last.topic_offset + 1) or event.position <= self.ceiling:
                raise OrderBroken(
                    f"event {event.topic_offset} at position {event.position} came after "
                    f"{f'event {last.topic_offset}' if last is not None else f'position {self.ceiling}'}",
                    hint="An event store has no gaps: check whether its events were changed by hand.",
                )
            last = event
        cached = [*self.events, *events]
        *before, bytes_to = [*self.bytes_before, *accumulate(map(size_of, events), initial=self.bytes_to)]
        # The events after the first remaining one have fewer bytes than the limit.
        start = max(bisect_right(before, bytes_to - max_bytes) - 1, len(cached) - max_events, 0)
        floor = cached[start - 1].position if start else self.floor
        return RecentEvents(floor, cached[-1].position, cached[start:], before[start:], bytes_to, self.epoch)
