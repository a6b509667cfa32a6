"""Backends of the event store services: Postgres, or a directory of SQLite files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from headwater.aio import AsyncHeadwater
from headwater.calls import log as log_calls
from headwater.calls import store as store_calls
from headwater.errors import TopicNotFound
from headwater.eventstore import AsyncSqliteEventStore, AsyncSqliteStores
from headwater.eventstore.postgres import EventStore
from headwater.servers.grpc.subscriber_names import SharedSubscriberNames, SubscriberNames

Store = EventStore | AsyncSqliteEventStore


class Backend(ABC):
    """Access to event stores, their subscriber names and dead letters."""

    kind: str
    names: SubscriberNames

    @abstractmethod
    async def store(self, name: str) -> Store:
        """Return an event store. Raises TopicNotFound if it does not exist."""

    @abstractmethod
    async def create(self, name: str, *, if_missing: bool) -> None:
        """Create an event store."""

    @abstractmethod
    async def stores(self) -> list[str]:
        """The names of all event stores."""

    @abstractmethod
    async def redrive(self, name: str, queue: str, positions: Sequence[int] | None, account: str | None) -> int:
        """Redrive dead letters of a queue (None: all), audited for the account; returns their number."""

    @abstractmethod
    async def ping(self) -> None:
        """Raise LogUnavailable if the stores cannot be reached."""

    @abstractmethod
    async def close(self) -> None:
        """Release the resources of the server."""


class PostgresBackend(Backend):
    """The event stores of a log."""

    kind = "postgres"

    def __init__(self, log: AsyncHeadwater) -> None:
        self.log = log
        self.names: SharedSubscriberNames = SharedSubscriberNames(log)
        self._known: set[str] = set()

    async def store(self, name: str) -> EventStore:
        if name not in self._known:
            # Only existing stores are remembered, so that clients cannot fill the memory.
            if name not in await self.stores():
                raise TopicNotFound(
                    f'event store "{name}" does not exist', hint="Create it with CreateStore.", detail={"topic": name}
                )
            self._known.add(name)
        return self.log.store(name)

    async def create(self, name: str, *, if_missing: bool) -> None:
        await self.log.create_store(name, if_missing=if_missing)

    async def stores(self) -> list[str]:
        return await self.log.run(store_calls.event_stores())

    async def redrive(self, name: str, queue: str, positions: Sequence[int] | None, account: str | None) -> int:
        store = await self.store(name)
        details: dict[str, Any] = {"positions": "all" if positions is None else positions[:1000]}
        async with self.log.audited(account, "queue.redrive", queue, details) as connection:
            details["count"] = count = await store.redrive(queue, positions=positions, connection=connection)
        return count

    async def ping(self) -> None:
        await self.log.run(log_calls.head())

    async def close(self) -> None:
        await self.names.close()


class SqliteBackend(Backend):
    """The event stores of a directory, which this process uses exclusively."""

    kind = "sqlite"

    def __init__(self, stores: AsyncSqliteStores) -> None:
        self._stores = stores
        self.names = SubscriberNames()

    async def store(self, name: str) -> AsyncSqliteEventStore:
        return self._stores.store(name)

    async def create(self, name: str, *, if_missing: bool) -> None:
        await self._stores.create_store(name, if_missing=if_missing)

    async def stores(self) -> list[str]:
        return self._stores.stores()

    async def redrive(self, name: str, queue: str, positions: Sequence[int] | None, account: str | None) -> int:
        # No audit: there are no accounts.
        return await (await self.store(name)).redrive(queue, positions=positions)

    async def ping(self) -> None:
        self._stores.stores()

    async def close(self) -> None:
        """Nothing to release: the caller that opened the directory closes it."""
