"""Calls for reading events and for cursors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

from headwater.calls.call import Call, Rows, nothing, only_value
from headwater.calls.encoding import checked_text
from headwater.errors import InvalidRequest
from headwater.log.model import Cursor, CursorState, Event

EVENT_COLUMNS = (
    "position, topic, partition, topic_offset, key, type, routing_key, headers, content_type, payload, "
    "event_id, published_at"
)
# Positions per segment; the same as headwater_internal.segment_size().
SEGMENT_SIZE: Final = 100_000_000
FEW_SEGMENTS: Final = 8


# Like Event._make, without its Python frame and its check of the number of columns.
_event: Callable[[tuple[Any, ...]], Event] = partial(tuple.__new__, Event)


def decode_events(rows: Rows) -> list[Event]:
    return list(map(_event, rows))


def topic_names(topics: Sequence[str] | None) -> list[str] | None:
    return None if topics is None else [checked_text(name, "topic name") for name in topics]


def read(
    topics: Sequence[str] | None,
    *,
    after: int | None = None,
    batch_size: int = 100,
    max_bytes: int = 16_777_216,
    up_to: int | None = None,
    skip_expired: bool = False,
    epoch: int | None = None,
) -> Call[list[Event]]:
    """Stable events after a position, of this epoch if one is given; topics=None: of the whole log."""
    return Call(
        f"select {EVENT_COLUMNS} from headwater.read(%s::text[], %s, %s, %s, %s, %s, %s)",
        (topic_names(topics), after, batch_size, max_bytes, up_to, skip_expired, epoch),
        decode_events,
    )


def read_stable(
    topics: Sequence[str] | None,
    *,
    after: int | None,
    stable: int,
    batch_size: int,
    max_bytes: int,
    gone_to: int,
    epoch: int | None = None,
) -> Call[list[Event]]:
    """Like read, for a caller that knows the stable position, its epoch, and the position up to which events are
    removed."""
    if topics is not None and len(topics) == 1:
        # A log of few segments is read with one cached plan; one of many, segment by segment.
        by_segment = "_by_segment" if stable > FEW_SEGMENTS * SEGMENT_SIZE else ""
        return Call(
            f"select {EVENT_COLUMNS} from headwater_internal.read_topic{by_segment}(%s, %s, %s, %s, %s, %s, %s)",
            (checked_text(topics[0], "topic name"), after, stable, batch_size, max_bytes, gone_to, epoch),
            decode_events,
        )
    return Call(
        f"select {EVENT_COLUMNS} from headwater_internal.read_stable(%s::text[], %s, %s, %s, %s, %s, %s)",
        (topic_names(topics), after, stable, batch_size, max_bytes, gone_to, epoch),
        decode_events,
    )


def read_backwards(
    topics: Sequence[str] | None,
    *,
    before: int | None = None,
    batch_size: int = 100,
    max_bytes: int = 16_777_216,
) -> Call[list[Event]]:
    """Stable events below a position, newest first."""
    return Call(
        f"select {EVENT_COLUMNS} from headwater.read_backwards(%s::text[], %s, %s, %s)",
        (topic_names(topics), before, batch_size, max_bytes),
        decode_events,
    )


def expired_to(topics: Sequence[str] | None) -> Call[int]:
    """The last position that retention has removed of any of these topics."""
    return Call("select headwater_internal.expired_to(%s::text[])", (topic_names(topics),), only_value)


def position_before(topics: Sequence[str] | None, at: datetime) -> Call[int]:
    """The position to read after in order to get every event published at that time or later."""
    if at.tzinfo is None:
        raise InvalidRequest("the time to read from must have a time zone")
    return Call("select headwater.position_before(%s::text[], %s)", (topic_names(topics), at), only_value)


def open_cursor(
    name: str, *, topics: Sequence[str] | None, start_after: int | None, holds_retention: bool | None = None
) -> Call[CursorState]:
    """Open a cursor; a missing one is created at `start_after`."""
    return Call(
        "select position, gone_to, topics from headwater.open_cursor(%s, %s::text[], %s, %s)",
        (checked_text(name, "cursor name"), topic_names(topics), start_after, holds_retention),
        lambda rows: _opened_cursor(*rows[0]),
    )


def _opened_cursor(position: int, gone_to: int, topics: Sequence[str] | None) -> CursorState:
    return CursorState(position, gone_to, None if topics is None else tuple(topics))


def find_cursor(name: str) -> Call[CursorState | None]:
    """The present state of a cursor; None if it does not exist."""
    return Call(
        "select position, gone_to, topics from headwater_internal.cursor where name = %s",
        (checked_text(name, "cursor name"),),
        lambda rows: _opened_cursor(*rows[0]) if rows else None,
    )


def advance_cursor(name: str, *, from_position: int, to_position: int, epoch: int | None = None) -> Call[None]:
    return Call(
        "select headwater.advance_cursor(%s, %s, %s, %s)",
        (checked_text(name, "cursor name"), from_position, to_position, epoch),
        nothing,
    )


def set_cursor(
    name: str,
    position: int,
    *,
    topics: Sequence[str] | None = None,
    holds_retention: bool | None = None,
    epoch: int | None = None,
) -> Call[None]:
    return Call(
        "select headwater.set_cursor(%s, %s, %s::text[], %s, %s)",
        (checked_text(name, "cursor name"), position, topic_names(topics), holds_retention, epoch),
        nothing,
    )


def delete_cursor(name: str) -> Call[bool]:
    return Call("select headwater.delete_cursor(%s)", (checked_text(name, "cursor name"),), only_value)


def cursors() -> Call[list[Cursor]]:
    return Call(
        "select name, position, topics, holds_retention, updated_at, lag_events, lag_is_more, oldest_unread_age "
        "from headwater.cursor_lag order by name",
        (),
        lambda rows: [Cursor(r[0], r[1], None if r[2] is None else tuple(r[2]), *r[3:]) for r in rows],
    )
