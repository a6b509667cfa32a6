"""The event store: events, queries, append conditions, and the stores on Postgres and SQLite."""

from typing import TYPE_CHECKING

from headwater.lazy_attributes import lazy_attributes

if TYPE_CHECKING:
    from headwater.client.eventstore.sqlite import SqliteEventStore, SqliteStores
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
    from headwater.eventstore.sqlite import AsyncSqliteEventStore, AsyncSqliteStores

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

if not TYPE_CHECKING:
    # `calls` needs values of this package, and this package needs `calls`.
    __getattr__ = lazy_attributes(
        __name__,
        {
            "headwater.eventstore.addresses": ("open", "open_async"),
            "headwater.eventstore.decider": ("Decider", "Decision", "SavedSnapshots", "Snapshots"),
            "headwater.eventstore.execution": ("execute", "execute_async"),
            "headwater.eventstore.field_index": ("FieldIndex", "IndexCondition"),
            "headwater.eventstore.query": (
                "EVERYTHING",
                "Appended",
                "Condition",
                "Item",
                "Latest",
                "LatestMatchIs",
                "NewStoreEvent",
                "NoMatchAfter",
                "Query",
                "StoreEvent",
            ),
            "headwater.client.eventstore.sqlite": ("SqliteEventStore", "SqliteStores"),
            "headwater.eventstore.sqlite": ("AsyncSqliteEventStore", "AsyncSqliteStores"),
        },
    )

    def __dir__() -> list[str]:
        return __all__
