"""Calls for event stores: append under a condition, in groups, and read by query."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from psycopg.types.numeric import Int8

from headwater.calls.call import Call, Rows, nothing, only_value
from headwater.calls.encoding import (
    PackedText,
    checked_text,
    encode_headers,
    encode_payload,
    packed_bytes,
    packed_integers,
    packed_positions,
    packed_text,
)
from headwater.errors import InvalidEvent, InvalidRequest
from headwater.eventstore.conflict_cache import LastKnownEvent, Precheck, index_terms_of, precheck_for
from headwater.eventstore.decider import SavedState, SnapshotKey
from headwater.eventstore.field_index import FieldIndex, conditions_as_json, conditions_from_json
from headwater.eventstore.query import (
    EVERYTHING,
    LAST_POSITION,
    MAX_TAGS,
    AppendResult,
    Condition,
    Latest,
    LatestMatchIs,
    NewStoreEvent,
    Query,
    StoreEvent,
    StorePage,
    check_json_depth,
    check_positions,
    distinct,
)

MAX_CONTENT_TYPE = 200
MAX_EVENTS = 1000
"""The maximal number of events of one append."""


class EncodedEvent(NamedTuple):
    """A validated and encoded event of an append. A part is None if the event does not have it."""

    event_id: str
    type: str
    tags: tuple[str, ...]
    payload: bytes | None
    content_type: str | None
    metadata: str | None
    index_terms: tuple[str, ...]


class EncodedAppend(NamedTuple):
    """A validated and encoded append, and its pre-check; None if it needs a full check."""

    events: tuple[EncodedEvent, ...]
    condition: Condition | None
    precheck: Precheck | None
    index_terms: Collection[str]
    ids: Collection[str]
    payload_bytes: int

    @property
    def epoch(self) -> int | None:
        """The epoch of the position of its condition; None if the condition has no position or no epoch."""
        return self.condition.epoch if self.condition is not None and self.condition.position else None


def encode_append(
    events: Sequence[NewStoreEvent], condition: Condition | None, new_ids: Sequence[str]
) -> EncodedAppend:
    """Validate and encode an append. An event without an id gets one of `new_ids`, of which there are as many as
    events."""
    if not 1 <= len(events) <= MAX_EVENTS:
        raise InvalidRequest(f"invalid number of events {len(events)}: an append has 1 to {MAX_EVENTS}")
    encoded = tuple(map(_encode_event, events, new_ids))
    if len(encoded) == 1:
        (event,) = encoded
        return EncodedAppend(
            encoded, condition, precheck_for(condition), event.index_terms, (event.event_id,), len(event.payload or b"")
        )
    ids = frozenset([event.event_id for event in encoded])
    if len(ids) < len(encoded):
        raise InvalidEvent("two events of one append have the same id")
    index_terms: set[str] = set()
    size = 0
    for event in encoded:
        index_terms.update(event.index_terms)
        size += len(event.payload or b"")
    return EncodedAppend(encoded, condition, precheck_for(condition), frozenset(index_terms), ids, size)


def _encode_event(event: NewStoreEvent, new_id: str) -> EncodedEvent:
    if event.type is None:
        raise InvalidEvent("an event of an event store must have a type")
    (type_,) = distinct((event.type,), "types")
    tags = distinct(event.tags, "tags")
    if len(tags) > MAX_TAGS:
        raise InvalidEvent(f"the event has {len(tags)} tags, the limit is {MAX_TAGS}")
    payload, content_type = encode_payload(event.data, event.content_type)
    if payload is not None:
        check_json_depth(payload, content_type)
    event_id = new_id if event.event_id is None else checked_text(event.event_id, "event id")
    if not 1 <= len(event_id) <= 255:
        raise InvalidEvent("invalid event id: expected 1 to 255 characters")
    if event.metadata is not None and not isinstance(event.metadata, Mapping):
        raise InvalidEvent(f"invalid metadata {event.metadata!r:.40}: expected a JSON object")
    if content_type is not None and not 1 <= len(checked_text(content_type, "content type")) <= MAX_CONTENT_TYPE:
        raise InvalidEvent(f"invalid content type: expected 1 to {MAX_CONTENT_TYPE} characters")
    metadata = None if event.metadata is None else encode_headers(event.metadata)
    return EncodedEvent(event_id, type_, tags, payload, content_type, metadata, index_terms_of(type_, tags))


def _optional_text(values: Sequence[str | None]) -> PackedText | None:
    return packed_text(values) if any(values) else None


def _array_text(tags: tuple[str, ...]) -> str:
    """Tags as an array literal of Postgres."""
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
        packed_text(ids),
        packed_text(types),
        packed_text([_array_text(of_event) for of_event in tags]),
        packed_bytes(payloads),
        _optional_text(content_types),
        _optional_text(metadata),
    )


def append_ahead(
    topic: str,
    appends: Sequence[EncodedAppend],
    prechecks: Sequence[Precheck],
    known: LastKnownEvent | None = None,
    epoch: int | None = None,
) -> Call[tuple[int, list[tuple[int, ...]]]]:
    """Run several appends in one transaction, up to the first one that its pre-check rejects. They must be independent.

    Returns the position of the last event before them, and the positions of the appended events. `epoch` is that of all
    conditions that have one: in another epoch, every append is rejected.
    """
    owners: list[int] = []
    conflicts: list[tuple[int, int, str | None, int]] = []
    required: list[tuple[int, str, int]] = []
    number = 0
    for owner, (append, precheck) in enumerate(zip(appends, prechecks, strict=True)):
        owners += [owner] * len(append.events)
        for conflict in precheck.conflicts:
            number += 1
            conflicts += [(owner, number, index_term, conflict.above) for index_term in conflict.index_terms or (None,)]
        required += [(owner, index_term, position) for index_term, position in precheck.required]
    conflict_owners, numbers, index_terms, above = zip(*conflicts, strict=True) if conflicts else ((), (), (), ())
    required_by, required_terms, required_at = zip(*required, strict=True) if required else ((), (), ())

    def decode(rows: Rows) -> tuple[int, list[tuple[int, ...]]]:
        tail, assigned = rows[0]
        positions: list[tuple[int, ...]] = []
        start = 0
        for append in appends:
            if assigned is None or assigned[start] is None:
                break
            positions.append(tuple(assigned[start : start + len(append.events)]))
            start += len(append.events)
        return tail, positions

    return Call(
        "select tail, positions from headwater_internal.append_ahead("
        "%s, %b, %b, %b, %b, %b, %b::text[], %b::text[], %b, %b, %b, %b, %s, %s, "
        "%b::integer[], %b::text[], %b::bigint[], %s)",
        (
            checked_text(topic, "topic name"),
            packed_integers(owners),
            *_event_parts([event for append in appends for event in append.events]),
            packed_integers(conflict_owners),
            packed_integers(numbers),
            packed_text(index_terms),
            packed_positions(above),
            *((None, None) if known is None else (Int8(known.position), known.event_id)),
            packed_integers(required_by) if required else None,
            packed_text(required_terms) if required else None,
            packed_positions(required_at) if required else None,
            epoch,
        ),
        decode,
    )


def append_group(topic: str, appends: Sequence[EncodedAppend]) -> Call[list[AppendResult]]:
    """Run several appends in one transaction, in order, each fully checked and with its own result."""
    return Call(
        "select positions, repeated, moved_to, taken_id, epoch, common_position "
        "from headwater_internal.append_group(%s, %b, %b::text[], %b, %b, %b, %b, %b::text[], %b::text[])",
        (
            checked_text(topic, "topic name"),
            packed_integers([len(append.events) for append in appends]),
            packed_text([_condition_text(append.condition) for append in appends]),
            *_event_parts([event for append in appends for event in append.events]),
        ),
        lambda rows: [AppendResult(None if r[0] is None else tuple(r[0]), bool(r[1]), *r[2:]) for r in rows],
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
    """Matching events between two positions, both excluded, which belong to this epoch if one is given."""
    check_positions(after, before)
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
        f"select {_STORE_EVENT} from headwater_internal.read_at(%s, %s::bigint[])",
        (checked_text(topic, "topic name"), list(positions)),
        lambda rows: [_store_event(row) for row in rows],
    )


def count_matching(topic: str, query: Query = EVERYTHING, *, after: int = 0, before: int | None = None) -> Call[int]:
    check_positions(after, before)
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
        for item_number, *event, _ in rows:
            if item_number is not None:
                found[item_number - 1] = _store_event(tuple(event))
        last = max((event.position for event in found if event is not None), default=0)
        return Latest(tuple(found), last, rows[0][-1])

    return Call(
        f"select item_number, {_STORE_EVENT}, s.present from (select headwater.current_epoch() as present) as s "
        "left join headwater.latest_matching(%s, %s::jsonb) on true",
        (checked_text(topic, "topic name"), query.as_json()),
        decode,
    )


def create_field_index(topic: str, index: FieldIndex) -> Call[None]:
    """Create the definition of a field index."""
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
    """Add the index terms of the next batch of older events; returns whether any are left."""
    return Call("select headwater_internal.fill_field_index(%s, %s, %s)", (topic, name, batch_size), only_value)


def drop_field_index(topic: str, name: str) -> Call[bool]:
    return Call(
        "select headwater.drop_field_index(%s, %s)",
        (checked_text(topic, "topic name"), checked_text(name, "index name")),
        only_value,
    )


def field_indexes(topic: str, name: str | None = None) -> Call[list[FieldIndex]]:
    """The field indexes of a store, or the one with this name."""
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
    """The last position of an event store; 0 if it is empty."""
    return Call("select headwater.event_store_head(%s)", (checked_text(topic, "topic name"),), only_value)


def event_store_end(topic: str) -> Call[tuple[int, int]]:
    """The last position of an event store and its epoch."""
    return Call(
        "select headwater.event_store_head(%s), headwater.current_epoch()",
        (checked_text(topic, "topic name"),),
        lambda rows: (rows[0][0], rows[0][1]),
    )


def event_stores() -> Call[list[str]]:
    """The names of all event stores."""
    return Call(
        "select name from headwater_internal.topic where event_store and deleted_at is null order by name",
        (),
        lambda rows: [name for (name,) in rows],
    )


def take_subscriber_name(topic: str, name: str) -> Call[bool]:
    """Take a subscriber name for this session; False if another session has it."""
    return Call(
        "select headwater_internal.take_subscriber_name(%s, %s)",
        (checked_text(topic, "topic name"), checked_text(name, "subscriber name")),
        only_value,
    )


def give_subscriber_name(topic: str, name: str) -> Call[bool]:
    """Release a subscriber name of this session."""
    return Call("select headwater_internal.give_subscriber_name(%s, %s)", (topic, name), only_value)


def load_snapshot(topic: str, key: SnapshotKey) -> Call[SavedState | None]:
    """The state that is saved under a key."""
    return Call(
        "select position, state, headwater.current_epoch() from headwater_internal.load_snapshot(%s, %s, %s, %s)",
        (checked_text(topic, "topic name"), checked_text(key.name, "name"), key.query_hash, key.version),
        lambda rows: SavedState(*rows[0]) if rows else None,
    )


def save_snapshot(topic: str, key: SnapshotKey, saved: SavedState) -> Call[None]:
    """Save a state, unless a later one is saved."""
    return Call(
        "select headwater_internal.save_snapshot(%s, %s, %s, %s, %s, %b, %s)",
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
    """Delete all saved states of a name; returns their number."""
    return Call(
        "select headwater_internal.forget_snapshots(%s, %s)",
        (checked_text(topic, "topic name"), checked_text(name, "name")),
        only_value,
    )
