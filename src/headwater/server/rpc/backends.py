"""Where the event stores are that are served: in Postgres, or in a directory of SQLite files."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeVar

from headwater import calls
from headwater.aio import AsyncHeadwater
from headwater.aio.appending import Verdicts
from headwater.aio.subscribing import Subscribing
from headwater.aio.tailing import StoreEvents
from headwater.query import EVERYTHING, Appended, Condition, FieldIndex, Latest, NewStoreEvent, Query, StoreEvent
from headwater.server.rpc.names import Names, SharedNames
from headwater.server.rpc.statuses import NotOffered
from headwater.store import SqliteEventStore, SqliteStores

T = TypeVar("T")
# As many calls can be in SQLite at once; appends that meet there are committed together.
THREADS: Final = 32


class Store(Protocol):
    """One event store."""

    async def append(
        self, events: Sequence[NewStoreEvent], condition: Condition | None = None, *, patience_seconds: float = 30.0
    ) -> Appended: ...

    async def read(
        self,
        query: Query = EVERYTHING,
        *,
        after: int = 0,
        before: int | None = None,
        backwards: bool = False,
        batch_size: int = 100,
        max_bytes: int = 16_777_216,
    ) -> list[StoreEvent]: ...

    async def count(self, query: Query = EVERYTHING, *, after: int = 0, before: int | None = None) -> int: ...

    async def latest(self, query: Query) -> Latest: ...

    async def head(self) -> int: ...

    def subscribe_batches(
        self,
        query: Query = EVERYTHING,
        *,
        after: int | None = None,
        from_end: bool = False,
        batch_size: int = 1000,
        stop_when_caught_up: bool = False,
    ) -> AsyncIterator[Sequence[StoreEvent]]: ...


class Backend(ABC):
    """Event stores, and what is beside them."""

    kind: str
    names: Names

    @abstractmethod
    async def store(self, name: str) -> Store:
        """An event store that exists; TopicNotFound if it does not."""

    @abstractmethod
    async def create(self, name: str, *, if_missing: bool) -> None:
        """Make an event store."""

    @abstractmethod
    async def stores(self) -> list[str]:
        """The names of all event stores."""

    @abstractmethod
    async def ping(self) -> None:
        """Raise LogUnavailable, unless the stores can be reached."""

    @abstractmethod
    async def open_cursor(self, store: str, cursor: str, start_after: int) -> int:
        """Where a cursor stands; made if there is none."""

    @abstractmethod
    async def advance_cursor(self, store: str, cursor: str, *, from_position: int, to_position: int) -> None:
        """Move a cursor on; CursorMoved if it is elsewhere."""

    @abstractmethod
    async def create_index(self, store: str, name: str, fields: Sequence[str]) -> None:
        """Make an index on fields, and fill it."""

    @abstractmethod
    async def drop_index(self, store: str, name: str) -> bool:
        """Drop an index; False if there is none."""

    @abstractmethod
    async def indexes(self, store: str) -> list[FieldIndex]:
        """The indexes of a store."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of what was taken for serving."""


class PostgresBackend(Backend):
    """The event stores of a log."""

    kind = "postgres"

    def __init__(self, log: AsyncHeadwater) -> None:
        self.log = log
        self.names: SharedNames = SharedNames(log)
        self._known: set[str] = set()

    async def store(self, name: str) -> Store:
        if name not in self._known:
            # Only what exists is kept in memory, whatever callers may name.
            await self.log._run(calls.event_store_head(name))
            self._known.add(name)
        return self.log.store(name)

    async def create(self, name: str, *, if_missing: bool) -> None:
        await self.log.create_store(name, if_missing=if_missing)

    async def stores(self) -> list[str]:
        return await self.log._run(calls.event_stores())

    async def ping(self) -> None:
        await self.log._run(calls.head())

    async def open_cursor(self, store: str, cursor: str, start_after: int) -> int:
        opened = await self.log._run(calls.open_cursor(cursor, topics=[store], start_after=start_after))
        return opened.position

    async def advance_cursor(self, store: str, cursor: str, *, from_position: int, to_position: int) -> None:
        await self.log._run(calls.advance_cursor(cursor, from_position=from_position, to_position=to_position))

    async def create_index(self, store: str, name: str, fields: Sequence[str]) -> None:
        await self.store(store)
        await self.log.store(store).create_index(name, fields)

    async def drop_index(self, store: str, name: str) -> bool:
        await self.store(store)
        return await self.log.store(store).drop_index(name)

    async def indexes(self, store: str) -> list[FieldIndex]:
        await self.store(store)
        return await self.log.store(store).indexes()

    async def close(self) -> None:
        await self.names.close()


class SqliteBackend(Backend):
    """The event stores of a directory, which this process has for itself. SQLite is called in threads."""

    kind = "sqlite"

    def __init__(self, stores: SqliteStores) -> None:
        self._stores = stores
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="headwater-sqlite")
        self._known: dict[str, ThreadedStore] = {}
        self.names = Names()

    async def store(self, name: str) -> ThreadedStore:
        if name not in self._known:
            kept = await self._in_thread(self._stores.store, name)
            self._known.setdefault(name, ThreadedStore(kept, self._threads))
        return self._known[name]

    async def create(self, name: str, *, if_missing: bool) -> None:
        await self._in_thread(lambda: self._stores.create_store(name, if_missing=if_missing))

    async def stores(self) -> list[str]:
        return await self._in_thread(self._stores.stores)

    async def ping(self) -> None:
        await self._in_thread(self._stores.stores)

    async def open_cursor(self, store: str, cursor: str, start_after: int) -> int:
        return await (await self.store(store))._open_cursor(cursor, start_after)

    async def advance_cursor(self, store: str, cursor: str, *, from_position: int, to_position: int) -> None:
        await (await self.store(store))._move_cursor(cursor, from_position, to_position)

    async def create_index(self, store: str, name: str, fields: Sequence[str]) -> None:
        await self.store(store)
        raise NotOffered("event stores on SQLite have no indexes on fields", hint="Find events by type and tag.")

    async def drop_index(self, store: str, name: str) -> bool:
        await self.store(store)
        return False

    async def indexes(self, store: str) -> list[FieldIndex]:
        await self.store(store)
        return []

    async def close(self) -> None:
        # Whoever is still in SQLite comes out of it; nobody waits for long there.
        await asyncio.to_thread(self._threads.shutdown)

    async def _in_thread(self, act: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, act, *arguments)


class ThreadedStore(Subscribing):
    """An event store on SQLite for asyncio: what blocks runs in threads, and one task follows for all."""

    def __init__(self, kept: SqliteEventStore, threads: ThreadPoolExecutor) -> None:
        super().__init__(kept.topic)
        self._kept = kept
        self._threads = threads

    async def append(
        self, events: Sequence[NewStoreEvent], condition: Condition | None = None, *, patience_seconds: float = 30.0
    ) -> Appended:
        return await self._in_thread(
            lambda: self._kept.append(events, condition, patience_seconds=patience_seconds),
        )

    async def read(
        self,
        query: Query = EVERYTHING,
        *,
        after: int = 0,
        before: int | None = None,
        backwards: bool = False,
        batch_size: int = 100,
        max_bytes: int = 16_777_216,
    ) -> list[StoreEvent]:
        return await self._in_thread(
            lambda: self._kept.read(
                query, after=after, before=before, backwards=backwards, batch_size=batch_size, max_bytes=max_bytes
            )
        )

    async def count(self, query: Query = EVERYTHING, *, after: int = 0, before: int | None = None) -> int:
        return await self._in_thread(lambda: self._kept.count(query, after=after, before=before))

    async def latest(self, query: Query) -> Latest:
        return await self._in_thread(lambda: self._kept.latest(query))

    async def head(self) -> int:
        return await self._in_thread(self._kept.head)

    async def _send(self, appends: Sequence[calls.EncodedAppend]) -> Verdicts:
        return await self._in_thread(lambda: self._kept._send(appends))

    async def _read_after(self, position: int, batch_size: int) -> StoreEvents:
        return await self.read(after=position, batch_size=batch_size)

    async def _read_batch(
        self, query: Query, after: int, before: int | None, backwards: bool, batch_size: int
    ) -> StoreEvents:
        return await self.read(query, after=after, before=before, backwards=backwards, batch_size=batch_size)

    async def _last_position(self) -> int:
        return await self.head()

    async def _open_cursor(self, name: str, start_after: int) -> int:
        return await self._in_thread(lambda: self._kept._open_cursor(name, start_after))

    async def _find_cursor(self, name: str) -> int | None:
        return await self._in_thread(lambda: self._kept._find_cursor(name))

    async def _move_cursor(self, name: str, from_position: int, to_position: int) -> None:
        await self._in_thread(lambda: self._kept._move_cursor(name, from_position, to_position))

    async def _do_upkeep(self) -> None:
        """A file needs none."""

    async def _patiently(self, act: Callable[[], Awaitable[T]], patience_seconds: float | None) -> T:
        # Nothing is far away here: what fails now fails later.
        return await act()

    async def _in_thread(self, act: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, act)
