"""Calls that read the log by ranges and write it in epochs, as Spark does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from headwater.calls.call import Call, Rows, nothing, only_value
from headwater.calls.encoding import checked_text
from headwater.calls.reading import decode_events, topic_names
from headwater.log.model import Event

STAGED_SCHEMA = "headwater_internal"
STAGED_TABLE = "staged"
"""The table where tasks stage the events that an epoch publishes."""

# Plain types, for drivers that support no others.
_SCANNED = (
    "position::bigint, topic::text, partition::integer, topic_offset::bigint, key::bytea, type::text, "
    "routing_key::text, headers::text, content_type::text, payload::bytea, event_id::text, published_at::timestamptz"
)


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters for the events of a range; None does not filter. A time range includes its start, not its end."""

    types: tuple[str, ...] | None = None
    keys: tuple[bytes, ...] | None = None
    published_from: datetime | None = None
    published_before: datetime | None = None


def scan(topics: Sequence[str] | None, *, after: int, up_to: int, filters: Filters | None = None) -> Call[list[Event]]:
    """All events after a position and up to a stable position, in order."""
    wanted = _wanted(after, up_to, filters or Filters())
    if topics is not None and len(topics) == 1:
        return Call(
            f"select {_SCANNED} from headwater_internal.scan_topic(%s, %s, %s, %s::text[], %s::bytea[], %s, %s)",
            (checked_text(topics[0], "topic name"), *wanted),
            decode_events,
        )
    return Call(
        f"select {_SCANNED} from headwater_internal.scan(%s::text[], %s, %s, %s::text[], %s::bytea[], %s, %s)",
        (topic_names(topics), *wanted),
        decode_events,
    )


def scan_columns(topic: str, *, after: int, up_to: int, filters: Filters | None = None) -> Call[Rows]:
    """Like scan for one topic, without the column of its name, which would be the same in every row."""
    columns = _SCANNED.replace("topic::text, ", "")
    return Call(
        f"select {columns} from headwater_internal.scan_topic(%s, %s, %s, %s::text[], %s::bytea[], %s, %s)",
        (checked_text(topic, "topic name"), *_wanted(after, up_to, filters or Filters())),
        lambda rows: rows,
    )


def _wanted(after: int, up_to: int, filters: Filters) -> tuple[Any, ...]:
    return (
        after,
        up_to,
        None if filters.types is None else list(filters.types),
        # As text, which can be formatted without a connection; bytes in an array cannot.
        None if filters.keys is None else [f"\\x{key.hex()}" for key in filters.keys],
        filters.published_from,
        filters.published_before,
    )


def refuse_expired(topics: Sequence[str] | None, *, after: int) -> Call[None]:
    """Raise PositionExpired if retention has removed events of these topics after the position."""
    return Call(
        "select headwater_internal.refuse_expired(%s::text[], %s::bigint)", (topic_names(topics), after), nothing
    )


def assigned_ranges(*, after: int, up_to: int) -> Call[list[tuple[int, int]]]:
    """The ranges of positions that were assigned, each as (after, up to)."""
    return Call(
        "select range_after, range_up_to from headwater_internal.assigned_ranges(%s, %s)",
        (after, up_to),
        lambda rows: [(row[0], row[1]) for row in rows],
    )


def batch_end(topics: Sequence[str] | None, *, after: int, stable: int, max_events: int | None) -> Call[int | None]:
    """The last position of a batch that starts after a position; None: there is no event for it."""
    return Call(
        "select headwater_internal.batch_end(%s::text[], %s, %s, %s)",
        (topic_names(topics), after, stable, max_events),
        only_value,
    )


def last_event_position(topics: Sequence[str] | None, *, up_to: int) -> Call[int]:
    """The position of the last event at or below a stable position; the position itself if retention has passed it."""
    return Call(
        "select headwater_internal.last_event_position(%s::text[], %s)", (topic_names(topics), up_to), only_value
    )


def last_common_event(topics: Sequence[str] | None, *, epoch: int, position: int) -> Call[int]:
    """The position of an event that was read in an epoch, or of the last event below it that the log still has."""
    return Call(
        "select headwater_internal.last_common_event(%s::text[], %s, %s)",
        (topic_names(topics), epoch, position),
        only_value,
    )


def publish_epoch(
    writer: str, epoch: int, *, attempts: Sequence[str], expected_events: int, replayable: bool
) -> Call[int | None]:
    """Publish the staged events of these attempts exactly once; returns their number, or None if they were published
    before."""
    return Call(
        "select headwater_internal.publish_epoch(%s, %s, %s::text[], %s, %s)",
        (checked_text(writer, "writer name"), epoch, list(attempts), expected_events, replayable),
        only_value,
    )


def discard_staged(writer: str, epoch: int, *, attempts: Sequence[str]) -> Call[None]:
    return Call(
        "select headwater_internal.discard_staged(%s, %s, %s::text[])",
        (checked_text(writer, "writer name"), epoch, list(attempts)),
        nothing,
    )
