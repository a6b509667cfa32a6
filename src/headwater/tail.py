"""The last events of an event store, kept for everybody who follows it live. A value: reading it needs no lock."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.errors import OrderBroken
from headwater.query import StoreEvent

MAX_EVENTS = 4096
MAX_BYTES = 16_777_216


@dataclass(frozen=True, slots=True)
class Tail:
    """Every event after `floor` and up to `ceiling`. Whoever is below the floor must read the log itself."""

    floor: int
    ceiling: int
    events: Sequence[StoreEvent] = ()

    def after(self, position: int, limit: int) -> Sequence[StoreEvent]:
        """The next events for a reader that is between floor and ceiling."""
        start = bisect_right(self.events, position, key=lambda event: event.position)
        return self.events[start : start + limit]

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
        size, start = 0, len(kept)
        while start > 0 and len(kept) - start < max_events and size < max_bytes:
            start -= 1
            size += len(kept[start].payload or b"")
        return Tail(kept[start - 1].position if start else self.floor, kept[-1].position, kept[start:])
