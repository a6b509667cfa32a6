"""The event store: what is asked of it, what it answers, and where it can live."""

from headwater.deciding import Decider, Decision, SavedSnapshots, Snapshots
from headwater.field_index import FieldIndex, IndexCondition
from headwater.query import (
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
from headwater.store.deciding import execute, execute_async
from headwater.store.opening import open, open_async
from headwater.store.sqlite import SqliteEventStore, SqliteStores
from headwater.store.sqlite_async import AsyncSqliteEventStore, AsyncSqliteStores

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
