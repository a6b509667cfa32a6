"""One event log in your Postgres. Write an event once; consume it every way."""

from typing import TYPE_CHECKING

from headwater.lazy_attributes import lazy_attributes
from headwater.version import VERSION as __version__

if TYPE_CHECKING:
    from headwater import aio, errors, eventstore
    from headwater.client import Headwater, connect
    from headwater.errors import (
        AppendConflict,
        CursorMoved,
        EpochChanged,
        EventTooLarge,
        HeadwaterError,
        InvalidEvent,
        InvalidRequest,
        LeaseLost,
        LogUnavailable,
        NotAllowed,
        PositionExpired,
        QueueExists,
        QueueNotFound,
        ReaderBusy,
        SchemaMismatch,
        StoreBusy,
        TopicExists,
        TopicNotFound,
        TransactionAborted,
        WrongTransaction,
    )
    from headwater.eventstore import open, open_async
    from headwater.eventstore.query import Appended, Item, LatestMatchIs, NewStoreEvent, NoMatchAfter, Query, StoreEvent
    from headwater.log.model import Cursor, Event, LogState, NewEvent, Topic
    from headwater.log.payload_hooks import TypedEvent, TypedTopic
    from headwater.queue.model import ClaimedEvent, Dead, Lease, Retry, Snooze
    from headwater.queue.worker import App

__all__ = [
    "App",
    "AppendConflict",
    "Appended",
    "ClaimedEvent",
    "Cursor",
    "CursorMoved",
    "Dead",
    "EpochChanged",
    "Event",
    "EventTooLarge",
    "Headwater",
    "HeadwaterError",
    "InvalidEvent",
    "InvalidRequest",
    "Item",
    "LatestMatchIs",
    "Lease",
    "LeaseLost",
    "LogState",
    "LogUnavailable",
    "NewEvent",
    "NewStoreEvent",
    "NoMatchAfter",
    "NotAllowed",
    "PositionExpired",
    "Query",
    "QueueExists",
    "QueueNotFound",
    "ReaderBusy",
    "Retry",
    "SchemaMismatch",
    "Snooze",
    "StoreBusy",
    "StoreEvent",
    "Topic",
    "TopicExists",
    "TopicNotFound",
    "TransactionAborted",
    "TypedEvent",
    "TypedTopic",
    "WrongTransaction",
    "__version__",
    "aio",
    "connect",
    "errors",
    "eventstore",
    "open",
    "open_async",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_attributes(
        __name__,
        {
            "headwater.client": ("Headwater", "connect"),
            "headwater.errors": (
                "AppendConflict",
                "CursorMoved",
                "EpochChanged",
                "EventTooLarge",
                "HeadwaterError",
                "InvalidEvent",
                "InvalidRequest",
                "LeaseLost",
                "LogUnavailable",
                "NotAllowed",
                "PositionExpired",
                "QueueExists",
                "QueueNotFound",
                "ReaderBusy",
                "SchemaMismatch",
                "StoreBusy",
                "TopicExists",
                "TopicNotFound",
                "TransactionAborted",
                "WrongTransaction",
            ),
            "headwater.eventstore": ("open", "open_async"),
            "headwater.eventstore.query": (
                "Appended",
                "Item",
                "LatestMatchIs",
                "NewStoreEvent",
                "NoMatchAfter",
                "Query",
                "StoreEvent",
            ),
            "headwater.log.model": ("Cursor", "Event", "LogState", "NewEvent", "Topic"),
            "headwater.log.payload_hooks": ("TypedEvent", "TypedTopic"),
            "headwater.queue.model": ("ClaimedEvent", "Dead", "Lease", "Retry", "Snooze"),
            "headwater.queue.worker": ("App",),
        },
        submodules=("aio", "errors", "eventstore"),
    )

    def __dir__() -> list[str]:
        return __all__
