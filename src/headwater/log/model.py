"""Values of the log: events, topics, cursors, schedules and the state of the log. Immutable and without behavior.

Values that are created by the thousand are named tuples: five times cheaper to create than frozen dataclasses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple

from headwater.log.settings import TopicSettings

Payload = Any
"""A JSON value, a dataclass or a pydantic model, which become JSON; bytes, which are stored unchanged; or None for an
event without a payload (Kafka's tombstone)."""


TOPIC_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,248}")
"""A topic name; the table `topic` requires the same."""


class NewEvent(NamedTuple):
    """An event to publish."""

    payload: Payload
    key: str | bytes | None = None
    type: str | None = None
    routing_key: str | None = None
    headers: Mapping[str, Any] | None = None
    event_id: str | None = None
    content_type: str | None = None
    partition: int | None = None


class Event(NamedTuple):
    """An event of the log."""

    position: int
    topic: str
    partition: int
    topic_offset: int | None
    key: bytes | None
    type: str | None
    routing_key: str | None
    headers: Mapping[str, Any] | None
    content_type: str | None
    payload: bytes | None
    event_id: str | None
    published_at: datetime

    @property
    def data(self) -> Any:
        """The payload decoded as JSON. Decodes on every access."""
        return None if self.payload is None else json.loads(self.payload)

    @property
    def key_text(self) -> str | None:
        """The key decoded as UTF-8, for keys that were published as text."""
        return None if self.key is None else self.key.decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic(TopicSettings):
    """A topic and its settings."""

    id: int
    name: str
    created_at: datetime
    expired_to: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicOverview(TopicSettings):
    """A topic, its settings, and its first and last event."""

    name: str
    created_at: datetime
    expired_to: int
    first_position: int | None
    last_position: int | None
    last_published_at: datetime | None


@dataclass(frozen=True, slots=True)
class Cursor:
    """A reader's saved position and its lag.

    `lag_events` counts unread events of the cursor's topics, up to 1000; `lag_is_more`: the lag is greater than that.
    """

    name: str
    position: int
    topics: tuple[str, ...] | None
    holds_retention: bool
    updated_at: datetime
    lag_events: int
    lag_is_more: bool
    oldest_unread_age: timedelta | None


class CursorState(NamedTuple):
    """The position of a cursor and its topics (None: all topics).

    `gone_to`: events up to here had already been removed by retention when the cursor was set. Their absence is not an
    error for this cursor.
    """

    position: int
    gone_to: int
    topics: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ScheduledEvent:
    """An event that is published at `due_at`."""

    id: int
    due_at: datetime
    topic: str
    key: bytes | None
    type: str | None
    event_id: str | None


class LogState(NamedTuple):
    """The head, the stable position and the epoch of the log.

    `head` is the highest position assigned so far; at or below `stable`, no further event can appear. A position
    identifies an event only within its epoch: store `epoch` together with every position that you remember.
    """

    head: int
    stable: int
    epoch: int


class LogStateByTopic(NamedTuple):
    """A LogState for a reader of many topics.

    `held` maps each of `topics` whose stable position is below `head` to that position. `bounds` are the position
    bounds of all open publishers: while they and `head` do not change, neither does the result for any topic.
    """

    head: int
    stable: int
    epoch: int
    bounds: tuple[int, ...]
    topics: frozenset[str]
    held: dict[str, int]


class Growth(NamedTuple):
    """The head, the epoch and the position bounds of all open publishers, and which of some topics have grown."""

    head: int
    epoch: int
    bounds: tuple[int, ...]
    topics: frozenset[str]


class WaitKey(NamedTuple):
    """What a waiter waits for besides the growth of the log."""

    kind: Literal["queue", "cursor"]
    name: str


class WaitedState(NamedTuple):
    """The state of a queue or cursor for its waiters: they look again if `state` has changed or something is `due`."""

    state: str | None
    due: bool = False
    # Seconds until the queue has its next event to hand out again, if known.
    due_seconds: float | None = None
    # The topics of its events; None: any topic.
    topics: Sequence[str] | None = None


class ReleaseResult(NamedTuple):
    """The number of due events that were published, and the seconds until the next one is due."""

    released: int
    next_due_seconds: float | None


@dataclass(frozen=True, slots=True)
class MaintenanceResult:
    """What one maintenance run did. `busy`: another process was running maintenance, and this run did nothing."""

    busy: bool
    released: int
    segments_made: int
    segments_dropped: int
    events_swept: int


@dataclass(frozen=True, slots=True)
class Publisher:
    """An open transaction that has published. Readers wait for it before they read past its events."""

    pid: int | None
    prepared: bool
    position_bound: int
    user_name: str | None
    application_name: str | None
    state: str | None
    began_at: datetime | None
    age: timedelta | None
    # None: any topic. Readers of other topics do not wait for it.
    topics: Sequence[str] | None


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Settings of the whole log."""

    segment_interval: timedelta
    segments_ahead: int
    auto_create_topics: bool
    kafka_offsets_kept: timedelta
    # Publishing transactions that stay open longer are terminated; None: never.
    max_publisher_seconds: float | None


@dataclass(frozen=True, slots=True)
class LogFault:
    """A fault that stops publishing or delivery: a segment without a table, or a register, cursor or queue whose
    position is above the head."""

    kind: str
    name: str
    position: int
    head: int


@dataclass(frozen=True, slots=True)
class CronSchedule:
    """An event that is published at the times of a cron expression."""

    name: str
    cron: str
    time_zone: str
    topic: str
    next_at: datetime
    last_at: datetime | None
    paused: bool


class DueCronSchedule(NamedTuple):
    """A cron schedule that is due."""

    name: str
    cron: str
    time_zone: str
    due_at: datetime
