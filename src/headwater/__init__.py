"""One event log in your Postgres. Write an event once; consume it every way."""

from typing import TYPE_CHECKING

from headwater.lazy_attributes import lazy_attributes
from headwater.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from headwater import aio as aio
    from headwater import errors as errors
    from headwater import eventstore as eventstore
    from headwater.client import Headwater as Headwater
    from headwater.client import connect as connect
    from headwater.errors import (
        AppendConflict as AppendConflict,
    )
    from headwater.errors import (
        CursorMoved as CursorMoved,
    )
    from headwater.errors import (
        EpochChanged as EpochChanged,
    )
    from headwater.errors import (
        EventTooLarge as EventTooLarge,
    )
    from headwater.errors import (
        HeadwaterError as HeadwaterError,
    )
    from headwater.errors import (
        InvalidEvent as InvalidEvent,
    )
    from headwater.errors import (
        InvalidRequest as InvalidRequest,
    )
    from headwater.errors import (
        LeaseLost as LeaseLost,
    )
    from headwater.errors import (
        LogUnavailable as LogUnavailable,
    )
    from headwater.errors import (
        NotAllowed as NotAllowed,
    )
    from headwater.errors import (
        PositionExpired as PositionExpired,
    )
    from headwater.errors import (
        QueueExists as QueueExists,
    )
    from headwater.errors import (
        QueueNotFound as QueueNotFound,
    )
    from headwater.errors import (
        ReaderBusy as ReaderBusy,
    )
    from headwater.errors import (
        SchemaMismatch as SchemaMismatch,
    )
    from headwater.errors import (
        StoreBusy as StoreBusy,
    )
    from headwater.errors import (
        TopicExists as TopicExists,
    )
    from headwater.errors import (
        TopicNotFound as TopicNotFound,
    )
    from headwater.errors import (
        TransactionAborted as TransactionAborted,
    )
    from headwater.errors import (
        WrongTransaction as WrongTransaction,
    )
    from headwater.eventstore import open as open
    from headwater.eventstore import open_async as open_async
    from headwater.eventstore.query import (
        Appended as Appended,
    )
    from headwater.eventstore.query import (
        Item as Item,
    )
    from headwater.eventstore.query import (
        LatestMatchIs as LatestMatchIs,
    )
    from headwater.eventstore.query import (
        NewStoreEvent as NewStoreEvent,
    )
    from headwater.eventstore.query import (
        NoMatchAfter as NoMatchAfter,
    )
    from headwater.eventstore.query import (
        Query as Query,
    )
    from headwater.eventstore.query import (
        StoreEvent as StoreEvent,
    )
    from headwater.log.model import (
        Cursor as Cursor,
    )
    from headwater.log.model import (
        Event as Event,
    )
    from headwater.log.model import (
        LogState as LogState,
    )
    from headwater.log.model import (
        NewEvent as NewEvent,
    )
    from headwater.log.model import (
        Topic as Topic,
    )
    from headwater.queue.model import (
        ClaimedEvent as ClaimedEvent,
    )
    from headwater.queue.model import (
        Dead as Dead,
    )
    from headwater.queue.model import (
        Lease as Lease,
    )
    from headwater.queue.model import (
        Retry as Retry,
    )
    from headwater.queue.model import (
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
            "headwater.queue.model": ("ClaimedEvent", "Dead", "Lease", "Retry", "Snooze"),
            "headwater.queue.worker": ("App",),
        },
        submodules=("aio", "errors", "eventstore"),
    )
    __all__.append("__version__")
