"""Event stores on SQLite for asyncio: the same stores, used in threads.

A write waits for the writer lock in the event loop, and then runs in the writer thread of its store. So waiting writes
do not occupy the threads for reads, which the handler of a projection may need while the others wait for it.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from headwater.calls.store import EncodedAppend
from headwater.eventstore.decider import SavedState, SnapshotKey
from headwater.eventstore.field_index import Combine, FieldIndex, IndexCondition, Kind, define_index
from headwater.eventstore.group_commit import AppendResults
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
from headwater.eventstore.recent_events import MAX_BYTES
from headwater.eventstore.sqlite import ONLY_EPOCH, SqliteEventStore, SqliteStores, busy
from headwater.eventstore.sqlite_rows import BUSY_SECONDS
from headwater.eventstore.subscribe import StoreHandler, StoreSubscriptions
from headwater.queue.model import DeadLetter

T = TypeVar("T")


class Writer:
    """The writer of a store: a lock and a thread."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._turns = 0
        self._thread = ThreadPoolExecutor(1, "headwater-store")

    async def run(self, act: Callable[..., T], *arguments: Any) -> T:
        """Run `act` in the writer thread. Raises LogUnavailable if another writer holds the lock for too long."""
        await self._take()
        try:
            bound = partial(copy_context().run, act, *arguments)
            return await asyncio.get_running_loop().run_in_executor(self._thread, bound)
        finally:
            self._turn.release()

    async def _take(self) -> None:
        while True:
            # A long wait is not an error while other writers make progress.
            turns = self._turns
            try:
                async with asyncio.timeout(BUSY_SECONDS):
                    await self._turn.acquire()
            except TimeoutError:
                if self._turns == turns:
                    raise busy() from None
            else:
                self._turns += 1
                return


class AsyncSqliteEventStore(StoreSubscriptions):
    """An event store in a file. Its methods have the same meaning as those of the event store on Postgres."""

    def __init__(self, store: SqliteEventStore) -> None:
        super().__init__(store.topic)
        self._store = store
        self._writer = Writer()
        # One competing consumer searches at a time: all would find the same events.
        self._claiming = asyncio.Lock()

    async def append(
        self,
        events: NewStoreEvent | Sequence[NewStoreEvent],
        condition: Condition | None = None,
        *,
        patience_seconds: float = 30.0,
    ) -> Appended:
        """Append events atomically if the condition holds; raises AppendConflict if it does not."""
        encoded = self._store.encoded(events, condition)
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
        return await asyncio.to_thread(
            self._store.read,
            query,
            after=after,
            before=before,
            backwards=backwards,
            batch_size=batch_size,
            max_bytes=max_bytes,
        )

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
        return await asyncio.to_thread(self._store.count, query, after=after, before=before)

    async def latest(self, query: Query) -> Latest:
        """The latest event of each item of the query, and the position of the latest of all."""
        return await asyncio.to_thread(self._store.latest, query)

    async def head(self) -> int:
        """The position of the last event; 0 if the store is empty."""
        return await asyncio.to_thread(self._store.head)

    async def create_index(
        self,
        name: str,
        fields: Sequence[str] | Mapping[str, Kind],
        *,
        conditions: Sequence[IndexCondition] = (),
        combine: Combine = "and",
        batch_size: int = 1000,
    ) -> None:
        """Create an index for queries on all of these fields. Appends continue meanwhile."""
        await self._writer.run(self._store._declare_index, define_index(name, fields, conditions, combine))
        while await self._writer.run(self._store._fill_index, name, batch_size):
            pass

    async def drop_index(self, name: str) -> bool:
        """Drop an index and free its space. False if it does not exist."""
        number = await self._writer.run(self._store._forget_index, name)
        while number is not None and await self._writer.run(self._store._clear_index_terms, number):
            pass
        return number is not None

    async def indexes(self) -> list[FieldIndex]:
        """The field indexes."""
        return await asyncio.to_thread(self._store.indexes)

    async def index(self, name: str) -> FieldIndex | None:
        """The index with this name; None if it does not exist."""
        return await asyncio.to_thread(self._store.index, name)

    async def load_snapshot(self, key: SnapshotKey) -> SavedState | None:
        """The saved state of a decider; None if there is none of this version."""
        return await asyncio.to_thread(self._store.load_snapshot, key)

    async def save_snapshot(self, key: SnapshotKey, saved: SavedState) -> None:
        """Save a state for later decisions, unless a later one is saved."""
        await self._writer.run(self._store.save_snapshot, key, saved)

    async def forget_snapshots(self, name: str) -> int:
        """Delete all saved states of a name; returns their number."""
        return await self._writer.run(self._store.forget_snapshots, name)

    async def dead_letters(
        self, queue: str, *, positions: Sequence[int] | None = None, after: int = 0, batch_size: int = 100
    ) -> list[DeadLetter]:
        """The dead letters of a queue, in order; all, or those at `positions`."""
        return await asyncio.to_thread(
            self._store.dead_letters, queue, positions=positions, after=after, batch_size=batch_size
        )

    async def redrive(self, queue: str, *, positions: Sequence[int] | None = None) -> int:
        """Retry dead letters with a new set of attempts, all or those at `positions`; returns their number."""
        return await self._writer.run(partial(self._store.redrive, queue, positions=positions))

    async def _send(self, appends: Sequence[EncodedAppend]) -> AppendResults:
        return await self._writer.run(self._store._send, appends)

    async def _read_after(self, position: int, batch_size: int, epoch: int) -> StoreEvents:
        return await asyncio.to_thread(self._store._read_after, position, batch_size, epoch)

    async def _read_batch(
        self,
        query: Query,
        after: int,
        before: int | None,
        backwards: bool,
        batch_size: int,
        max_bytes: int = MAX_BYTES,
        epoch: int | None = None,
    ) -> StoreEvents:
        return await asyncio.to_thread(self._store._read_batch, query, after, before, backwards, batch_size, max_bytes)

    async def _end(self) -> tuple[int, int]:
        return await self.head(), ONLY_EPOCH

    async def _resume(self, epoch: int | None, position: int) -> tuple[int, int]:
        return position, ONLY_EPOCH

    async def _open_cursor(self, name: str, start_after: int) -> int:
        return await self._writer.run(self._store._open_cursor, name, start_after)

    async def _find_cursor(self, name: str) -> int | None:
        return await asyncio.to_thread(self._store._find_cursor, name)

    async def _move_cursor(self, name: str, from_position: int, to_position: int, epoch: int | None = None) -> None:
        await self._writer.run(self._store._move_cursor, name, from_position, to_position)

    async def _apply(
        self,
        handler: StoreHandler,
        events: Sequence[StoreEvent],
        cursor: str,
        from_position: int,
        to_position: int,
        epoch: int,
    ) -> None:
        loop = asyncio.get_running_loop()

        def handle(connection: sqlite3.Connection, handed: Sequence[StoreEvent]) -> None:
            # The transaction belongs to the thread; the handler runs in the event loop, which is not blocked.
            asyncio.run_coroutine_threadsafe(_awaited(handler(connection, handed)), loop).result()

        await self._writer.run(self._store._apply, handle, events, cursor, from_position, to_position, epoch)

    async def _has_queue(self, queue: str) -> bool:
        return await asyncio.to_thread(self._store._has_queue, queue)

    async def _open_queue(self, queue: str) -> None:
        if not await self._has_queue(queue):
            await self._writer.run(self._store._make_queue, queue)

    async def _reap(self, queue: str) -> None:
        if await asyncio.to_thread(self._store._has_lapsed, queue):
            await self._writer.run(self._store._give_back, queue)

    async def _claim(
        self, queue: str, query: Query, worker: str, batch_size: int, lease_seconds: float | None
    ) -> StoreLease | None:
        async with self._claiming:
            while (found := await asyncio.to_thread(self._store._look, queue, query, batch_size)) is not None:
                lease = await self._writer.run(self._store._take, found, worker, lease_seconds)
                if lease is not None:
                    return lease
        return None

    async def _settle(self, lease: StoreLease) -> None:
        await self._writer.run(self._store._settle, lease)

    async def _run_maintenance(self) -> None:
        """A file needs no maintenance."""

    async def _patiently(self, act: Callable[[], Awaitable[T]], patience_seconds: float | None) -> T:
        # A file has no transient failures to retry.
        return await act()


async def _awaited(handling: Awaitable[None]) -> None:
    await handling


class AsyncSqliteStores:
    """The event stores in one directory, for one process at a time."""

    def __init__(self, directory: Path) -> None:
        self._blocking = SqliteStores(directory)
        self._stores: dict[str, AsyncSqliteEventStore] = {}

    async def create_store(self, name: str, *, if_missing: bool = False) -> AsyncSqliteEventStore:
        """Create an event store. Raises TopicExists if it exists, unless `if_missing`."""
        await asyncio.to_thread(self._blocking.create_store, name, if_missing=if_missing)
        return self.store(name)

    def store(self, name: str) -> AsyncSqliteEventStore:
        """An existing event store."""
        found = self._blocking.store(name)
        if name not in self._stores:
            self._stores[name] = AsyncSqliteEventStore(found)
        return self._stores[name]

    def stores(self) -> list[str]:
        """The names of the event stores."""
        return self._blocking.stores()

    async def close(self) -> None:
        await asyncio.to_thread(self._blocking.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
