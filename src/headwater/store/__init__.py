"""The event store: what is asked of it, what it answers, and where it can live."""

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
from headwater.store.deciding import Decider, Decision, Snapshots, execute, execute_async
from headwater.store.opening import open
from headwater.store.sqlite import SqliteEventStore, SqliteStores

__all__ = [
    "EVERYTHING",
    "Appended",
    "Condition",
    "Decider",
    "Decision",
    "Item",
    "Latest",
    "LatestMatchIs",
    "NewStoreEvent",
    "NoMatchAfter",
    "Query",
    "Snapshots",
    "SqliteEventStore",
    "SqliteStores",
    "StoreEvent",
    "execute",
    "execute_async",
    "open",
]
