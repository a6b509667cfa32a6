"""An event store inside its SQLite file: its tables, how an append goes in, how a query finds what it matches."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from heapq import merge
from itertools import groupby
from pathlib import Path
from typing import Any

from headwater.calls import EncodedAppend
from headwater.errors import SchemaMismatch
from headwater.query import Condition, Item, LatestMatchIs, Query, StoreEvent, Verdict

LAST_POSITION = (1 << 63) - 1
BUSY_SECONDS = 10.0
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# What says that a file is one of ours ("HWES"), and in which form.
APPLICATION_ID = 0x48574553
FORM = 1

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
create table cursor (
    name     text    primary key,
    position integer not null check (position >= 0)
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
        f"file:{path}?mode={'rwc' if create else 'rw'}",
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
            raise SchemaMismatch(
                f"{path} is no event store that this program knows",
                hint="Was it made by a newer Headwater? Upgrade the program: pip install --upgrade headwater.",
            )
        connection.execute("pragma synchronous = full")
    except BaseException:
        connection.close()
        raise
    return connection


def append(connection: sqlite3.Connection, append: EncodedAppend) -> Verdict:
    """One append of a group, in the transaction of the group."""
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
    now = (datetime.now(UTC) - EPOCH) // timedelta(microseconds=1)
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
            [(f":{event.type}", position), *((f"#{tag}", position) for tag in event.tags)],
        )
    return Verdict(tuple(range(first, first + len(ids))), False, None, None)


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
        yield _event(connection, position)


def positions(
    connection: sqlite3.Connection, query: Query, above: int, before: int | None, backwards: bool
) -> Iterator[int]:
    """The positions that match, in order, each once, found as they are asked for."""
    between = {"above": above, "below": LAST_POSITION if before is None else before}
    of_items = [_of_item(connection, item, between, backwards) for item in query.items or (Item(),)]
    return (position for position, _ in groupby(merge(*of_items, reverse=backwards)))


def _of_item(connection: sqlite3.Connection, item: Item, between: dict[str, int], backwards: bool) -> Iterator[int]:
    tags = [f"#{tag}" for tag in item.tags]
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
    return (position for position in found if item.matches(_event(connection, position)))


def _few(connection: sqlite3.Connection, between: dict[str, int], way: str) -> int:
    (few,) = connection.execute(FEW, {"way": way, **between}).fetchone()
    return int(few)


def _ordered(
    connection: sqlite3.Connection, statement: str, parameters: dict[str, Any], backwards: bool
) -> Iterator[int]:
    rows = connection.execute(statement + (" desc" if backwards else ""), parameters)
    return (position for (position,) in rows)


def _event(connection: sqlite3.Connection, position: int) -> StoreEvent:
    row = connection.execute(f"select {EVENT} from event where position = ?", (position,)).fetchone()
    return StoreEvent._make(
        (
            *row[:4],
            tuple(json.loads(row[4])),
            None if row[5] is None else json.loads(row[5]),
            *row[6:8],
            EPOCH + timedelta(microseconds=row[8]),
        )
    )


def head(connection: sqlite3.Connection) -> int:
    return int(value(connection, "select coalesce(max(position), 0) from event"))


def value(connection: sqlite3.Connection, statement: str, *parameters: Any) -> Any:
    row = connection.execute(statement, parameters).fetchone()
    return None if row is None else row[0]
