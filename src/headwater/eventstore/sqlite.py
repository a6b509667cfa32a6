"""The event store on SQLite: a directory with one file for each store, for one process, without a server."""

from __future__ import annotations

import sqlite3
from collections.abc import (
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from headwater.calls.encoding import checked_text
from headwater.calls.store import EncodedAppend, encode_append
from headwater.errors import EventTooLarge, InvalidRequest
from headwater.eventstore import sqlite_queues as queues
from headwater.eventstore import sqlite_rows as rows
from headwater.eventstore.decider import SavedState, SnapshotKey
from headwater.eventstore.field_index import Combine, FieldIndex, IndexCondition, Kind, define_index
from headwater.eventstore.group_commit import AppendResults, new_event_ids
from headwater.eventstore.limits import LEASE_SECONDS
from headwater.eventstore.live_reader import StoreEvents
from headwater.eventstore.query import (
    EVERYTHING,
    Appended,
    Condition,
    Latest,
    NewStoreEvent,
    Query,
    StoreEvent,
    StoreLease,
    StorePage,
    appended_or_raise,
)
from headwater.eventstore.sqlite_access import AsyncFileAccess, Handle, call_in_thread
from headwater.eventstore.sqlite_file import SqliteDirectory, SqliteFile
from headwater.eventstore.sqlite_queues import NextEvents
from headwater.eventstore.subscribe import StoreHandler, StoreSubscriptions
from headwater.queue.model import DeadLetter

T = TypeVar("T")

MAX_CURSOR_NAME = 200
MAX_PAYLOAD_BYTES = 1_048_576
MAX_METADATA_BYTES = 65_536
MAX_SNAPSHOT_BYTES = 16_777_216
# A file has no failover and never reassigns a position.
ONLY_EPOCH = 0
CLEAR_INDEX_TERMS = 10_000


class AsyncSqliteEventStore(StoreSubscriptions):
    """An event store in a file. Its methods have the same meaning as those of the event store on Postgres."""

    def __init__(self, file: SqliteFile) -> None:
        super().__init__(file.topic)
        self._access = AsyncFileAccess(file)

    async def append(
        self,
        events: NewStoreEvent | Sequence[NewStoreEvent],
        condition: Condition | None = None,
        *,
        patience_seconds: float = 30.0,
    ) -> Appended:
        """Append events atomically if the condition holds; raises AppendConflict if it does not.

        Appending events with ids is idempotent: a repeated append returns the first result.
        """
        encoded = _encoded(events, condition)
        return appended_or_raise(await self._group_commit.append(encoded, timeout_seconds=patience_seconds), condition)

    async def read(
        self,
        query: Query = EVERYTHING,
        *,
        after: int = 0,
        before: int | None = None,
        backwards: bool = False,
        batch_size: int = 100,
        max_bytes: int = 16_777_216,
        epoch: int | None = None,
    ) -> list[StoreEvent]:
        """A batch of the matching events after one position and before another; backwards: newest first.

        `epoch` is ignored, since a file has one epoch; it exists for compatibility with stores on Postgres.
        """
        if batch_size < 1:
            raise InvalidRequest(f"invalid batch_size {batch_size}: expected at least 1")
        return await self._access.read(_batch, query, after, before, backwards, batch_size, max_bytes)

    async def read_page(
        self,
        query: Query = EVERYTHING,
        *,
        after: int = 0,
        before: int | None = None,
        backwards: bool = False,
        batch_size: int = 100,
        max_bytes: int = 16_777_216,
        epoch: int | None = None,
    ) -> StorePage:
        """Like read, with the epoch, which is always 0."""
        events = await self.read(
            query, after=after, before=before, backwards=backwards, batch_size=batch_size, max_bytes=max_bytes
        )
        return StorePage(events, ONLY_EPOCH)

    async def count(self, query: Query = EVERYTHING, *, after: int = 0, before: int | None = None) -> int:
        """The number of matching events."""
        return await self._access.read(
            lambda connection: sum(1 for _ in rows.positions(connection, query, after, before, False))
        )

    async def latest(self, query: Query) -> Latest:
        """The latest event of each item of the query, and the position of the latest of all."""
        found = await self._access.read(
            lambda connection: tuple(
                next(rows.matching(connection, Query((item,)), 0, None, True), None) for item in query.items
            )
        )
        return Latest(found, max((event.position for event in found if event is not None), default=0))

    async def head(self) -> int:
        """The position of the last event; 0 if the store is empty."""
        return await self._access.read(rows.head)

    async def create_index(
        self,
        name: str,
        fields: Sequence[str] | Mapping[str, Kind],
        *,
        conditions: Sequence[IndexCondition] = (),
        combine: Combine = "and",
        batch_size: int = 1000,
    ) -> None:
        """Create an index for queries on all of these fields, and possibly more. Appends continue meanwhile.

        Returns when the index is filled. If it is interrupted, call it again: it continues where it stopped.
        """
        await self._access.write(rows.create_field_index, define_index(name, fields, conditions, combine))
        while await self._access.write(rows.fill_field_index, name, batch_size):
            pass

    async def drop_index(self, name: str) -> bool:
        """Drop an index and free its space. False if it does not exist."""
        number = await self._access.write(rows.drop_field_index, name)
        while number is not None and await self._access.write(rows.clear_index_terms, number, CLEAR_INDEX_TERMS):
            pass
        return number is not None

    async def indexes(self) -> list[FieldIndex]:
        """The field indexes."""
        return [index for _, index in await self._access.read(rows.field_indexes)]

    async def index(self, name: str) -> FieldIndex | None:
        """The index with this name; None if it does not exist."""
        return next((index for index in await self.indexes() if index.name == name), None)

    async def load_snapshot(self, key: SnapshotKey) -> SavedState | None:
        """The saved state of a decider; None if there is none of this version."""
        return await self._access.read(rows.load_snapshot, key)

    async def save_snapshot(self, key: SnapshotKey, saved: SavedState) -> None:
        """Save a state for later decisions, unless a later one is saved. Deletes states of earlier versions."""
        _refuse_too_large("a snapshot", len(saved.state), MAX_SNAPSHOT_BYTES)
        await self._access.write(rows.save_snapshot, key, saved)

    async def forget_snapshots(self, name: str) -> int:
        """Delete all saved states of a name; returns their number."""
        return await self._access.write(rows.forget_snapshots, name)

    async def dead_letters(
        self, queue: str, *, positions: Sequence[int] | None = None, after: int = 0, batch_size: int = 100
    ) -> list[DeadLetter]:
        """The dead letters of a queue, in order; all, or those at `positions`."""
        return await self._access.read(queues.dead_letters, self.topic, queue, positions, after, batch_size)

    async def redrive(self, queue: str, *, positions: Sequence[int] | None = None) -> int:
        """Retry dead letters with a new set of attempts, all or those at `positions`; returns their number."""
        return await self._access.write(queues.redrive, queue, positions)

    async def close(self) -> None:
        """Close the file. Later calls raise LogUnavailable."""
        await self._access.close()

    async def _send(self, appends: Sequence[EncodedAppend]) -> AppendResults:
        return await self._access.write(_append_all, appends)

    async def _read_after(self, position: int, batch_size: int, epoch: int) -> StoreEvents:
        return await self.read(after=position, batch_size=batch_size)

    async def _end(self) -> tuple[int, int]:
        return await self.head(), ONLY_EPOCH

    async def resumed_position(self, epoch: int | None, position: int) -> tuple[int, int]:
        return position, ONLY_EPOCH

    async def open_cursor(self, name: str, start_after: int) -> int:
        if not 1 <= len(checked_text(name, "cursor name")) <= MAX_CURSOR_NAME:
            raise InvalidRequest(f"invalid cursor name: expected 1 to {MAX_CURSOR_NAME} characters")
        if start_after < 0:
            raise InvalidRequest(f"invalid position {start_after}: expected at least 0")
        return await self._access.write(rows.open_cursor, name, start_after)

    async def _find_cursor(self, name: str) -> int | None:
        return await self._access.read(rows.find_cursor, name)

    async def move_cursor(self, name: str, from_position: int, to_position: int, epoch: int | None = None) -> None:
        await self._access.write(rows.move_cursor, name, from_position, to_position)

    async def _apply(
        self,
        handler: StoreHandler,
        events: Sequence[StoreEvent],
        cursor: str,
        from_position: int,
        to_position: int,
        epoch: int,
    ) -> None:
        await self._access.write(_apply, self._access.handle(handler), events, cursor, from_position, to_position)

    async def has_queue(self, queue: str) -> bool:
        return await self._access.read(queues.has_queue, queue)

    async def _open_queue(self, queue: str) -> None:
        if not await self.has_queue(queue):
            await self._access.write(queues.open_queue, queue)

    async def _reap(self, queue: str) -> None:
        if await self._access.read(queues.has_lapsed, queue):
            await self._access.write(queues.reap, queue)

    async def _claim(
        self, queue: str, query: Query, worker: str, batch_size: int, lease_seconds: float | None
    ) -> StoreLease | None:
        # A reader connection searches: finding nothing does not block the writer, and a long search delays no append.
        async with self._access.claiming:
            while (found := await self._look(queue, query, batch_size)) is not None:
                lease = await self._take(found, worker, lease_seconds)
                if lease is not None:
                    return lease
        return None

    async def _look(self, queue: str, query: Query, batch_size: int) -> NextEvents | None:
        return await self._access.read(queues.find_next, queue, query, batch_size)

    async def _take(self, found: NextEvents, worker: str, lease_seconds: float | None) -> StoreLease | None:
        seconds = LEASE_SECONDS if lease_seconds is None else lease_seconds
        return await self._access.write(queues.take, found, worker, seconds)

    async def _settle(self, lease: StoreLease) -> None:
        await self._access.write(queues.settle, lease)

    async def _run_maintenance(self) -> None:
        """A file needs no maintenance."""

    async def _patiently(self, act: Callable[[], Awaitable[T]], patience_seconds: float | None) -> T:
        # A file has no transient failures to retry.
        return await act()


class AsyncSqliteStores:
    """The event stores in one directory, for one process at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = SqliteDirectory(directory)
        self._stores: dict[str, AsyncSqliteEventStore] = {}

    async def create_store(self, name: str, *, if_missing: bool = False) -> AsyncSqliteEventStore:
        """Create an event store. Raises TopicExists if it exists, unless `if_missing`."""
        await call_in_thread(self._directory.create, name, if_missing=if_missing)
        return self.store(name)

    def store(self, name: str) -> AsyncSqliteEventStore:
        """An existing event store."""
        file = self._directory.file(name)
        if name not in self._stores:
            self._stores.setdefault(name, AsyncSqliteEventStore(file))
        return self._stores[name]

    def stores(self) -> list[str]:
        """The names of the event stores."""
        return self._directory.names()

    async def close(self) -> None:
        await call_in_thread(self._directory.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _encoded(events: NewStoreEvent | Sequence[NewStoreEvent], condition: Condition | None) -> EncodedAppend:
    """Validate and encode an append. Raises EventTooLarge above the limits of a file."""
    batch = [events] if isinstance(events, NewStoreEvent) else list(events)
    encoded = encode_append(batch, condition, new_event_ids(len(batch)))
    for event in encoded.events:
        _refuse_too_large("a payload", len(event.payload or b""), MAX_PAYLOAD_BYTES)
        _refuse_too_large("metadata", len((event.metadata or "").encode()), MAX_METADATA_BYTES)
    return encoded


def _batch(
    connection: sqlite3.Connection,
    query: Query,
    after: int,
    before: int | None,
    backwards: bool,
    batch_size: int,
    max_bytes: int,
) -> list[StoreEvent]:
    return rows.batch(rows.matching(connection, query, after, before, backwards), batch_size, max_bytes)


def _append_all(connection: sqlite3.Connection, appends: Sequence[EncodedAppend]) -> AppendResults:
    indexes = rows.field_indexes(connection)
    return [rows.append(connection, append, indexes) for append in appends]


def _apply(
    connection: sqlite3.Connection,
    handle: Handle,
    events: Sequence[StoreEvent],
    cursor: str,
    from_position: int,
    to_position: int,
) -> None:
    rows.move_cursor(connection, cursor, from_position, to_position)
    handle(connection, events)


def _refuse_too_large(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise EventTooLarge(
            f"{what} of {size} bytes exceeds the limit of {limit} bytes of event stores on SQLite",
            hint="Store large data elsewhere, and a reference to it in the event.",
            detail={"bytes": size, "limit": limit},
        )
