"""The last events of an event store, kept for everybody who follows it live. A value: reading it needs no lock."""

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
class Tail:
    """Every event after `floor` and up to `ceiling`. Whoever is below the floor must read the log itself.

    `bytes_before` has for each event how many bytes came before it, counted from some event on, and `bytes_to` how many
    to the end. Kept, since many ask, and to count the bytes of an event costs as much as to send it.
    """

    floor: int
    ceiling: int
    events: Sequence[StoreEvent] = ()
    bytes_before: Sequence[int] = ()
    bytes_to: int = 0
    # Which epoch the positions are of.
    epoch: int = 0

    def after(self, position: int, limit: int, max_bytes: int = MAX_BYTES) -> Sequence[StoreEvent]:
        """The next events for a reader that is between floor and ceiling; one of them whatever its size."""
        start = bisect_right(self.events, position, key=lambda event: event.position)
        if start == len(self.events):
            return ()
        stop = bisect_left(self.bytes_before, self.bytes_before[start] + max_bytes, lo=start + 1)
        return self.events[start : min(start + limit, stop)]

    def extended(
        self, events: Sequence[StoreEvent], *, max_events: int = MAX_EVENTS, max_bytes: int = MAX_BYTES
    ) -> Tail:
        """With events that come right after the ceiling. The oldest go where the tail would become too long."""
        if not events:
            return self
        last = self.events[-1] if self.events else None
        for event in events:
            if (last is not None and event.topic_offset != last.topic_offset + 1) or event.position <= self.ceiling:
                raise OrderBroken(
                    f"event {event.topic_offset} at position {event.position} came after "
                    f"{f'event {last.topic_offset}' if last is not None else f'position {self.ceiling}'}",
                    hint="An event store has no gaps. Were its events changed by hand?",
                )
            last = event
        kept = [*self.events, *events]
        *before, bytes_to = [*self.bytes_before, *accumulate(map(size_of, events), initial=self.bytes_to)]
        # Those after the first that is kept have fewer bytes than the limit.
        start = max(bisect_right(before, bytes_to - max_bytes) - 1, len(kept) - max_events, 0)
        floor = kept[start - 1].position if start else self.floor
        return Tail(floor, kept[-1].position, kept[start:], before[start:], bytes_to, self.epoch)
