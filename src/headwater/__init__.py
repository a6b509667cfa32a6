"""One event log in your Postgres. Write an event once; consume it every way."""

from typing import TYPE_CHECKING

from headwater.lazy_attributes import lazy_attributes
from headwater.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from headwater import aio as aio, errors as errors, eventstore as eventstore
    from headwater.client import Headwater as Headwater, connect as connect
    from headwater.errors import (
        AppendConflict as AppendConflict,
        CursorMoved as CursorMoved,
        EpochChanged as EpochChanged,
        EventTooLarge as EventTooLarge,
        HeadwaterError as HeadwaterError,
        InvalidEvent as InvalidEvent,
        InvalidRequest as InvalidRequest,
        LeaseLost as LeaseLost,
        LogUnavailable as LogUnavailable,
        NotAllowed as NotAllowed,
        PositionExpired as PositionExpired,
        QueueExists as QueueExists,
        QueueNotFound as QueueNotFound,
        ReaderBusy as ReaderBusy,
        SchemaMismatch as SchemaMismatch,
        StoreBusy as StoreBusy,
        TopicExists as TopicExists,
        TopicNotFound as TopicNotFound,
        TransactionAborted as TransactionAborted,
        WrongTransaction as WrongTransaction,
    )
    from headwater.eventstore import open as open, open_async as open_async
    from headwater.eventstore.query import (
        Appended as Appended,
        Item as Item,
        LatestMatchIs as LatestMatchIs,
        NewStoreEvent as NewStoreEvent,
        NoMatchAfter as NoMatchAfter,
        Query as Query,
        StoreEvent as StoreEvent,
    )
    from headwater.log.model import (
        Cursor as Cursor,
        Event as Event,
        LogState as LogState,
        NewEvent as NewEvent,
        Topic as Topic,
    )
    from headwater.log.payload_hooks import TypedEvent as TypedEvent, TypedTopic as TypedTopic
    from headwater.queue.model import (
        ClaimedEvent as ClaimedEvent,
        Dead as Dead,
        Lease as Lease,
        Retry as Retry,
        Snooze as Snooze,
    )
    from headwater.queue.worker import App as App

if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = lazy_attributes(
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
    __all__.append("__version__")
