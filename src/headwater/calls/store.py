"""Calls on event stores: append under a condition, in groups, and read by query."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import psycopg
from psycopg.adapt import Dumper
from psycopg.pq import Format

from headwater.calls.call import Call, Rows, nothing, only_value
from headwater.calls.encoding import (
    PackedBytes,
    PackedText,
    checked_text,
    encode_headers,
    encode_payload,
    pack,
)
from headwater.errors import InvalidEvent, InvalidRequest
from headwater.query import (
    EVERYTHING,
    MAX_TAGS,
    Condition,
    FieldIndex,
    Latest,
    LatestMatchIs,
    NewStoreEvent,
    Query,
    StoreEvent,
    Verdict,
    distinct,
)

MAX_EVENTS = 1000
"""How many events one append may have."""
LAST_POSITION = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class EncodedEvent:
    """One event of an append, checked, and as bytes. A named part is None where the event has none."""

    event_id: str
    type: str
    tags: tuple[str, ...]
    payload: bytes | None
    content_type: str | None
    metadata: str | None


@dataclass(frozen=True, slots=True)
class EncodedAppend:
    """One append, ready to be sent with others."""

    events: tuple[EncodedEvent, ...]
    condition: Condition | None
    payload_bytes: int


def encode_append(
    events: Sequence[NewStoreEvent], condition: Condition | None, new_ids: Sequence[str]
) -> EncodedAppend:
    """An append, checked; an event without an id gets one of `new_ids`, which are as many as events."""
    if not 1 <= len(events) <= MAX_EVENTS:
        raise InvalidRequest(f"an append has 1 to {MAX_EVENTS} events, this one has {len(events)}")
    encoded = tuple(map(_encode_event, events, new_ids))
    if len(encoded) > 1 and len({event.event_id for event in encoded}) < len(encoded):
        raise InvalidEvent("two events of one append have the same id")
    return EncodedAppend(encoded, condition, sum(len(event.payload or b"") for event in encoded))


def _encode_event(event: NewStoreEvent, new_id: str) -> EncodedEvent:
    if event.type is None:
        raise InvalidEvent("every event of an event store has a type")
    distinct((event.type,), "types")
    tags = distinct(event.tags, "tags")
    if len(tags) > MAX_TAGS:
        raise InvalidEvent(f"an event has up to {MAX_TAGS} tags, this one has {len(tags)}")
    payload, content_type = encode_payload(event.data, event.content_type)
    event_id = new_id if event.event_id is None else checked_text(event.event_id, "event id")
    if not 1 <= len(event_id) <= 255:
        raise InvalidEvent("an event id is 1 to 255 characters")
    return EncodedEvent(event_id, event.type, tags, payload, content_type, encode_headers(event.metadata))


class _PackedIntegers(bytes):
    """An integer[] already in Postgres' binary form."""


class _PackedIntegersDumper(Dumper):
    format = Format.BINARY
    oid = 1007

    def dump(self, obj: Any) -> bytes:
        return bytes(obj)


psycopg.adapters.register_dumper(_PackedIntegers, _PackedIntegersDumper)
_INTEGER = struct.Struct("!i").pack


def _text(values: list[str]) -> PackedText:
    return PackedText(pack([value.encode() for value in values], 25))


def _optional_text(values: list[str | None]) -> PackedText | None:
    if not any(values):
        return None
    return PackedText(pack([None if value is None else value.encode() for value in values], 25))


def _array_text(tags: tuple[str, ...]) -> str:
    """Tags as Postgres writes an array."""
    quoted = (tag.replace("\\", "\\\\").replace('"', '\\"') for tag in tags)
    return "{" + ",".join(f'"{tag}"' for tag in quoted) + "}"


def _condition_text(condition: Condition | None) -> str | None:
    if condition is None:
        return None
    kind = "latest" if isinstance(condition, LatestMatchIs) else "after"
    return f'{{"query":{condition.query.as_json()},"{kind}":{condition.position or 0}}}'


def append_group(topic: str, appends: Sequence[EncodedAppend]) -> Call[list[Verdict]]:
    """Several appends in one transaction, in order, each with its verdict."""
    events = list(chain.from_iterable(append.events for append in appends))
    return Call(
        "select positions, repeated, moved_to, taken_id "
        "from headwater.append_group(%s, %b, %b::text[], %b, %b, %b, %b, %b::text[], %b::text[])",
        (
            checked_text(topic, "topic name"),
            _PackedIntegers(pack([_INTEGER(len(append.events)) for append in appends], 23)),
            PackedText(
                pack(
                    [
                        None if text is None else text.encode()
                        for text in (_condition_text(append.condition) for append in appends)
                    ],
                    25,
                )
            ),
            _text([event.event_id for event in events]),
            _text([event.type for event in events]),
            _text([_array_text(event.tags) for event in events]),
            PackedBytes(pack([event.payload for event in events], 17)),
            _optional_text([event.content_type for event in events]),
            _optional_text([event.metadata for event in events]),
        ),
        lambda rows: [Verdict(None if r[0] is None else tuple(r[0]), bool(r[1]), r[2], r[3]) for r in rows],
    )


def create_event_store(
    name: str,
    *,
    max_payload_bytes: int | None = None,
    max_header_bytes: int | None = None,
    if_missing: bool = False,
) -> Call[None]:
    return Call(
        "select headwater.create_event_store(%s, %s, %s, %s)",
        (checked_text(name, "topic name"), max_payload_bytes, max_header_bytes, if_missing),
        nothing,
    )


_STORE_EVENT = "position, topic_offset, event_id, type, tags, metadata, content_type, payload, published_at"


def _store_event(row: tuple[Any, ...]) -> StoreEvent:
    return StoreEvent._make((*row[:4], tuple(row[4] or ()), *row[5:]))


def read_matching(
    topic: str,
    query: Query = EVERYTHING,
    *,
    after: int = 0,
    before: int | None = None,
    batch_size: int = 100,
    max_bytes: int = 16_777_216,
    backwards: bool = False,
) -> Call[list[StoreEvent]]:
    """Events that the query matches, between two positions, both excluded."""
    return Call(
        f"select {_STORE_EVENT} from headwater.read_matching(%s, %s::jsonb, %s, %s, %s, %s, %s)",
        (
            checked_text(topic, "topic name"),
            query.as_json(),
            after,
            LAST_POSITION if before is None else before,
            batch_size,
            max_bytes,
            backwards,
        ),
        lambda rows: [_store_event(row) for row in rows],
    )


def read_at(topic: str, positions: Sequence[int]) -> Call[list[StoreEvent]]:
    """The events at these positions, in order."""
    return Call(
        f"select {_STORE_EVENT} from headwater.read_at(%s, %s::bigint[])",
        (checked_text(topic, "topic name"), list(positions)),
        lambda rows: [_store_event(row) for row in rows],
    )


def count_matching(topic: str, query: Query = EVERYTHING, *, after: int = 0, before: int | None = None) -> Call[int]:
    return Call(
        "select headwater.count_matching(%s, %s::jsonb, %s, %s)",
        (checked_text(topic, "topic name"), query.as_json(), after, LAST_POSITION if before is None else before),
        only_value,
    )


def latest_matching(topic: str, query: Query) -> Call[Latest]:
    """The latest event of each item of the query."""
    items = len(query.items)

    def decode(rows: Rows) -> Latest:
        found: list[StoreEvent | None] = [None] * items
        for place, *event in rows:
            found[place - 1] = _store_event(tuple(event))
        return Latest(tuple(found), max((event.position for event in found if event is not None), default=0))

    return Call(
        f"select place, {_STORE_EVENT} from headwater.latest_matching(%s, %s::jsonb)",
        (checked_text(topic, "topic name"), query.as_json()),
        decode,
    )


def create_field_index(topic: str, name: str, fields: Sequence[str]) -> Call[None]:
    """Declare an index on fields of the data."""
    if isinstance(fields, str):
        raise InvalidRequest("fields are a list of texts, not one text", hint=f'Write fields=["{fields}"].')
    return Call(
        "select headwater.create_field_index(%s, %s, %s::text[])",
        (
            checked_text(topic, "topic name"),
            checked_text(name, "index name"),
            [checked_text(field, "field") for field in fields],
        ),
        nothing,
    )


def fill_field_index(topic: str, name: str, *, batch_size: int = 1000) -> Call[bool]:
    """The marks of the next events from before; whether any are left."""
    return Call("select headwater.fill_field_index(%s, %s, %s)", (topic, name, batch_size), only_value)


def drop_field_index(topic: str, name: str) -> Call[bool]:
    return Call(
        "select headwater.drop_field_index(%s, %s)",
        (checked_text(topic, "topic name"), checked_text(name, "index name")),
        only_value,
    )


def field_indexes(topic: str) -> Call[list[FieldIndex]]:
    return Call(
        "select name, fields, ready from headwater.field_index_overview where topic = %s order by name",
        (checked_text(topic, "topic name"),),
        lambda rows: [FieldIndex(name, tuple(fields), ready) for name, fields, ready in rows],
    )


def event_store_head(topic: str) -> Call[int]:
    """The last position of an event store; 0: it is empty."""
    return Call("select headwater.event_store_head(%s)", (checked_text(topic, "topic name"),), only_value)


def event_stores() -> Call[list[str]]:
    """The names of all event stores."""
    return Call(
        "select name from headwater.topic where event_store and deleted_at is null order by name",
        (),
        lambda rows: [name for (name,) in rows],
    )


def take_subscriber_name(topic: str, name: str) -> Call[bool]:
    """Take a name for this session; False: another has it."""
    return Call(
        "select headwater.take_subscriber_name(%s, %s)",
        (checked_text(topic, "topic name"), checked_text(name, "subscriber name")),
        only_value,
    )


def give_subscriber_name(topic: str, name: str) -> Call[bool]:
    """Give a name of this session back."""
    return Call("select headwater.give_subscriber_name(%s, %s)", (topic, name), only_value)
