"""The SQLite file of an event store: its tables, how events are appended, and how queries find events."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from heapq import merge
from itertools import groupby, islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headwater.calls.store import EncodedAppend
from headwater.errors import CursorMoved, SchemaMismatch
from headwater.eventstore.decider import SavedState, SnapshotKey
from headwater.eventstore.field_index import FieldIndex, check_same_definition, conditions_as_json, conditions_from_json
from headwater.eventstore.query import (
    LAST_POSITION,
    AppendResult,
    Condition,
    Item,
    LatestMatchIs,
    Query,
    StoreEvent,
    check_positions,
    json_of,
    size_of,
)

# An index and the number that its index terms contain.
Numbered = tuple[int, FieldIndex]

BUSY_SECONDS = 10.0
UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Identifies a file of Headwater ("HWES") and its format version.
APPLICATION_ID = 0x48574553
FORM = 3

# Positions count from 1 without gaps: there is one writer, and a rollback leaves none.
TABLES = """
create table event (
    position     integer primary key check (position >= 1),
    event_id     text    not null unique,
    type         text    not null,
    tags         text    not null,
    metadata     text,
    content_type text,
    payload      blob,
    published_at integer not null
) strict;
-- The index terms of events: ':' and the type, '#' and each tag.
create table index_term (
    index_term     text    not null,
    position integer not null,
    primary key (index_term, position)
) strict, without rowid;
-- Field indexes. Each event in an index has an index term: '=', the id of the index and a hash. Events after `fill_to`
-- get it when they are appended; of the earlier ones, those up to `filled_to` have it. Ids are never reused, since the
-- index terms are removed after their index.
create table field_index (
    id         integer primary key autoincrement,
    name       text    not null unique,
    fields     text    not null,
    kinds      text    not null,
    conditions text    not null,
    combine    text    not null,
    fill_to    integer not null,
    filled_to  integer not null
) strict;
create table snapshot (
    name       text    not null,
    query_hash text    not null,
    version    integer not null,
    position   integer not null,
    state      blob    not null,
    primary key (name, query_hash, version)
) strict, without rowid;
create table cursor (
    name     text    primary key,
    position integer not null check (position >= 0)
) strict, without rowid;
-- Queues of competing consumers. Every event up to the position was leased, or did not match.
create table queue (
    id         integer primary key,
    name       text    not null unique check (length(name) between 1 and 200),
    position   integer not null check (position >= 0),
    last_token integer not null check (last_token >= 0)
) strict;
-- Leases. A separate table, so that the search for expired leases reads few rows.
create table lease (
    queue_id   integer not null,
    token      integer not null,
    worker     text    not null,
    expires_at integer not null,
    primary key (queue_id, token)
) strict, without rowid;
-- Leased events that are not done. Without a token, the lease expired, and the event is delivered again, isolated.
-- `attempt` counts the attempts of the event by itself; the history has all of them.
create table claimed_event (
    queue_id integer not null,
    position integer not null,
    token    integer,
    attempt  integer not null check (attempt >= 0),
    history  text    not null,
    primary key (queue_id, position)
) strict, without rowid;
create index claimed_event_token on claimed_event (queue_id, token, attempt, position);
-- Events that a queue has given up on.
create table dead_letter (
    queue_id   integer not null,
    position   integer not null,
    attempts   integer not null,
    last_error text    not null,
    history    text    not null,
    died_at    integer not null,
    primary key (queue_id, position)
) strict, without rowid;
"""

EVENT_COLUMNS = "position, position - 1, event_id, type, tags, metadata, content_type, payload, published_at"
MARKED = """
select m.position from index_term m
where m.index_term = :way and m.position > :above and m.position < :below
    and (:types is null or exists (
        select 1 from json_each(:types) t join index_term n on n.index_term = t.value and n.position = m.position
    ))
    and not exists (
        select 1 from json_each(:tags) t
        where not exists (select 1 from index_term n where n.index_term = t.value and n.position = m.position)
    )
order by m.position
"""
ALL = "select position from event where position > :above and position < :below order by position"
FEW = (
    "select count(*) from (select 1 from index_term where index_term = :way "
    "and position > :above and position < :below limit 256)"
)


def connected(path: Path, *, create: bool) -> sqlite3.Connection:
    """Open a store's file. synchronous=FULL: an acknowledged commit survives a power loss."""
    connection = sqlite3.connect(
        f"file://{quote(bytes(path.absolute()))}?mode={'rwc' if create else 'rw'}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        if create:
            connection.execute("pragma journal_mode = wal")
            connection.executescript(
                f"begin immediate; {TABLES}; pragma application_id = {APPLICATION_ID}; "
                f"pragma user_version = {FORM}; commit;"
            )
        found = (value(connection, "pragma application_id"), value(connection, "pragma user_version"))
        if found != (APPLICATION_ID, FORM):
            raise _other_form(path, *found)
        connection.execute("pragma synchronous = full")
    except BaseException:
        connection.close()
        raise
    return connection


def _other_form(path: Path, application_id: int, form: int) -> SchemaMismatch:
    if application_id == APPLICATION_ID and form < FORM:
        return SchemaMismatch(
            f"{path} is an event store of the pre-release format {form}; this program needs format {FORM}",
            hint="Read its events with the version that created it, and append them to a new store.",
        )
    return SchemaMismatch(
        f"{path} is not an event store of a supported format",
        hint="If a newer Headwater created it, upgrade the program: pip install --upgrade headwater.",
    )


def append(connection: sqlite3.Connection, append: EncodedAppend, indexes: Sequence[Numbered]) -> AppendResult:
    """Run one append of a group, in the transaction of the group. Its events also get the index terms of these
    indexes."""
    ids = [event.event_id for event in append.events]
    found = dict(
        connection.execute(
            "select event_id, position from event where event_id in (select value from json_each(?))",
            (json.dumps(ids),),
        ).fetchall()
    )
    if found:
        first = found.get(ids[0], 0)
        if [found.get(event_id) for event_id in ids] == list(range(first, first + len(ids))):
            return AppendResult(tuple(range(first, first + len(ids))), True, None, None)
        return AppendResult(None, False, None, min(found))
    if append.condition is not None:
        conflict_position = _conflict_position(connection, append.condition)
        if conflict_position is not None:
            return AppendResult(None, False, conflict_position, None)
    first = head(connection) + 1
    now = microseconds(datetime.now(UTC))
    for position, event in enumerate(append.events, first):
        connection.execute(
            "insert into event values (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                position,
                event.event_id,
                event.type,
                json.dumps(event.tags, ensure_ascii=False),
                event.metadata,
                event.content_type,
                event.payload,
                now,
            ),
        )
        connection.executemany(
            "insert into index_term values (?, ?)",
            [(index_term, position) for index_term in event.index_terms],
        )
        if indexes:
            index_fields(connection, indexes, position, event.payload, event.content_type)
    return AppendResult(tuple(range(first, first + len(ids))), False, None, None)


def index_fields(
    connection: sqlite3.Connection,
    indexes: Sequence[Numbered],
    position: int,
    payload: bytes | None,
    content_type: str | None,
) -> None:
    """Add the index terms of these indexes to an event."""
    data = json_of(payload, content_type)
    index_terms = [(index.index_term(number, data), position) for number, index in indexes]
    connection.executemany(
        "insert into index_term values (?, ?)", [index_term for index_term in index_terms if index_term[0] is not None]
    )


def field_indexes(connection: sqlite3.Connection) -> list[Numbered]:
    """The field indexes, ordered by name."""
    found = connection.execute(
        "select id, name, fields, filled_to >= fill_to, kinds, conditions, combine from field_index order by name"
    )
    return [(number, _field_index(*row)) for number, *row in found]


@lru_cache(maxsize=256)
def _field_index(name: str, fields: str, ready: int, kinds: str, conditions: str, combine: Any) -> FieldIndex:
    parts = conditions_from_json(json.loads(conditions))
    return FieldIndex(name, tuple(json.loads(fields)), bool(ready), tuple(json.loads(kinds)), parts, combine)


def create_field_index(connection: sqlite3.Connection, index: FieldIndex) -> None:
    """Create the definition of an index; an existing equal definition is left unchanged."""
    for _, known in field_indexes(connection):
        if known.name == index.name:
            check_same_definition(known, index)
            return
    connection.execute(
        "insert into field_index (name, fields, kinds, conditions, combine, fill_to, filled_to) "
        "values (?, ?, ?, ?, ?, ?, 0)",
        (
            index.name,
            json.dumps(index.fields),
            json.dumps(index.kinds),
            conditions_as_json(index.conditions),
            index.combine,
            head(connection),
        ),
    )


def fill_field_index(connection: sqlite3.Connection, name: str, batch_size: int) -> bool:
    """Add the index terms of the next batch of older events; returns whether any are left. A dropped index has none."""
    found = connection.execute("select fill_to, filled_to from field_index where name = ?", (name,)).fetchone()
    if found is None or found[1] >= found[0]:
        return False
    (index,) = (numbered for numbered in field_indexes(connection) if numbered[1].name == name)
    fill_to, filled_to = found
    to = min(filled_to + batch_size, fill_to)
    for position, payload, content_type in connection.execute(
        "select position, payload, content_type from event where position > ? and position <= ?", (filled_to, to)
    ).fetchall():
        index_fields(connection, (index,), position, payload, content_type)
    connection.execute("update field_index set filled_to = ? where name = ?", (to, name))
    return bool(to < fill_to)


def drop_field_index(connection: sqlite3.Connection, name: str) -> int | None:
    """Delete the definition of an index; returns its number, or None if it does not exist. `clear_index_terms` then
    removes its index terms."""
    number: int | None = value(connection, "delete from field_index where name = ? returning id", name)
    return number


def clear_index_terms(connection: sqlite3.Connection, number: int, batch_size: int) -> bool:
    """Delete some index terms of a dropped index; returns whether any are left."""
    cleared = connection.execute(
        "delete from index_term where (index_term, position) in ("
        "select index_term, position from index_term where index_term >= ? and index_term < ? limit ?)",
        (f"={number}:", f"={number};", batch_size),
    ).rowcount
    return cleared == batch_size


def _conflict_position(connection: sqlite3.Connection, condition: Condition) -> int | None:
    """The position of the latest match if the condition does not hold, 0 if nothing matches; None if it holds."""
    position = condition.position or 0
    exact = isinstance(condition, LatestMatchIs)
    above = max(position - 1, 0) if exact else position
    latest = next(positions(connection, condition.query, above, None, True), None)
    if latest == (position or None if exact else None):
        return None
    if latest is None:
        latest = next(positions(connection, condition.query, 0, None, True), 0)
    return latest


def matching(
    connection: sqlite3.Connection, query: Query, above: int, before: int | None, backwards: bool
) -> Iterator[StoreEvent]:
    for position in positions(connection, query, above, before, backwards):
        yield event_at(connection, position)


def batch(events: Iterator[StoreEvent], batch_size: int, max_bytes: int) -> list[StoreEvent]:
    """The first events, up to `batch_size` and `max_bytes`; at least one, whatever its size."""
    found: list[StoreEvent] = []
    size = 0
    for event in islice(events, batch_size):
        found.append(event)
        size += size_of(event)
        if size >= max_bytes:
            break
    return found


def positions(
    connection: sqlite3.Connection, query: Query, above: int, before: int | None, backwards: bool
) -> Iterator[int]:
    """The matching positions, in order and distinct, found lazily."""
    check_positions(above, before)
    between = {"above": above, "below": LAST_POSITION if before is None else before}
    of_items = [_of_item(connection, item, between, backwards) for item in query.items or (Item(),)]
    return (position for position, _ in groupby(merge(*of_items, reverse=backwards)))


def _of_item(connection: sqlite3.Connection, item: Item, between: dict[str, int], backwards: bool) -> Iterator[int]:
    tags = [f"#{tag}" for tag in item.tags]
    if item.fields:
        # An index finds events in the same way as a tag.
        ready = (numbered for numbered in field_indexes(connection) if numbered[1].ready)
        tags += [
            index_term for number, index in ready if (index_term := index.index_term_of_item(number, item)) is not None
        ]
    types = [f":{type_}" for type_ in item.types]
    types_are_rarer = False
    if len(tags) + min(len(types), 1) > 1:
        # A bounded count estimates which term is rarest. The types together count as one term.
        few = {index_term: _few(connection, between, index_term) for index_term in (*tags, *types)}
        tags.sort(key=few.__getitem__)
        types_are_rarer = bool(tags) and sum(few[index_term] for index_term in types) < few[tags[0]]
    if tags and not (types and types_are_rarer):
        # Scan the rarest tag, and look up the other tags and the types for each of its events.
        parameters = {"tags": json.dumps(tags[1:]), "types": json.dumps(types) if types else None}
        found = _ordered(connection, MARKED, {"way": tags[0], **parameters, **between}, backwards)
    elif types:
        looked_up = {"tags": json.dumps(tags), "types": None, **between}
        ways = [_ordered(connection, MARKED, {"way": way, **looked_up}, backwards) for way in types]
        found = merge(*ways, reverse=backwards)
    else:
        found = _ordered(connection, ALL, between, backwards)
    if not item.fields:
        return found
    return (position for position in found if item.matches(event_at(connection, position)))


def _few(connection: sqlite3.Connection, between: dict[str, int], way: str) -> int:
    (few,) = connection.execute(FEW, {"way": way, **between}).fetchone()
    return int(few)


def _ordered(
    connection: sqlite3.Connection, statement: str, parameters: dict[str, Any], backwards: bool
) -> Iterator[int]:
    rows = connection.execute(statement + (" desc" if backwards else ""), parameters)
    return (position for (position,) in rows)


def event_at(connection: sqlite3.Connection, position: int) -> StoreEvent:
    row = connection.execute(f"select {EVENT_COLUMNS} from event where position = ?", (position,)).fetchone()
    return StoreEvent._make(
        (
            *row[:4],
            tuple(json.loads(row[4])),
            None if row[5] is None else json.loads(row[5]),
            *row[6:8],
            moment(row[8]),
        )
    )


def move_cursor(connection: sqlite3.Connection, name: str, from_position: int, to_position: int) -> None:
    """Move a cursor forwards. Raises CursorMoved if it is not at `from_position`."""
    moved = connection.execute(
        "update cursor set position = :to where name = :name and position = :from and :to >= :from",
        {"name": name, "from": from_position, "to": to_position},
    ).rowcount
    if not moved:
        actual = value(connection, "select position from cursor where name = ?", name)
        raise CursorMoved(
            f'cursor "{name}" is at {actual}, not at {from_position}',
            hint="The cursor was set, or another reader uses it. Open it again and read from there.",
            detail={"cursor": name, "actual_position": actual},
        )


def open_cursor(connection: sqlite3.Connection, name: str, start_after: int) -> int:
    """The position of a cursor; a missing one is created."""
    connection.execute("insert into cursor values (?, ?) on conflict do nothing", (name, start_after))
    return int(value(connection, "select position from cursor where name = ?", name))


def find_cursor(connection: sqlite3.Connection, name: str) -> int | None:
    found: int | None = value(connection, "select position from cursor where name = ?", name)
    return found


def load_snapshot(connection: sqlite3.Connection, key: SnapshotKey) -> SavedState | None:
    found = connection.execute(
        "select position, state from snapshot where name = ? and query_hash = ? and version = ?", key
    ).fetchone()
    return None if found is None else SavedState(*found)


def save_snapshot(connection: sqlite3.Connection, key: SnapshotKey, saved: SavedState) -> None:
    connection.execute(
        "insert into snapshot values (?, ?, ?, ?, ?) on conflict do update "
        "set position = excluded.position, state = excluded.state where position < excluded.position",
        (*key, saved.position, saved.state),
    )
    connection.execute("delete from snapshot where name = ? and query_hash = ? and version < ?", key)


def forget_snapshots(connection: sqlite3.Connection, name: str) -> int:
    return connection.execute("delete from snapshot where name = ?", (name,)).rowcount


def microseconds(at: datetime) -> int:
    """A time in its stored form."""
    return (at - UNIX_EPOCH) // timedelta(microseconds=1)


def moment(kept: int) -> datetime:
    """A stored time."""
    return UNIX_EPOCH + timedelta(microseconds=kept)


def head(connection: sqlite3.Connection) -> int:
    return int(value(connection, "select coalesce(max(position), 0) from event"))


def value(connection: sqlite3.Connection, statement: str, *parameters: Any) -> Any:
    row = connection.execute(statement, parameters).fetchone()
    return None if row is None else row[0]
