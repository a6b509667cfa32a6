"""The event stores of the log. Loads the code of event stores on first use: most programs do not need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg_pool import AsyncConnectionPool

from headwater.database.connection import CallRunner, PooledConnection

if TYPE_CHECKING:
    from headwater.eventstore.postgres import EventStore


class EventStoreApi(CallRunner):
    """The event stores of the log."""

    def __init__(self, pool: AsyncConnectionPool[PooledConnection]) -> None:
        super().__init__(pool)
        self._stores: dict[str, EventStore] = {}

    async def create_store(
        self,
        name: str,
        *,
        max_payload_bytes: int | None = None,
        max_header_bytes: int | None = None,
        if_missing: bool = False,
    ) -> EventStore:
        """Create an event store: a topic whose events are found by query and appended under conditions."""
        from headwater.calls import store as store_calls

        call = store_calls.create_event_store(
            name, max_payload_bytes=max_payload_bytes, max_header_bytes=max_header_bytes, if_missing=if_missing
        )
        await self._run(call)
        return self.store(name)

    def store(self, name: str) -> EventStore:
        """An existing event store. Does not access the database: a wrong name is an error on first use."""
        from headwater.eventstore.postgres import EventStore

        return self._stores.setdefault(name, EventStore(self, name))
