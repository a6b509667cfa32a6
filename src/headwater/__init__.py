"""One event log in your Postgres. Write an event once; consume it every way."""

from headwater.client import Headwater, connect
from headwater.errors import (
    CursorMoved,
    EventTooLarge,
    HeadwaterError,
    InvalidEvent,
    InvalidRequest,
    LogUnavailable,
    NotAllowed,
    PositionExpired,
    SchemaMismatch,
    TopicExists,
    TopicNotFound,
    WrongTransaction,
)
from headwater.model import Cursor, Event, LogState, NewEvent, Topic
from headwater.schema import VERSION as __version__

__all__ = [
    "Cursor",
    "CursorMoved",
    "Event",
    "EventTooLarge",
    "Headwater",
    "HeadwaterError",
    "InvalidEvent",
    "InvalidRequest",
    "LogState",
    "LogUnavailable",
    "NewEvent",
    "NotAllowed",
    "PositionExpired",
    "SchemaMismatch",
    "Topic",
    "TopicExists",
    "TopicNotFound",
    "WrongTransaction",
    "__version__",
    "connect",
]
