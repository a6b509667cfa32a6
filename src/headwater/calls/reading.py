"""Calls that read events and keep cursors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

from headwater.calls.call import Call, Rows, nothing, only_value
from headwater.calls.encoding import checked_text
from headwater.errors import InvalidRequest
from headwater.model import (
    Cursor,
    Event,
    OpenedCursor,
)

EVENT_COLUMNS = (
    "position, topic, partition, topic_offset, key, type, routing_key, headers, content_type, payload, "
    "event_id, published_at"
)
# How many positions a segment holds, as headwater.segment_size() says.
SEGMENT_SIZE: Final = 100_000_000
FEW_SEGMENTS: Final = 8


# What Event._make does, less its frame in Python and its counting of columns.
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
    """Settled events after a position, which is of this epoch if one is given; no topics: of the whole log."""
    return Call(
        f"select {EVENT_COLUMNS} from headwater.read(%s::text[], %s, %s, %s, %s, %s, %s)",
        (topic_names(topics), after, batch_size, max_bytes, up_to, skip_expired, epoch),
        decode_events,
    )


def read_settled(
    topics: Sequence[str] | None,
    *,
    after: int | None,
    settled: int,
    batch_size: int,
    max_bytes: int,
    gone_to: int,
    epoch: int | None = None,
) -> Call[list[Event]]:
    """The same for a caller that knows how far the log is settled, in which epoch, and up to where it is gone."""
    if topics is not None and len(topics) == 1:
        # A log of a few segments is read with one plan that is kept; of many, segment by segment.
        by_segment = "_by_segment" if settled > FEW_SEGMENTS * SEGMENT_SIZE else ""
        return Call(
            f"select {EVENT_COLUMNS} from headwater.read_topic{by_segment}(%s, %s, %s, %s, %s, %s, %s)",
            (checked_text(topics[0], "topic name"), after, settled, batch_size, max_bytes, gone_to, epoch),
            decode_events,
        )
    return Call(
        f"select {EVENT_COLUMNS} from headwater.read_settled(%s::text[], %s, %s, %s, %s, %s, %s)",
        (topic_names(topics), after, settled, batch_size, max_bytes, gone_to, epoch),
        decode_events,
    )


def read_backwards(
    topics: Sequence[str] | None,
    *,
    before: int | None = None,
    batch_size: int = 100,
    max_bytes: int = 16_777_216,
) -> Call[list[Event]]:
    """Settled events below a position, newest first."""
    return Call(
        f"select {EVENT_COLUMNS} from headwater.read_backwards(%s::text[], %s, %s, %s)",
        (topic_names(topics), before, batch_size, max_bytes),
        decode_events,
    )


def expired_to(topics: Sequence[str] | None) -> Call[int]:
    """The last position that retention took of any of these topics."""
    return Call("select headwater.expired_to(%s::text[])", (topic_names(topics),), only_value)


def position_before(topics: Sequence[str] | None, at: datetime) -> Call[int]:
    """The position to read after in order to get every event published at that time or later."""
    if at.tzinfo is None:
        raise InvalidRequest("a time to read from needs a time zone")
    return Call("select headwater.position_before(%s::text[], %s)", (topic_names(topics), at), only_value)


def open_cursor(
    name: str, *, topics: Sequence[str] | None, start_after: int | None, must_not_lose: bool | None = None
) -> Call[OpenedCursor]:
    """A cursor; made at `start_after` if there is none."""
    return Call(
        "select position, gone_to, topics from headwater.open_cursor(%s, %s::text[], %s, %s)",
        (checked_text(name, "cursor name"), topic_names(topics), start_after, must_not_lose),
        lambda rows: _opened_cursor(*rows[0]),
    )


def _opened_cursor(position: int, gone_to: int, topics: Sequence[str] | None) -> OpenedCursor:
    return OpenedCursor(position, gone_to, None if topics is None else tuple(topics))


def find_cursor(name: str) -> Call[OpenedCursor | None]:
    """Where a cursor stands now; None if there is none."""
    return Call(
        "select position, gone_to, topics from headwater.cursor where name = %s",
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
    must_not_lose: bool | None = None,
    epoch: int | None = None,
) -> Call[None]:
    return Call(
        "select headwater.set_cursor(%s, %s, %s::text[], %s, %s)",
        (checked_text(name, "cursor name"), position, topic_names(topics), must_not_lose, epoch),
        nothing,
    )


def delete_cursor(name: str) -> Call[bool]:
    return Call("select headwater.delete_cursor(%s)", (checked_text(name, "cursor name"),), only_value)


def cursors() -> Call[list[Cursor]]:
    return Call(
        "select name, position, topics, must_not_lose, updated_at, lag_events, lag_is_more, oldest_unread_age "
        "from headwater.cursor_lag order by name",
        (),
        lambda rows: [Cursor(r[0], r[1], None if r[2] is None else tuple(r[2]), *r[3:]) for r in rows],
    )
