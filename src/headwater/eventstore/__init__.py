"""The event store: events, queries, append conditions, and the stores on Postgres and SQLite."""

from typing import TYPE_CHECKING

from headwater.lazy_attributes import lazy_attributes

if TYPE_CHECKING:
    from headwater.client.eventstore.sqlite import SqliteEventStore as SqliteEventStore, SqliteStores as SqliteStores
    from headwater.eventstore.addresses import open as open, open_async as open_async
    from headwater.eventstore.decider import (
        Decider as Decider,
        Decision as Decision,
        SavedSnapshots as SavedSnapshots,
        Snapshots as Snapshots,
    )
    from headwater.eventstore.execution import execute as execute, execute_async as execute_async
    from headwater.eventstore.field_index import FieldIndex as FieldIndex, IndexCondition as IndexCondition
    from headwater.eventstore.query import (
        EVERYTHING as EVERYTHING,
        Appended as Appended,
        Condition as Condition,
        Item as Item,
        Latest as Latest,
        LatestMatchIs as LatestMatchIs,
        NewStoreEvent as NewStoreEvent,
        NoMatchAfter as NoMatchAfter,
        Query as Query,
        StoreEvent as StoreEvent,
    )
    from headwater.eventstore.sqlite import (
        AsyncSqliteEventStore as AsyncSqliteEventStore,
        AsyncSqliteStores as AsyncSqliteStores,
    )

if not TYPE_CHECKING:
    # `calls` needs values of this package, and this package needs `calls`.
    __all__, __getattr__, __dir__ = lazy_attributes(
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
