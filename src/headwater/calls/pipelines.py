"""Calls that read the log by ranges and write it in epochs, as Spark does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from headwater.calls.call import Call, Rows, nothing, only_value
from headwater.calls.encoding import checked_text
from headwater.calls.reading import decode_events, topic_names
from headwater.model import Event

STAGED_SCHEMA = "headwater"
STAGED_TABLE = "staged"
"""Where tasks put events that an epoch will publish."""

# Plain types, for drivers that know no others.
_SCANNED = (
    "position::bigint, topic::text, partition::integer, topic_offset::bigint, key::bytea, type::text, "
    "routing_key::text, headers::text, content_type::text, payload::bytea, event_id::text, published_at::timestamptz"
)


@dataclass(frozen=True, slots=True)
class Conditions:
    """Which events of a range are wanted; None asks nothing. A time range includes its start, not its end."""

    types: tuple[str, ...] | None = None
    keys: tuple[bytes, ...] | None = None
    published_from: datetime | None = None
    published_before: datetime | None = None


def scan(
    topics: Sequence[str] | None, *, after: int, up_to: int, conditions: Conditions | None = None
) -> Call[list[Event]]:
    """All events after a position and up to one that is known to be settled, in order."""
    wanted = _wanted(after, up_to, conditions or Conditions())
    if topics is not None and len(topics) == 1:
        return Call(
            f"select {_SCANNED} from headwater.scan_topic(%s, %s, %s, %s::text[], %s::bytea[], %s, %s)",
            (checked_text(topics[0], "topic name"), *wanted),
            decode_events,
        )
    return Call(
        f"select {_SCANNED} from headwater.scan(%s::text[], %s, %s, %s::text[], %s::bytea[], %s, %s)",
        (topic_names(topics), *wanted),
        decode_events,
    )


def scan_columns(topic: str, *, after: int, up_to: int, conditions: Conditions | None = None) -> Call[Rows]:
    """The same of one topic, without its name: whoever reads a million rows need not be told it a million times."""
    columns = _SCANNED.replace("topic::text, ", "")
    return Call(
        f"select {columns} from headwater.scan_topic(%s, %s, %s, %s::text[], %s::bytea[], %s, %s)",
        (checked_text(topic, "topic name"), *_wanted(after, up_to, conditions or Conditions())),
        lambda rows: rows,
    )


def _wanted(after: int, up_to: int, asked: Conditions) -> tuple[Any, ...]:
    return (
        after,
        up_to,
        None if asked.types is None else list(asked.types),
        # As text, which can be written out without a connection; bytes in an array cannot.
        None if asked.keys is None else [f"\\x{key.hex()}" for key in asked.keys],
        asked.published_from,
        asked.published_before,
    )


def refuse_expired(topics: Sequence[str] | None, *, after: int) -> Call[None]:
    """PositionExpired if retention took events of these topics after that position."""
    return Call("select headwater.refuse_expired(%s::text[], %s::bigint)", (topic_names(topics), after), nothing)


def drawn_ranges(*, after: int, up_to: int) -> Call[list[tuple[int, int]]]:
    """The ranges of positions that were drawn at all, each as (after, up to)."""
    return Call(
        "select range_after, range_up_to from headwater.drawn_ranges(%s, %s)",
        (after, up_to),
        lambda rows: [(row[0], row[1]) for row in rows],
    )


def batch_end(topics: Sequence[str] | None, *, after: int, settled: int, max_events: int | None) -> Call[int | None]:
    """The last event of a batch that starts after a position; None: there is no event for it."""
    return Call(
        "select headwater.batch_end(%s::text[], %s, %s, %s)",
        (topic_names(topics), after, settled, max_events),
        only_value,
    )


def last_event_position(topics: Sequence[str] | None, *, up_to: int) -> Call[int]:
    """The last event at or below a stable position; the position itself where retention has passed it."""
    return Call("select headwater.last_event_position(%s::text[], %s)", (topic_names(topics), up_to), only_value)


def last_common_event(topics: Sequence[str] | None, *, epoch: int, position: int) -> Call[int]:
    """An event that was read in an epoch, or the last one below it that the log still has; both as positions."""
    return Call(
        "select headwater.last_common_event(%s::text[], %s, %s)", (topic_names(topics), epoch, position), only_value
    )


def publish_epoch(
    writer: str, epoch: int, *, attempts: Sequence[str], expected_events: int, replayable: bool
) -> Call[int | None]:
    """Publish what attempts have staged, once; the answer is how many events, None if it was done before."""
    return Call(
        "select headwater.publish_epoch(%s, %s, %s::text[], %s, %s)",
        (checked_text(writer, "writer name"), epoch, list(attempts), expected_events, replayable),
        only_value,
    )


def discard_staged(writer: str, epoch: int, *, attempts: Sequence[str]) -> Call[None]:
    return Call(
        "select headwater.discard_staged(%s, %s, %s::text[])",
        (checked_text(writer, "writer name"), epoch, list(attempts)),
        nothing,
    )
