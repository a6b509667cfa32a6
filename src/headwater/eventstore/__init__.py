"""The event store: events, queries, append conditions, and the stores on Postgres and SQLite."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwater.eventstore.addresses import open, open_async
    from headwater.eventstore.decider import Decider, Decision, SavedSnapshots, Snapshots
    from headwater.eventstore.execution import execute, execute_async
    from headwater.eventstore.field_index import FieldIndex, IndexCondition
    from headwater.eventstore.query import (
        EVERYTHING,
        Appended,
        Condition,
        Item,
        Latest,
        LatestMatchIs,
        NewStoreEvent,
        NoMatchAfter,
        Query,
        StoreEvent,
    )
    from headwater.eventstore.sqlite import SqliteEventStore, SqliteStores
    from headwater.eventstore.sqlite_async import AsyncSqliteEventStore, AsyncSqliteStores

__all__ = [
    "EVERYTHING",
    "Appended",
    "AsyncSqliteEventStore",
    "AsyncSqliteStores",
    "Condition",
    "Decider",
    "Decision",
    "FieldIndex",
    "IndexCondition",
    "Item",
    "Latest",
    "LatestMatchIs",
    "NewStoreEvent",
    "NoMatchAfter",
    "Query",
    "SavedSnapshots",
    "Snapshots",
    "SqliteEventStore",
    "SqliteStores",
    "StoreEvent",
    "execute",
    "execute_async",
    "open",
    "open_async",
]

_HOMES = {
    "Appended": "headwater.eventstore.query",
    "AsyncSqliteEventStore": "headwater.eventstore.sqlite_async",
    "AsyncSqliteStores": "headwater.eventstore.sqlite_async",
    "Condition": "headwater.eventstore.query",
    "Decider": "headwater.eventstore.decider",
    "Decision": "headwater.eventstore.decider",
    "EVERYTHING": "headwater.eventstore.query",
    "FieldIndex": "headwater.eventstore.field_index",
    "IndexCondition": "headwater.eventstore.field_index",
    "Item": "headwater.eventstore.query",
    "Latest": "headwater.eventstore.query",
    "LatestMatchIs": "headwater.eventstore.query",
    "NewStoreEvent": "headwater.eventstore.query",
    "NoMatchAfter": "headwater.eventstore.query",
    "Query": "headwater.eventstore.query",
    "SavedSnapshots": "headwater.eventstore.decider",
    "Snapshots": "headwater.eventstore.decider",
    "SqliteEventStore": "headwater.eventstore.sqlite",
    "SqliteStores": "headwater.eventstore.sqlite",
    "StoreEvent": "headwater.eventstore.query",
    "execute": "headwater.eventstore.execution",
    "execute_async": "headwater.eventstore.execution",
    "open": "headwater.eventstore.addresses",
    "open_async": "headwater.eventstore.addresses",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # Loaded on first use: `calls` needs values of this package, and this package needs `calls`.
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)
