"""An event store inside its SQLite file: its tables, how an append goes in, how a query finds what it matches."""

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

from headwater.calls import EncodedAppend
from headwater.errors import CursorMoved, SchemaMismatch
from headwater.eventstore.field_index import FieldIndex, conditions_as_json, conditions_from_json, refuse_other
from headwater.eventstore.query import (
    LAST_POSITION,
    Condition,
    Item,
    LatestMatchIs,
    Query,
    StoreEvent,
    Verdict,
    json_of,
    refuse_beyond,
    size_of,
)

# An index with the number that its marks have.
Numbered = tuple[int, FieldIndex]

BUSY_SECONDS = 10.0
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# What says that a file is one of ours ("HWES"), and in which form.
APPLICATION_ID = 0x48574553
FORM = 3

# Positions count from 1 without a gap: there is one writer, and what is rolled back leaves none.
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
-- What an event is found by: ':' and its type, '#' and each of its tags.
create table mark (
    mark     text    not null,
    position integer not null,
    primary key (mark, position)
) strict, without rowid;
-- Fields of the data by which events are found as well: those in the index have a mark, '=', its id and a hash.
-- Events after `fill_to` have it from the start; of the earlier ones, those up to `filled_to`. An id never means
-- another: marks are cleared away after their index is gone.
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
-- Who competes for events. Every event up to the position was given to somebody, or was no match. (`group` is taken.)
create table consumer_group (
    id         integer primary key,
    name       text    not null unique check (length(name) between 1 and 200),
    position   integer not null check (position >= 0),
    last_token integer not null check (last_token >= 0)
) strict;
-- A worker's right to the events of a token. A table of its own: who looks for those that ran out looks at few rows.
create table lease (
    group_id   integer not null,
    token      integer not null,
    worker     text    not null,
    expires_at integer not null,
    primary key (group_id, token)
) strict, without rowid;
-- Events that were given to somebody and are not done. No token: their lease ran out, and each is to be given again,
-- alone. The attempt counts the tries that were the event's own; the history has all of them.
create table claimed_event (
    group_id integer not null,
    position integer not null,
    token    integer,
    attempt  integer not null check (attempt >= 0),
    history  text    not null,
    primary key (group_id, position)
) strict, without rowid;
create index claimed_event_token on claimed_event (group_id, token, attempt, position);
-- Events that a group has given up on.
create table dead_letter (
    group_id   integer not null,
    position   integer not null,
    attempts   integer not null,
    last_error text    not null,
    history    text    not null,
    died_at    integer not null,
    primary key (group_id, position)
) strict, without rowid;
"""

EVENT = "position, position - 1, event_id, type, tags, metadata, content_type, payload, published_at"
MARKED = """
select m.position from mark m
where m.mark = :way and m.position > :above and m.position < :below
    and (:types is null or exists (
        select 1 from json_each(:types) t join mark n on n.mark = t.value and n.position = m.position
    ))
    and not exists (
        select 1 from json_each(:tags) t
        where not exists (select 1 from mark n where n.mark = t.value and n.position = m.position)
    )
order by m.position
"""
ALL = "select position from event where position > :above and position < :below order by position"
FEW = (
    "select count(*) from (select 1 from mark where mark = :way and position > :above and position < :below limit 256)"
)


def connected(path: Path, *, create: bool) -> sqlite3.Connection:
    """A connection to a file of ours. FULL: a commit that was answered survives the loss of power."""
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
            f"{path} is an event store of form {form}, from before the first release; this program knows form {FORM}",
            hint="Read its events with the program that made it, and append them to a new store.",
        )
    return SchemaMismatch(
        f"{path} is no event store that this program knows",
        hint="Was it made by a newer Headwater? Upgrade the program: pip install --upgrade headwater.",
    )


def append(connection: sqlite3.Connection, append: EncodedAppend, indexes: Sequence[Numbered]) -> Verdict:
    """One append of a group, in the transaction of the group. Its events get the marks of these indexes, too."""
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
            return Verdict(tuple(range(first, first + len(ids))), True, None, None)
        return Verdict(None, False, None, min(found))
    if append.condition is not None:
        moved_to = _moved_to(connection, append.condition)
        if moved_to is not None:
            return Verdict(None, False, moved_to, None)
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
            "insert into mark values (?, ?)",
            [(mark, position) for mark in event.marks],
        )
        if indexes:
            mark_fields(connection, indexes, position, event.payload, event.content_type)
    return Verdict(tuple(range(first, first + len(ids))), False, None, None)


def mark_fields(
    connection: sqlite3.Connection,
    indexes: Sequence[Numbered],
    position: int,
    payload: bytes | None,
    content_type: str | None,
) -> None:
    """Give an event the marks of indexes."""
    data = json_of(payload, content_type)
    marks = [(index.mark(number, data), position) for number, index in indexes]
    connection.executemany("insert into mark values (?, ?)", [mark for mark in marks if mark[0] is not None])


def field_indexes(connection: sqlite3.Connection) -> list[Numbered]:
    """The indexes on fields, in the order of their names."""
    found = connection.execute(
        "select id, name, fields, filled_to >= fill_to, kinds, conditions, combine from field_index order by name"
    )
    return [(number, _field_index(*row)) for number, *row in found]


@lru_cache(maxsize=256)
def _field_index(name: str, fields: str, ready: int, kinds: str, conditions: str, combine: Any) -> FieldIndex:
    parts = conditions_from_json(json.loads(conditions))
    return FieldIndex(name, tuple(json.loads(fields)), bool(ready), tuple(json.loads(kinds)), parts, combine)


def create_field_index(connection: sqlite3.Connection, index: FieldIndex) -> None:
    """Declare an index; one of that name that means the same is left as it is."""
    for _, known in field_indexes(connection):
        if known.name == index.name:
            refuse_other(known, index)
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
    """The marks of the next events from before an index; whether any are left. One that was dropped has none."""
    found = connection.execute("select fill_to, filled_to from field_index where name = ?", (name,)).fetchone()
    if found is None or found[1] >= found[0]:
        return False
    (index,) = (numbered for numbered in field_indexes(connection) if numbered[1].name == name)
    fill_to, filled_to = found
    to = min(filled_to + batch_size, fill_to)
    for position, payload, content_type in connection.execute(
        "select position, payload, content_type from event where position > ? and position <= ?", (filled_to, to)
    ).fetchall():
        mark_fields(connection, (index,), position, payload, content_type)
    connection.execute("update field_index set filled_to = ? where name = ?", (to, name))
    return bool(to < fill_to)


def drop_field_index(connection: sqlite3.Connection, name: str) -> int | None:
    """Do without an index; its number, None if there was none. Its marks are left behind for `clear_marks`."""
    number: int | None = value(connection, "delete from field_index where name = ? returning id", name)
    return number


def clear_marks(connection: sqlite3.Connection, number: int, batch_size: int) -> bool:
    """Clear away some marks of an index that is gone; whether any are left."""
    cleared = connection.execute(
        "delete from mark where (mark, position) in ("
        "select mark, position from mark where mark >= ? and mark < ? limit ?)",
        (f"={number}:", f"={number};", batch_size),
    ).rowcount
    return cleared == batch_size


def _moved_to(connection: sqlite3.Connection, condition: Condition) -> int | None:
    """Where the latest match is if the condition is false, 0 if there is none; None if it is true."""
    seen = condition.position or 0
    exact = isinstance(condition, LatestMatchIs)
    above = max(seen - 1, 0) if exact else seen
    latest = next(positions(connection, condition.query, above, None, True), None)
    if latest == (seen or None if exact else None):
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
    """The first of these, up to so many and so many bytes; one of them whatever its size."""
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
    """The positions that match, in order, each once, found as they are asked for."""
    refuse_beyond(above, before)
    between = {"above": above, "below": LAST_POSITION if before is None else before}
    of_items = [_of_item(connection, item, between, backwards) for item in query.items or (Item(),)]
    return (position for position, _ in groupby(merge(*of_items, reverse=backwards)))


def _of_item(connection: sqlite3.Connection, item: Item, between: dict[str, int], backwards: bool) -> Iterator[int]:
    tags = [f"#{tag}" for tag in item.tags]
    if item.fields:
        # An index leads to events as a tag does.
        ready = (numbered for numbered in field_indexes(connection) if numbered[1].ready)
        tags += [mark for number, index in ready if (mark := index.mark_of_item(number, item)) is not None]
    types = [f":{type_}" for type_ in item.types]
    types_are_rarer = False
    if len(tags) + min(len(types), 1) > 1:
        # Counting a few tells what is rare from what is common. The types together are one way.
        few = {mark: _few(connection, between, mark) for mark in (*tags, *types)}
        tags.sort(key=few.__getitem__)
        types_are_rarer = bool(tags) and sum(few[mark] for mark in types) < few[tags[0]]
    if tags and not (types and types_are_rarer):
        # The rarest tag leads; the others and the types are looked up for each of its events.
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
    row = connection.execute(f"select {EVENT} from event where position = ?", (position,)).fetchone()
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
    """Move a cursor on, never back; CursorMoved if it is elsewhere."""
    moved = connection.execute(
        "update cursor set position = :to where name = :name and position = :from and :to >= :from",
        {"name": name, "from": from_position, "to": to_position},
    ).rowcount
    if not moved:
        actual = value(connection, "select position from cursor where name = ?", name)
        raise CursorMoved(
            f'cursor "{name}" is at {actual}, not at {from_position}',
            hint="Somebody set it, or another reader uses it. Open it again and read from there.",
            detail={"cursor": name, "actual_position": actual},
        )


def microseconds(at: datetime) -> int:
    """A time as it is kept."""
    return (at - EPOCH) // timedelta(microseconds=1)


def moment(kept: int) -> datetime:
    """A time that was kept."""
    return EPOCH + timedelta(microseconds=kept)


def head(connection: sqlite3.Connection) -> int:
    return int(value(connection, "select coalesce(max(position), 0) from event"))


def value(connection: sqlite3.Connection, statement: str, *parameters: Any) -> Any:
    row = connection.execute(statement, parameters).fetchone()
    return None if row is None else row[0]
