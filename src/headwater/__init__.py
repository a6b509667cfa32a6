"""One event log in your Postgres. Write an event once; consume it every way."""

from headwater.client import Headwater, connect
from headwater.errors import (
    CursorMoved,
    EventTooLarge,
    GroupExists,
    GroupNotFound,
    HeadwaterError,
    InvalidEvent,
    InvalidRequest,
    LeaseLost,
    LogUnavailable,
    NotAllowed,
    PositionExpired,
    ReaderBusy,
    SchemaMismatch,
    TopicExists,
    TopicNotFound,
    TransactionAborted,
    WrongTransaction,
)
from headwater.model import ClaimedEvent, Cursor, Dead, Event, Lease, LogState, NewEvent, Retry, Snooze, Topic
from headwater.schema import VERSION as __version__
from headwater.worker import App

__all__ = [
    "App",
    "ClaimedEvent",
    "Cursor",
    "CursorMoved",
    "Dead",
    "Event",
    "EventTooLarge",
    "GroupExists",
    "GroupNotFound",
    "Headwater",
    "HeadwaterError",
    "InvalidEvent",
    "InvalidRequest",
    "Lease",
    "LeaseLost",
    "LogState",
    "LogUnavailable",
    "NewEvent",
    "NotAllowed",
    "PositionExpired",
    "ReaderBusy",
    "Retry",
    "SchemaMismatch",
    "Snooze",
    "Topic",
    "TopicExists",
    "TopicNotFound",
    "TransactionAborted",
    "WrongTransaction",
    "__version__",
    "connect",
]
