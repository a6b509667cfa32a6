"""Calls on event stores: append under a condition, in groups, and read by query."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from psycopg.types.numeric import Int8

from headwater.calls.call import Call, Rows, nothing, only_value
from headwater.calls.encoding import (
    PackedBytes,
    PackedIntegers,
    PackedPositions,
    PackedText,
    checked_text,
    encode_headers,
    encode_payload,
    pack,
)
from headwater.errors import InvalidEvent, InvalidRequest
from headwater.eventstore.conflict_cache import Known, Question, marks_of, question_of
from headwater.eventstore.decider import SavedState, SnapshotKey
from headwater.eventstore.field_index import FieldIndex, conditions_as_json, conditions_from_json
from headwater.eventstore.query import (
    EVERYTHING,
    LAST_POSITION,
    MAX_TAGS,
    Condition,
    Latest,
    LatestMatchIs,
    NewStoreEvent,
    Query,
    StoreEvent,
    StorePage,
    Verdict,
    distinct,
    refuse_beyond,
    refuse_too_deep,
)

MAX_CONTENT_TYPE = 200
MAX_EVENTS = 1000
"""How many events one append may have."""


class EncodedEvent(NamedTuple):
    """One event of an append, checked, and as bytes. A named part is None where the event has none."""

    event_id: str
    type: str
    tags: tuple[str, ...]
    payload: bytes | None
    content_type: str | None
    metadata: str | None
    marks: tuple[str, ...]


class EncodedAppend(NamedTuple):
    """One append, ready to be sent with others, and what must be asked to accept it: None, if that is too much."""

    events: tuple[EncodedEvent, ...]
    condition: Condition | None
    question: Question | None
    marks: Collection[str]
    ids: Collection[str]
    payload_bytes: int

    @property
    def epoch(self) -> int | None:
        """Which epoch the position of its condition is of; None: of any, or that is not said."""
        return self.condition.epoch if self.condition is not None and self.condition.position else None


def encode_append(
    events: Sequence[NewStoreEvent], condition: Condition | None, new_ids: Sequence[str]
) -> EncodedAppend:
    """An append, checked; an event without an id gets one of `new_ids`, which are as many as events."""
    if not 1 <= len(events) <= MAX_EVENTS:
        raise InvalidRequest(f"an append has 1 to {MAX_EVENTS} events, this one has {len(events)}")
    encoded = tuple(map(_encode_event, events, new_ids))
    if len(encoded) == 1:
        (event,) = encoded
        return EncodedAppend(
            encoded, condition, question_of(condition), event.marks, (event.event_id,), len(event.payload or b"")
        )
    ids = frozenset([event.event_id for event in encoded])
    if len(ids) < len(encoded):
        raise InvalidEvent("two events of one append have the same id")
    marks: set[str] = set()
    size = 0
    for event in encoded:
        marks.update(event.marks)
        size += len(event.payload or b"")
    return EncodedAppend(encoded, condition, question_of(condition), frozenset(marks), ids, size)


def _encode_event(event: NewStoreEvent, new_id: str) -> EncodedEvent:
    if event.type is None:
        raise InvalidEvent("every event of an event store has a type")
    (type_,) = distinct((event.type,), "types")
    tags = distinct(event.tags, "tags")
    if len(tags) > MAX_TAGS:
        raise InvalidEvent(f"an event has up to {MAX_TAGS} tags, this one has {len(tags)}")
    payload, content_type = encode_payload(event.data, event.content_type)
    if payload is not None:
        refuse_too_deep(payload, content_type)
    event_id = new_id if event.event_id is None else checked_text(event.event_id, "event id")
    if not 1 <= len(event_id) <= 255:
        raise InvalidEvent("an event id is 1 to 255 characters")
    if event.metadata is not None and not isinstance(event.metadata, Mapping):
        raise InvalidEvent(f"metadata are a JSON object, not {event.metadata!r:.40}")
    if content_type is not None and not 1 <= len(checked_text(content_type, "content type")) <= MAX_CONTENT_TYPE:
        raise InvalidEvent(f"a content type is 1 to {MAX_CONTENT_TYPE} characters")
    metadata = None if event.metadata is None else encode_headers(event.metadata)
    return EncodedEvent(event_id, type_, tags, payload, content_type, metadata, marks_of(type_, tags))


def _integers(values: Sequence[int]) -> PackedIntegers:
    return PackedIntegers(_packed(values, 23, 4, "ii"))


def _positions(values: Sequence[int]) -> PackedPositions:
    return PackedPositions(_packed(values, 20, 8, "iq"))


def _packed(values: Sequence[int], oid: int, size: int, form: str) -> bytes:
    """Numbers of one size as an array, in one go."""
    parts = [size] * (2 * len(values))
    parts[1::2] = values
    return struct.pack(f"!iIiii{form * len(values)}", 1, 0, oid, len(values), 1, *parts)


def _text(values: Sequence[str | None]) -> PackedText:
    return PackedText(pack([None if value is None else value.encode() for value in values], 25))


def _optional_text(values: Sequence[str | None]) -> PackedText | None:
    return _text(values) if any(values) else None


def _array_text(tags: tuple[str, ...]) -> str:
    """Tags as Postgres writes an array."""
    joined = '","'.join(tags)
    if "\\" in joined or joined.count('"') != 2 * max(len(tags) - 1, 0):
        joined = '","'.join([tag.replace("\\", "\\\\").replace('"', '\\"') for tag in tags])
    return f'{{"{joined}"}}' if tags else "{}"


def _condition_text(condition: Condition | None) -> str | None:
    if condition is None:
        return None
    kind = "latest" if isinstance(condition, LatestMatchIs) else "after"
    epoch = "" if condition.epoch is None else f',"epoch":{condition.epoch}'
    return f'{{"query":{condition.query.as_json()},"{kind}":{condition.position or 0}{epoch}}}'


def _event_parts(events: Sequence[EncodedEvent]) -> tuple[object, ...]:
    ids, types, tags, payloads, content_types, metadata, _ = zip(*events, strict=True)
    return (
        _text(ids),
        _text(types),
        _text([_array_text(of_event) for of_event in tags]),
        PackedBytes(pack(payloads, 17)),
        _optional_text(content_types),
        _optional_text(metadata),
    )


def append_ahead(
    topic: str,
    appends: Sequence[EncodedAppend],
    questions: Sequence[Question],
    known: Known | None = None,
    epoch: int | None = None,
) -> Call[tuple[int, list[tuple[int, ...]]]]:
    """Several appends in one transaction, up to the first that what it asks speaks against. None is about another.

    The answer is the last event before them, and the positions of those that were appended. `epoch` is the one of all
    conditions that name one: in another epoch every append is in doubt.
    """
    owners: list[int] = []
    doubts: list[tuple[int, int, str | None, int]] = []
    seen: list[tuple[int, str, int]] = []
    number = 0
    for owner, (append, question) in enumerate(zip(appends, questions, strict=True)):
        owners += [owner] * len(append.events)
        for doubt in question.doubts:
            number += 1
            doubts += [(owner, number, mark, doubt.above) for mark in doubt.marks or (None,)]
        seen += [(owner, mark, position) for mark, position in question.seen]
    doubting, numbers, marks, above = zip(*doubts, strict=True) if doubts else ((), (), (), ())
    seen_by, seen_marks, seen_at = zip(*seen, strict=True) if seen else ((), (), ())

    def decode(rows: Rows) -> tuple[int, list[tuple[int, ...]]]:
        tail, places = rows[0]
        positions: list[tuple[int, ...]] = []
        start = 0
        for append in appends:
            if places is None or places[start] is None:
                break
            positions.append(tuple(places[start : start + len(append.events)]))
            start += len(append.events)
        return tail, positions

    return Call(
        "select tail, places from headwater.append_ahead("
        "%s, %b, %b, %b, %b, %b, %b::text[], %b::text[], %b, %b, %b, %b, %s, %s, "
        "%b::integer[], %b::text[], %b::bigint[], %s)",
        (
            checked_text(topic, "topic name"),
            _integers(owners),
            *_event_parts([event for append in appends for event in append.events]),
            _integers(doubting),
            _integers(numbers),
            _text(marks),
            _positions(above),
            *((None, None) if known is None else (Int8(known.position), known.event_id)),
            _integers(seen_by) if seen else None,
            _text(seen_marks) if seen else None,
            _positions(seen_at) if seen else None,
            epoch,
        ),
        decode,
    )


def append_group(topic: str, appends: Sequence[EncodedAppend]) -> Call[list[Verdict]]:
    """Several appends in one transaction, in order, each with its verdict."""
    return Call(
        "select positions, repeated, moved_to, taken_id, epoch, common_position "
        "from headwater.append_group(%s, %b, %b::text[], %b, %b, %b, %b, %b::text[], %b::text[])",
        (
            checked_text(topic, "topic name"),
            _integers([len(append.events) for append in appends]),
            _text([_condition_text(append.condition) for append in appends]),
            *_event_parts([event for append in appends for event in append.events]),
        ),
        lambda rows: [Verdict(None if r[0] is None else tuple(r[0]), bool(r[1]), *r[2:]) for r in rows],
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
    epoch: int | None = None,
) -> Call[StorePage]:
    """Events that the query matches, between two positions, both excluded, which are of this epoch if one is given."""
    refuse_beyond(after, before)
    return Call(
        f"select {_STORE_EVENT}, s.present from (select headwater.current_epoch() as present) as s "
        "left join headwater.read_matching(%s, %s::jsonb, %s, %s, %s, %s, %s, %s) on true",
        (
            checked_text(topic, "topic name"),
            query.as_json(),
            after,
            LAST_POSITION if before is None else before,
            batch_size,
            max_bytes,
            backwards,
            epoch,
        ),
        lambda rows: StorePage([_store_event(row[:-1]) for row in rows if row[0] is not None], rows[0][-1]),
    )


def read_at(topic: str, positions: Sequence[int]) -> Call[list[StoreEvent]]:
    """The events at these positions, in order."""
    return Call(
        f"select {_STORE_EVENT} from headwater.read_at(%s, %s::bigint[])",
        (checked_text(topic, "topic name"), list(positions)),
        lambda rows: [_store_event(row) for row in rows],
    )


def count_matching(topic: str, query: Query = EVERYTHING, *, after: int = 0, before: int | None = None) -> Call[int]:
    refuse_beyond(after, before)
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
        for place, *event, _ in rows:
            if place is not None:
                found[place - 1] = _store_event(tuple(event))
        last = max((event.position for event in found if event is not None), default=0)
        return Latest(tuple(found), last, rows[0][-1])

    return Call(
        f"select place, {_STORE_EVENT}, s.present from (select headwater.current_epoch() as present) as s "
        "left join headwater.latest_matching(%s, %s::jsonb) on true",
        (checked_text(topic, "topic name"), query.as_json()),
        decode,
    )


def create_field_index(topic: str, index: FieldIndex) -> Call[None]:
    """Declare an index on fields of the data."""
    return Call(
        "select headwater.create_field_index(%s, %s, %s::text[], %s::text[], %s::jsonb, %s)",
        (
            checked_text(topic, "topic name"),
            index.name,
            list(index.fields),
            list(index.kinds),
            conditions_as_json(index.conditions),
            index.combine,
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


def field_indexes(topic: str, name: str | None = None) -> Call[list[FieldIndex]]:
    """The indexes of a store, or the one of a name."""
    return Call(
        "select name, fields, ready, kinds, conditions, combine "
        "from headwater.field_index_overview where topic = %s and name = coalesce(%s, name) order by name",
        (checked_text(topic, "topic name"), name),
        lambda rows: [
            FieldIndex(name, tuple(fields), ready, tuple(kinds), conditions_from_json(conditions), combine)
            for name, fields, ready, kinds, conditions, combine in rows
        ],
    )


def event_store_head(topic: str) -> Call[int]:
    """The last position of an event store; 0: it is empty."""
    return Call("select headwater.event_store_head(%s)", (checked_text(topic, "topic name"),), only_value)


def event_store_end(topic: str) -> Call[tuple[int, int]]:
    """The same, and the epoch that the position is of."""
    return Call(
        "select headwater.event_store_head(%s), headwater.current_epoch()",
        (checked_text(topic, "topic name"),),
        lambda rows: (rows[0][0], rows[0][1]),
    )


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


def load_snapshot(topic: str, key: SnapshotKey) -> Call[SavedState | None]:
    """The state that was saved under a key."""
    return Call(
        "select position, state, headwater.current_epoch() from headwater.load_snapshot(%s, %s, %s, %s)",
        (checked_text(topic, "topic name"), checked_text(key.name, "name"), key.query_hash, key.version),
        lambda rows: SavedState(*rows[0]) if rows else None,
    )


def save_snapshot(topic: str, key: SnapshotKey, saved: SavedState) -> Call[None]:
    """Keep a state, unless a later one is kept."""
    return Call(
        "select headwater.save_snapshot(%s, %s, %s, %s, %s, %b, %s)",
        (
            checked_text(topic, "topic name"),
            checked_text(key.name, "name"),
            key.query_hash,
            key.version,
            saved.position,
            saved.state,
            saved.epoch,
        ),
        nothing,
    )


def forget_snapshots(topic: str, name: str) -> Call[int]:
    """Forget all states of a name; how many there were."""
    return Call(
        "select headwater.forget_snapshots(%s, %s)",
        (checked_text(topic, "topic name"), checked_text(name, "name")),
        only_value,
    )
