"""Where the event stores are that are served: in Postgres, or in a directory of SQLite files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from headwater import calls
from headwater.aio import AsyncHeadwater
from headwater.errors import TopicNotFound
from headwater.eventstore import AsyncSqliteEventStore, AsyncSqliteStores
from headwater.eventstore.postgres import EventStore
from headwater.servers.grpc.subscriber_names import Names, SharedNames

Store = EventStore | AsyncSqliteEventStore


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
    async def redrive(self, name: str, group: str, positions: Sequence[int] | None, account: str | None) -> int:
        """Give dead letters of a group a fresh set of tries, all or those named, and note for whom; how many."""

    @abstractmethod
    async def ping(self) -> None:
        """Raise LogUnavailable, unless the stores can be reached."""

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

    async def store(self, name: str) -> EventStore:
        if name not in self._known:
            # Only what exists is kept in memory, whatever callers may name.
            if name not in await self.stores():
                raise TopicNotFound(
                    f'there is no event store "{name}"', hint="Create it: CreateStore.", detail={"topic": name}
                )
            self._known.add(name)
        return self.log.store(name)

    async def create(self, name: str, *, if_missing: bool) -> None:
        await self.log.create_store(name, if_missing=if_missing)

    async def stores(self) -> list[str]:
        return await self.log._run(calls.event_stores())

    async def redrive(self, name: str, group: str, positions: Sequence[int] | None, account: str | None) -> int:
        store = await self.store(name)
        told: dict[str, Any] = {"positions": "all" if positions is None else positions[:1000]}
        async with self.log.audited(account, "group.redrive", group, told) as connection:
            told["count"] = count = await store.redrive(group, positions=positions, connection=connection)
        return count

    async def ping(self) -> None:
        await self.log._run(calls.head())

    async def close(self) -> None:
        await self.names.close()


class SqliteBackend(Backend):
    """The event stores of a directory, which this process has for itself."""

    kind = "sqlite"

    def __init__(self, stores: AsyncSqliteStores) -> None:
        self._stores = stores
        self.names = Names()

    async def store(self, name: str) -> AsyncSqliteEventStore:
        return self._stores.store(name)

    async def create(self, name: str, *, if_missing: bool) -> None:
        await self._stores.create_store(name, if_missing=if_missing)

    async def stores(self) -> list[str]:
        return self._stores.stores()

    async def redrive(self, name: str, group: str, positions: Sequence[int] | None, account: str | None) -> int:
        # Nobody has an account here.
        return await (await self.store(name)).redrive(group, positions=positions)

    async def ping(self) -> None:
        self._stores.stores()

    async def close(self) -> None:
        """Whoever opened the directory closes it."""
