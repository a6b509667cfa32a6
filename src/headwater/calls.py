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
from functools import partial
from typing import Any, Generic, LiteralString, TypeVar

import psycopg
from psycopg.adapt import Dumper
from psycopg.pq import Format

from headwater.errors import EventTooLarge, InvalidEvent, InvalidRequest
from headwater.model import (
    Binding,
    ClaimedEvent,
    Cursor,
    Dead,
    DeadLetter,
    Delivery,
    DuePeriodic,
    Event,
    Group,
    GroupOverview,
    Lease,
    LogSettings,
    LogState,
    MatchedEvent,
    NewEvent,
    OpenedCursor,
    Outcome,
    Payload,
    Periodic,
    Publisher,
    Reading,
    Released,
    Retry,
    Scheduled,
    Snooze,
    Subscription,
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
    return _text(encoded, "header")


def _text(value: str, what: str) -> str:
    if "\x00" in value:
        raise InvalidEvent(f"a {what} cannot hold the character NUL")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidEvent(f"a {what} is text that UTF-8 can hold: {error}") from None
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
        headers = _utf8(encode_headers(event.headers), "header")
        if body is not None and len(body) > topic.max_payload_bytes:
            raise _too_large("a payload", len(body), topic.max_payload_bytes, topic)
        if headers is not None and len(headers) > topic.max_header_bytes:
            raise _too_large("headers", len(headers), topic.max_header_bytes, topic)
        parts.append(start)
        for value in (
            encode_key(event.key),
            _utf8(event.type, "type"),
            _utf8(event.routing_key, "routing key"),
            None if headers is None else b"\x01" + headers,
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


# --- periodic events -----------------------------------------------------------------------------------------


def set_periodic(
    name: str,
    cron: str,
    topic: str,
    payload: Payload,
    *,
    next_at: datetime,
    time_zone: str = "UTC",
    key: str | bytes | None = None,
    type: str | None = None,
    routing_key: str | None = None,
    headers: Mapping[str, Any] | None = None,
    content_type: str | None = None,
) -> Call[None]:
    """Declare an event that is published at the times of a cron expression."""
    body, content_type = encode_payload(payload, content_type)
    return Call(
        "select headwater.set_periodic(%s, %s, %s, %s, %s, %b, %b, %s, %s, %s::jsonb, %s)",
        (
            _text(name, "schedule name"),
            cron,
            time_zone,
            _text(topic, "topic name"),
            next_at,
            body,
            encode_key(key),
            _optional_text(type, "type"),
            _optional_text(routing_key, "routing key"),
            encode_headers(headers),
            _optional_text(content_type, "content type"),
        ),
        _nothing,
    )


def due_periodics() -> Call[list[DuePeriodic]]:
    return Call(
        "select name, cron, time_zone, due_at from headwater.due_periodics()",
        (),
        lambda rows: [DuePeriodic(*row) for row in rows],
    )


def fire_periodic(name: str, *, due_at: datetime, next_at: datetime) -> Call[bool]:
    """Publish a periodic event; False if another process did."""
    return Call("select headwater.fire_periodic(%s, %s, %s)", (name, due_at, next_at), _value)


def pause_periodic(name: str, *, paused: bool) -> Call[bool]:
    return Call("select headwater.pause_periodic(%s, %s)", (_text(name, "schedule name"), paused), _value)


def delete_periodic(name: str) -> Call[bool]:
    return Call("select headwater.delete_periodic(%s)", (_text(name, "schedule name"),), _value)


def periodics() -> Call[list[Periodic]]:
    return Call(
        "select p.name, p.cron, p.time_zone, t.name, p.next_at, p.last_at, p.paused "
        "from headwater.periodic p join headwater.topic t on t.id = p.topic_id order by p.name",
        (),
        lambda rows: [Periodic(*row) for row in rows],
    )


# --- reading -------------------------------------------------------------------------------------------------

_EVENT = (
    "position, topic, partition, topic_offset, key, type, routing_key, headers, content_type, payload, "
    "event_id, published_at"
)


# What Event._make does, less its frame in Python and its counting of columns.
_event: Callable[[tuple[Any, ...]], Event] = partial(tuple.__new__, Event)


def _events(rows: Rows) -> list[Event]:
    return list(map(_event, rows))


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
    if topics is not None and len(topics) == 1:
        return Call(
            f"select {_EVENT} from headwater.read_topic(%s, %s, %s, %s, %s, %s)",
            (_text(topics[0], "topic name"), after, settled, batch_size, max_bytes, gone_to),
            _events,
        )
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
    if at.tzinfo is None:
        raise InvalidRequest("a time to read from needs a time zone")
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


def find_cursor(name: str) -> Call[OpenedCursor | None]:
    """Where a cursor stands now; None if there is none."""
    return Call(
        "select position, gone_to from headwater.cursor where name = %s",
        (_text(name, "cursor name"),),
        lambda rows: OpenedCursor(*rows[0]) if rows else None,
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


# --- groups --------------------------------------------------------------------------------------------------

_GROUP = (
    "name, start_position, lease_seconds, max_attempts, backoff_seconds, backoff_factor, backoff_max_seconds, "
    "backoff_jitter, ordered_keys, max_in_flight, must_not_lose, paused_at is not null, created_at"
)


def _group(rows: Rows) -> Group:
    return Group(*rows[0])


def create_group(
    name: str,
    *,
    topics: Sequence[str] | None = None,
    start_position: int | None = None,
    lease_seconds: float | None = None,
    max_attempts: int | None = None,
    backoff_seconds: float | None = None,
    backoff_factor: float | None = None,
    backoff_max_seconds: float | None = None,
    backoff_jitter: float | None = None,
    ordered_keys: bool | None = None,
    max_in_flight: int | None = None,
    must_not_lose: bool | None = None,
    if_missing: bool = False,
) -> Call[Group]:
    return Call(
        f"select {_GROUP} from headwater.create_group(%s, %s::text[], %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
        (
            _text(name, "group name"),
            _names(topics),
            start_position,
            lease_seconds,
            max_attempts,
            backoff_seconds,
            backoff_factor,
            backoff_max_seconds,
            backoff_jitter,
            ordered_keys,
            max_in_flight,
            must_not_lose,
            if_missing,
        ),
        _group,
    )


def alter_group(
    name: str,
    *,
    lease_seconds: float | None = None,
    max_attempts: int | None = None,
    backoff_seconds: float | None = None,
    backoff_factor: float | None = None,
    backoff_max_seconds: float | None = None,
    backoff_jitter: float | None = None,
    max_in_flight: int | None = None,
    must_not_lose: bool | None = None,
) -> Call[Group]:
    """Change settings; None leaves one as it is, max_in_flight=0 removes the limit."""
    return Call(
        f"select {_GROUP} from headwater.alter_group(%s, %s, %s, %s, %s, %s, %s, %s, %s)",
        (
            _text(name, "group name"),
            lease_seconds,
            max_attempts,
            backoff_seconds,
            backoff_factor,
            backoff_max_seconds,
            backoff_jitter,
            max_in_flight,
            must_not_lose,
        ),
        _group,
    )


def find_group(name: str) -> Call[Group]:
    return Call(f"select {_GROUP} from headwater.find_group(%s)", (_text(name, "group name"),), _group)


def groups() -> Call[list[GroupOverview]]:
    return Call(
        "select name, paused, frontier, ready, ready_is_more, positions_behind, processing, retrying, dead, done, "
        "ordered_keys, max_attempts, lease_seconds, max_in_flight, must_not_lose, created_at "
        "from headwater.group_overview order by name",
        (),
        lambda rows: [GroupOverview(*row) for row in rows],
    )


def pause_group(name: str) -> Call[None]:
    return Call("select headwater.pause_group(%s)", (_text(name, "group name"),), _nothing)


def resume_group(name: str) -> Call[None]:
    return Call("select headwater.resume_group(%s)", (_text(name, "group name"),), _nothing)


def delete_group(name: str) -> Call[bool]:
    return Call("select headwater.delete_group(%s)", (_text(name, "group name"),), _value)


def rewind_group(name: str, position: int) -> Call[None]:
    return Call("select headwater.rewind_group(%s, %s)", (_text(name, "group name"), position), _nothing)


def bind(
    group: str,
    *,
    topic: str | None = None,
    pattern: str | None = None,
    headers: Mapping[str, Any] | None = None,
    type: str | None = None,
    from_position: int | None = None,
) -> Call[Binding]:
    return Call(
        "select b.id, %s, t.name, b.type, b.pattern, b.headers, b.from_position, b.to_position "
        "from headwater.bind(%s, %s, %s, %s::jsonb, %s, %s) b left join headwater.topic t on t.id = b.topic_id",
        (
            group,
            _text(group, "group name"),
            _optional_text(topic, "topic name"),
            _optional_text(pattern, "pattern"),
            encode_headers(headers),
            _optional_text(type, "type"),
            from_position,
        ),
        lambda rows: Binding(*rows[0]),
    )


def unbind(group: str, binding_id: int, *, to_position: int | None = None) -> Call[int]:
    """End a binding; the answer is the last position that it still takes."""
    return Call("select headwater.unbind(%s, %s, %s)", (_text(group, "group name"), binding_id, to_position), _value)


def bindings(group: str) -> Call[list[Binding]]:
    return Call(
        "select b.id, g.name, t.name, b.type, b.pattern, b.headers, b.from_position, b.to_position "
        "from headwater.find_group(%s) g join headwater.binding b on b.group_id = g.id "
        "left join headwater.topic t on t.id = b.topic_id order by b.id",
        (_text(group, "group name"),),
        lambda rows: [Binding(*row) for row in rows],
    )


_CLAIMED = "token, attempt, alone, expires_at, " + _EVENT


def _lease(group: str) -> Callable[[Rows], Lease | None]:
    def decode(rows: Rows) -> Lease | None:
        if not rows:
            return None
        events = tuple(map(ClaimedEvent._make, rows))
        return Lease(group, events[0].token, events[0].expires_at, events)

    return decode


def claim(
    group: str, *, worker: str, batch_size: int, lease_seconds: float | None = None, relaxed: bool = False
) -> Call[Lease | None]:
    """A lease on up to `batch_size` events, or None. `relaxed` only where the call is a transaction by itself."""
    return Call(
        f"select {_CLAIMED} from headwater.claim(%s, %s, %s, %s, %s)",
        (_text(group, "group name"), _text(worker, "worker name"), batch_size, lease_seconds, relaxed),
        _lease(group),
    )


Outcomes = Mapping[int, Outcome]
"""How the events of a lease ended, by position."""


def _verdicts(outcomes: Outcomes) -> tuple[Any, ...]:
    """Outcomes as four arrays; all null where nothing is to be said."""
    if not outcomes:
        return None, None, None, None
    ends = [_verdict(outcome) for outcome in outcomes.values()]
    verdicts = [verdict for verdict, _, _ in ends]
    errors = [None if error is None else error.replace("\x00", "\ufffd")[:10000] for _, error, _ in ends]
    delays = [None if after is None else after.total_seconds() for _, _, after in ends]
    return list(outcomes), verdicts, errors, delays


def _verdict(outcome: Outcome) -> tuple[str, str | None, timedelta | None]:
    match outcome:
        case None:
            return "done", None, None
        case Retry():
            return "retry", outcome.reason, outcome.after
        case Dead():
            return "dead", outcome.reason, None
        case Snooze():
            return "release", None, outcome.after


def settle(lease: Lease, outcomes: Outcomes, *, rest_done: bool, relaxed: bool = False) -> Call[None]:
    """Say how events of a lease ended. `rest_done`: those not named are done, and the lease ends."""
    return Call(
        "select headwater.settle(%s, %s, %s::bigint[], %s::text[], %s::text[], %s::float8[], %s, %s)",
        (lease.group, lease.token, *_verdicts(outcomes), rest_done, relaxed),
        _nothing,
    )


def settle_and_claim(
    lease: Lease,
    outcomes: Outcomes,
    *,
    worker: str,
    batch_size: int,
    lease_seconds: float | None = None,
    relaxed: bool = True,
) -> Call[Lease | None]:
    """End a lease, its events done but for the outcomes named, and claim the next batch in the same trip."""
    return Call(
        f"select {_CLAIMED} from headwater.settle_and_claim"
        "(%s, %s, %s, %s, %s, %s::bigint[], %s::text[], %s::text[], %s::float8[], %s)",
        (lease.group, worker, batch_size, lease_seconds, lease.token, *_verdicts(outcomes), relaxed),
        _lease(lease.group),
    )


def extend_lease(lease: Lease, *, lease_seconds: float | None = None) -> Call[datetime]:
    """Keep a lease; the answer is when it ends now."""
    return Call("select headwater.extend_lease(%s, %s, %s)", (lease.group, lease.token, lease_seconds), _value)


def reap(group: str) -> Call[int]:
    """Give events of leases that ran out to others; the answer is how many."""
    return Call("select headwater.reap(%s)", (group,), _value)


def deliveries(group: str, *, status: str | None = None, after: int = 0, batch_size: int = 100) -> Call[list[Delivery]]:
    return Call(
        "select group_name, position, topic, status, attempts, run_at, leased_until, worker, last_error "
        "from headwater.delivery where group_name = %s and position > %s and (%s::text is null or status = %s) "
        "order by position limit %s",
        (group, after, status, status, batch_size),
        lambda rows: [Delivery(*row) for row in rows],
    )


def dead_letters(
    group: str,
    *,
    positions: Sequence[int] | None = None,
    topic: str | None = None,
    error_like: str | None = None,
    after: int = 0,
    batch_size: int = 100,
) -> Call[list[DeadLetter]]:
    return Call(
        "select position, topic_name, key, type, attempts, last_error, history, died_at "
        "from headwater.dead_letters(%s, %s::bigint[], %s, %s, %s, %s)",
        (group, None if positions is None else list(positions), topic, error_like, after, batch_size),
        lambda rows: [DeadLetter(*row[:6], tuple(row[6]), row[7]) for row in rows],  # type: ignore[call-arg]
    )


def redrive(
    group: str,
    *,
    positions: Sequence[int] | None = None,
    topic: str | None = None,
    error_like: str | None = None,
) -> Call[int]:
    """Give dead letters a fresh set of tries; the answer is how many."""
    return Call(
        "select headwater.redrive(%s, %s::bigint[], %s, %s)",
        (group, None if positions is None else list(positions), topic, error_like),
        _value,
    )


def discard(
    group: str,
    *,
    positions: Sequence[int] | None = None,
    topic: str | None = None,
    error_like: str | None = None,
) -> Call[int]:
    """Drop dead letters for good; the answer is how many."""
    return Call(
        "select headwater.discard(%s, %s::bigint[], %s, %s)",
        (group, None if positions is None else list(positions), topic, error_like),
        _value,
    )


# --- subscriptions -------------------------------------------------------------------------------------------


def subscribe(
    group: str,
    condition: str,
    params: Mapping[str, Any] | None = None,
    *,
    expires_after: timedelta | None = None,
    from_position: int | None = None,
    topics: Sequence[str] | None = None,
) -> Call[int]:
    """Subscribe a group to events that fulfil a condition; the answer is the subscription's id."""
    return Call(
        "select id from headwater.subscribe(%s, %s, %s::jsonb, %s, %s, %s::text[])",
        (
            _text(group, "group name"),
            _text(condition, "condition"),
            encode_headers(params or {}),
            expires_after,
            from_position,
            _names(topics),
        ),
        _value,
    )


def unsubscribe(subscription_id: int) -> Call[bool]:
    return Call("select headwater.unsubscribe(%s)", (subscription_id,), _value)


def keep_subscriptions(subscription_ids: Sequence[int]) -> Call[None]:
    return Call("select headwater.keep_subscriptions(%s::bigint[])", (list(subscription_ids),), _nothing)


def subscriptions(group: str | None = None, *, batch_size: int = 1000) -> Call[list[Subscription]]:
    return Call(
        "select s.id, g.name, c.expression, s.params, s.from_position, s.expires_after, s.last_active_at, "
        "s.created_at, c.broken_at is not null, c.last_error from headwater.subscription s "
        "join headwater.consumer_group g on g.id = s.group_id join headwater.condition c on c.id = s.condition_id "
        "where %s::text is null or g.name = %s order by s.id limit %s",
        (group, group, batch_size),
        lambda rows: [Subscription(*row) for row in rows],
    )


def read_next(
    group: str,
    *,
    reader: str,
    after: int | None = None,
    batch_size: int = 100,
    lease_seconds: float = 30.0,
    peek: bool = False,
) -> Call[Reading]:
    """The next events of a group with the subscriptions that each one matches."""

    def decode(rows: Rows) -> Reading:
        return Reading(
            rows[-1][0],
            tuple(MatchedEvent(tuple(row[1]), row[2], row[3], row[4], Event._make(row[5:])) for row in rows[:-1]),
        )

    return Call(
        f"select next_position, subscription_ids, retry_id, handler, attempt, {_EVENT} "
        "from headwater.read_next(%s, %s, %s, %s, %s, %s)",
        (_text(group, "group name"), _text(reader, "reader name"), after, batch_size, lease_seconds, peek),
        decode,
    )


def set_reading(group: str, position: int, *, reader: str, release: bool = False) -> Call[None]:
    return Call("select headwater.set_reading(%s, %s, %s, %s)", (group, reader, position, release), _nothing)


def retry_later(
    group: str,
    subscription_id: int,
    *,
    handler: str,
    position: int,
    attempt: int,
    delay_seconds: float | None = None,
    error: str | None = None,
) -> Call[bool]:
    """Have one handler of one subscription get an event again; False if its tries are used up."""
    return Call(
        "select headwater.retry_later(%s, %s, %s, %s, %s, %s, %s)",
        (
            group,
            subscription_id,
            handler,
            position,
            attempt,
            delay_seconds,
            None if error is None else error.replace("\x00", "\ufffd")[:10000],
        ),
        _value,
    )


def finish_retry(retry_id: int) -> Call[bool]:
    return Call("select headwater.finish_retry(%s)", (retry_id,), _value)


# --- tables --------------------------------------------------------------------------------------------------


def watch_table(
    table: str,
    *,
    topic: str | None = None,
    inserts: bool = True,
    updates: bool = True,
    deletes: bool = True,
    truncates: bool = True,
    columns: Sequence[str] | None = None,
    when_changed: Sequence[str] | None = None,
) -> Call[str]:
    """Publish what happens to a table; the answer is the topic."""
    return Call(
        "select headwater.watch_table(%s::regclass, %s, %s, %s, %s, %s, %s::text[], %s::text[])",
        (
            table,
            _optional_text(topic, "topic name"),
            inserts,
            updates,
            deletes,
            truncates,
            None if columns is None else list(columns),
            None if when_changed is None else list(when_changed),
        ),
        _value,
    )


def unwatch_table(table: str) -> Call[bool]:
    return Call("select headwater.unwatch_table(%s::regclass)", (table,), _value)
