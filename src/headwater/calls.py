"""Every SQL function of the log as a value: what to send, how to read the answer. The only file that names them.

Nothing here does I/O. `aio` and `client` carry the calls out.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Generic, LiteralString, TypeVar

import psycopg
from psycopg.adapt import Dumper
from psycopg.pq import Format

from headwater.errors import EventTooLarge, InvalidEvent
from headwater.model import (
    Cursor,
    Event,
    LogSettings,
    LogState,
    NewEvent,
    OpenedCursor,
    Payload,
    Publisher,
    Released,
    Scheduled,
    Topic,
    TopicOverview,
    Upkeep,
)
from headwater.schema import Installed

T = TypeVar("T")
Rows = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One round trip to the log: its SQL, its parameters, and what its rows mean."""

    sql: LiteralString
    params: tuple[Any, ...]
    decode: Callable[[Rows], T]


def _nothing(rows: Rows) -> None:
    return None


def _value(rows: Rows) -> Any:
    return rows[0][0]


# --- the log -------------------------------------------------------------------------------------------------


def installed() -> Call[Installed | None]:
    """What the database says of its schema. Fails with SchemaMismatch where there is none."""
    return Call(
        "select max(m.number), max(m.oldest_program), i.version, i.functions_checksum "
        "from headwater.migration m cross join headwater.installed i group by 3, 4",
        (),
        lambda rows: Installed(*rows[0]) if rows else None,
    )


def head() -> Call[int]:
    """The highest position drawn. Takes no snapshot, so it is cheap enough to poll."""
    return Call("select headwater.head()", (), _value)


def log_state() -> Call[LogState]:
    return Call("select drawn, settled from headwater.log_state()", (), lambda rows: LogState(*rows[0]))


def publishers_in_flight() -> Call[list[Publisher]]:
    return Call(
        "select pid, prepared, position_bound, user_name, application_name, state, began_at, age "
        "from headwater.publisher_in_flight order by position_bound",
        (),
        lambda rows: [Publisher(*row) for row in rows],
    )


def maintain() -> Call[Upkeep]:
    return Call(
        "select busy, coalesce(released, 0), coalesce(segments_made, 0), coalesce(segments_dropped, 0), "
        "coalesce(events_swept, 0) from headwater.maintain()",
        (),
        lambda rows: Upkeep(*rows[0]),
    )


def log_settings() -> Call[LogSettings]:
    return Call(
        "select segment_interval, segments_ahead, auto_create_topics from headwater.setting",
        (),
        lambda rows: LogSettings(*rows[0]),
    )


def change_log_settings(
    *,
    segment_interval: timedelta | None = None,
    segments_ahead: int | None = None,
    auto_create_topics: bool | None = None,
) -> Call[LogSettings]:
    """Change settings of the whole log; None leaves one as it is."""
    return Call(
        "update headwater.setting set segment_interval = coalesce(%s, segment_interval), "
        "segments_ahead = coalesce(%s, segments_ahead), auto_create_topics = coalesce(%s, auto_create_topics) "
        "returning segment_interval, segments_ahead, auto_create_topics",
        (segment_interval, segments_ahead, auto_create_topics),
        lambda rows: LogSettings(*rows[0]),
    )


# --- topics --------------------------------------------------------------------------------------------------

_TOPIC = "id, name, kind, partitions, retention, max_payload_bytes, max_header_bytes, created_at, expired_to"


def _topic(rows: Rows) -> Topic:
    return Topic(*rows[0])


def create_topic(
    name: str,
    *,
    kind: str = "open",
    partitions: int = 1,
    retention: timedelta | None = None,
    max_payload_bytes: int | None = None,
    max_header_bytes: int | None = None,
    if_missing: bool = False,
) -> Call[Topic]:
    return Call(
        f"select {_TOPIC} from headwater.create_topic(%s, %s, %s, %s, %s, %s, %s)",
        (
            _text(name, "topic name"),
            kind,
            partitions,
            retention,
            max_payload_bytes,
            max_header_bytes,
            if_missing,
        ),
        _topic,
    )


def alter_topic(
    name: str,
    *,
    partitions: int | None = None,
    retention: timedelta | None = None,
    keep_forever: bool = False,
    max_payload_bytes: int | None = None,
    max_header_bytes: int | None = None,
) -> Call[Topic]:
    return Call(
        f"select {_TOPIC} from headwater.alter_topic(%s, %s, %s, %s, %s, %s)",
        (_text(name, "topic name"), partitions, retention, max_payload_bytes, max_header_bytes, keep_forever),
        _topic,
    )


def delete_topic(name: str) -> Call[None]:
    return Call("select headwater.delete_topic(%s)", (_text(name, "topic name"),), _nothing)


def find_topic(name: str) -> Call[Topic]:
    return Call(f"select {_TOPIC} from headwater.find_topic(%s)", (_text(name, "topic name"),), _topic)


def topic_to_publish(name: str) -> Call[Topic]:
    """The topic, made now if it is missing and the log is set to make missing ones."""
    return Call(f"select {_TOPIC} from headwater.topic_to_publish(%s)", (_text(name, "topic name"),), _topic)


def topics() -> Call[list[TopicOverview]]:
    return Call(
        "select name, kind, partitions, retention, max_payload_bytes, max_header_bytes, created_at, expired_to, "
        "first_position, last_position, last_published_at from headwater.topic_overview order by name",
        (),
        lambda rows: [TopicOverview(*row) for row in rows],
    )


# --- publishing ----------------------------------------------------------------------------------------------

JSON_TYPE = "application/json"

# An escaped NUL that is not itself escaped: Postgres can hold no such JSON, so conditions could never see it.
_ESCAPED_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_encode_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def encode_payload(payload: Payload, content_type: str | None) -> tuple[bytes | None, str | None]:
    """A payload as bytes with its content type. Bytes stay as they are; anything else becomes JSON."""
    if payload is None:
        return None, content_type
    if isinstance(payload, (bytes, bytearray, memoryview)):
        encoded = bytes(payload)
        if content_type == JSON_TYPE:
            try:
                json.loads(encoded)
            except ValueError as error:
                raise InvalidEvent(f"the payload is not the JSON that its content type says: {error}") from None
            _refuse_nul(encoded)
        return encoded, content_type
    try:
        encoded = _encode_json(payload).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidEvent(
            f"the payload cannot be written as JSON: {error}", hint="Send JSON values, or bytes as they are."
        ) from None
    if b"\\u0000" in encoded:
        _refuse_nul(encoded)
    return encoded, content_type or JSON_TYPE


def _refuse_nul(encoded: bytes) -> None:
    if _ESCAPED_NUL.search(encoded):
        raise InvalidEvent("a JSON payload cannot hold the character NUL", hint="Send it as bytes instead.")


def encode_key(key: str | bytes | None) -> bytes | None:
    try:
        encoded = key.encode() if isinstance(key, str) else key
    except UnicodeEncodeError as error:
        raise InvalidEvent(f"the key is not text that UTF-8 can hold: {error}") from None
    if encoded is not None and len(encoded) > 65535:
        raise InvalidEvent(f"a key is up to 65535 bytes, this one has {len(encoded)}")
    return encoded


def encode_headers(headers: Mapping[str, Any] | None) -> str | None:
    if headers is None:
        return None
    try:
        encoded = _encode_json(headers)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidEvent(f"the headers cannot be written as JSON: {error}") from None
    if "\\u0000" in encoded:
        raise InvalidEvent("headers cannot hold the character NUL")
    return encoded


def _text(value: str, what: str) -> str:
    if "\x00" in value:
        raise InvalidEvent(f"a {what} cannot hold the character NUL")
    return value


def _optional_text(value: str | None, what: str) -> str | None:
    return None if value is None else _text(value, what)


def publish(
    topic: str,
    payload: Payload,
    *,
    key: str | bytes | None = None,
    type: str | None = None,
    routing_key: str | None = None,
    headers: Mapping[str, Any] | None = None,
    event_id: str | None = None,
    content_type: str | None = None,
    deliver_at: datetime | None = None,
) -> Call[int | None]:
    """One event. The answer is its position, or None if it waits for its time."""
    body, content_type = encode_payload(payload, content_type)
    return Call(
        "select headwater.publish_bytes(%s, %b, %b, %s, %s, %s::jsonb, %s, %s, %s)",
        (
            _text(topic, "topic name"),
            body,
            encode_key(key),
            _optional_text(type, "type"),
            _optional_text(routing_key, "routing key"),
            encode_headers(headers),
            _optional_text(content_type, "content type"),
            _optional_text(event_id, "event id"),
            deliver_at,
        ),
        _value,
    )


class PackedBytes(bytes):
    """A bytea[] already in Postgres' binary form: some thirty times cheaper than a list of parameters."""


class PackedText(bytes):
    """The same for text[]."""


class _PackedBytesDumper(Dumper):
    format = Format.BINARY
    oid = 1001

    def dump(self, obj: Any) -> bytes:
        return bytes(obj)


class _PackedTextDumper(_PackedBytesDumper):
    oid = 1009


psycopg.adapters.register_dumper(PackedBytes, _PackedBytesDumper)
psycopg.adapters.register_dumper(PackedText, _PackedTextDumper)

_LENGTH = struct.Struct("!i").pack
_NULL = _LENGTH(-1)


def _pack(values: Sequence[bytes | None], element_oid: int) -> bytes:
    parts = [struct.pack("!iIiii", 1, 1, element_oid, len(values), 1)]
    for value in values:
        if value is None:
            parts.append(_NULL)
        else:
            parts.append(_LENGTH(len(value)))
            parts.append(value)
    return b"".join(parts)


def _packed_bytes(values: Sequence[bytes | None]) -> PackedBytes | None:
    return PackedBytes(_pack(values, 17)) if any(value is not None for value in values) else None


def _packed_text(values: Sequence[str | None], what: str) -> PackedText | None:
    if not any(value is not None for value in values):
        return None
    return PackedText(_pack([None if v is None else _text(v, what).encode() for v in values], 25))


def publish_batch(topic: str, events: Sequence[NewEvent]) -> Call[list[int | None]]:
    """All of the events or none, in this order. The answer is their positions."""
    bodies = [encode_payload(event.payload, event.content_type) for event in events]
    partitions = [event.partition for event in events]
    return Call(
        "select headwater.publish_batch(%s, %b, %b, %b, %b, %b, %b, %b, %s::int[])",
        (
            _text(topic, "topic name"),
            PackedBytes(_pack([body for body, _ in bodies], 17)),
            _packed_bytes([encode_key(event.key) for event in events]),
            _packed_text([event.type for event in events], "type"),
            _packed_text([event.routing_key for event in events], "routing key"),
            _packed_text([encode_headers(event.headers) for event in events], "header"),
            _packed_text([content_type for _, content_type in bodies], "content type"),
            _packed_text([event.event_id for event in events], "event id"),
            partitions if any(partition is not None for partition in partitions) else None,
        ),
        _value,
    )


COPY_EVENTS: LiteralString = (
    "copy headwater.event (topic_id, key, type, routing_key, headers, content_type, payload) from stdin (format binary)"
)
COPY_START = b"PGCOPY\n\xff\r\n\x00" + struct.pack("!ii", 0, 0)
COPY_END = struct.pack("!h", -1)


def can_copy(topic: Topic, events: Iterable[NewEvent]) -> bool:
    """Whether events may go straight into the table: no offsets, lanes or ids to look after."""
    return (
        topic.kind == "open"
        and topic.partitions == 1
        and all(event.event_id is None and event.partition is None for event in events)
    )


def copy_rows(topic: Topic, events: Iterable[NewEvent]) -> bytes:
    """Events as rows of COPY_EVENTS. Refuses what the topic does not take, as publishing by call would."""
    start = struct.pack("!hii", 7, 4, topic.id)
    parts: list[bytes] = []
    for event in events:
        body, content_type = encode_payload(event.payload, event.content_type)
        headers = encode_headers(event.headers)
        if body is not None and len(body) > topic.max_payload_bytes:
            raise _too_large("a payload", len(body), topic.max_payload_bytes, topic)
        if headers is not None and len(headers) > topic.max_header_bytes:
            raise _too_large("headers", len(headers), topic.max_header_bytes, topic)
        parts.append(start)
        for value in (
            encode_key(event.key),
            _utf8(event.type, "type"),
            _utf8(event.routing_key, "routing key"),
            None if headers is None else b"\x01" + headers.encode(),
            _utf8(content_type, "content type"),
            body,
        ):
            if value is None:
                parts.append(_NULL)
            else:
                parts.append(_LENGTH(len(value)))
                parts.append(value)
    return b"".join(parts)


def _utf8(value: str | None, what: str) -> bytes | None:
    return None if value is None else _text(value, what).encode()


def _too_large(what: str, size: int, limit: int, topic: Topic) -> EventTooLarge:
    return EventTooLarge(
        f'{what} of {size} bytes is above the {limit} that topic "{topic.name}" takes',
        hint="Raise the limit: headwater topic alter.",
        detail={"bytes": size, "limit": limit},
    )


# --- scheduled events ----------------------------------------------------------------------------------------


def schedule(
    topic: str,
    payload: Payload,
    deliver_at: datetime,
    *,
    key: str | bytes | None = None,
    type: str | None = None,
    routing_key: str | None = None,
    headers: Mapping[str, Any] | None = None,
    event_id: str | None = None,
    content_type: str | None = None,
) -> Call[int | None]:
    """One event for later. The answer is its schedule id; None if its event id is in the log already."""
    body, content_type = encode_payload(payload, content_type)
    return Call(
        "select headwater.schedule_bytes(%s, %b, %s, %b, %s, %s, %s::jsonb, %s, %s)",
        (
            _text(topic, "topic name"),
            body,
            deliver_at,
            encode_key(key),
            _optional_text(type, "type"),
            _optional_text(routing_key, "routing key"),
            encode_headers(headers),
            _optional_text(content_type, "content type"),
            _optional_text(event_id, "event id"),
        ),
        _value,
    )


def scheduled(*, topic: str | None = None, batch_size: int = 100) -> Call[list[Scheduled]]:
    return Call(
        "select s.id, s.due_at, t.name, s.key, s.type, s.event_id "
        "from headwater.scheduled s join headwater.topic t on t.id = s.topic_id "
        "where %s::text is null or t.name = %s order by s.due_at, s.id limit %s",
        (topic, topic, batch_size),
        lambda rows: [Scheduled(*row) for row in rows],
    )


def cancel_scheduled(schedule_id: int) -> Call[bool]:
    return Call("select headwater.cancel_scheduled(%s)", (schedule_id,), _value)


def move_scheduled(schedule_id: int, deliver_at: datetime) -> Call[bool]:
    return Call("select headwater.move_scheduled(%s, %s)", (schedule_id, deliver_at), _value)


def release_due(*, batch_size: int = 1000) -> Call[Released]:
    return Call(
        "select released, next_due_seconds from headwater.release_due(%s)",
        (batch_size,),
        lambda rows: Released(*rows[0]),
    )


# --- reading -------------------------------------------------------------------------------------------------

_EVENT = (
    "position, topic, partition, topic_offset, key, type, routing_key, headers, content_type, payload, "
    "event_id, published_at"
)


def _events(rows: Rows) -> list[Event]:
    return list(map(Event._make, rows))


def _names(topics: Sequence[str] | None) -> list[str] | None:
    return None if topics is None else [_text(name, "topic name") for name in topics]


def read(
    topics: Sequence[str] | None,
    *,
    after: int | None = None,
    batch_size: int = 100,
    max_bytes: int = 16_777_216,
    up_to: int | None = None,
    skip_expired: bool = False,
) -> Call[list[Event]]:
    """Settled events after a position; no topics: of the whole log."""
    return Call(
        f"select {_EVENT} from headwater.read(%s::text[], %s, %s, %s, %s, %s)",
        (_names(topics), after, batch_size, max_bytes, up_to, skip_expired),
        _events,
    )


def read_settled(
    topics: Sequence[str] | None,
    *,
    after: int | None,
    settled: int,
    batch_size: int,
    max_bytes: int,
    gone_to: int,
) -> Call[list[Event]]:
    """The same for a caller that knows how far the log is settled, and up to where it is gone."""
    return Call(
        f"select {_EVENT} from headwater.read_settled(%s::text[], %s, %s, %s, %s, %s)",
        (_names(topics), after, settled, batch_size, max_bytes, gone_to),
        _events,
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
        f"select {_EVENT} from headwater.read_backwards(%s::text[], %s, %s, %s)",
        (_names(topics), before, batch_size, max_bytes),
        _events,
    )


def expired_to(topics: Sequence[str] | None) -> Call[int]:
    """The last position that retention took of any of these topics."""
    return Call("select headwater.expired_to(%s::text[])", (_names(topics),), _value)


def position_before(topics: Sequence[str] | None, at: datetime) -> Call[int]:
    """The position to read after in order to get every event published at that time or later."""
    return Call("select headwater.position_before(%s::text[], %s)", (_names(topics), at), _value)


# --- cursors -------------------------------------------------------------------------------------------------


def open_cursor(
    name: str, *, topics: Sequence[str] | None, start_after: int | None, must_not_lose: bool | None = None
) -> Call[OpenedCursor]:
    """A cursor; made at `start_after` if there is none."""
    return Call(
        "select position, gone_to from headwater.open_cursor(%s, %s::text[], %s, %s)",
        (_text(name, "cursor name"), _names(topics), start_after, must_not_lose),
        lambda rows: OpenedCursor(*rows[0]),
    )


def advance_cursor(name: str, *, from_position: int, to_position: int) -> Call[None]:
    return Call(
        "select headwater.advance_cursor(%s, %s, %s)",
        (_text(name, "cursor name"), from_position, to_position),
        _nothing,
    )


def set_cursor(
    name: str,
    position: int,
    *,
    topics: Sequence[str] | None = None,
    must_not_lose: bool | None = None,
) -> Call[None]:
    return Call(
        "select headwater.set_cursor(%s, %s, %s::text[], %s)",
        (_text(name, "cursor name"), position, _names(topics), must_not_lose),
        _nothing,
    )


def delete_cursor(name: str) -> Call[bool]:
    return Call("select headwater.delete_cursor(%s)", (_text(name, "cursor name"),), _value)


def cursors() -> Call[list[Cursor]]:
    return Call(
        "select name, position, topics, must_not_lose, updated_at, positions_behind, oldest_unread_age "
        "from headwater.cursor_lag order by name",
        (),
        lambda rows: [Cursor(r[0], r[1], None if r[2] is None else tuple(r[2]), *r[3:]) for r in rows],
    )
