"""Request models with their limits. What depends on stored data is validated by the database."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal

from fastapi import Path, Query
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    model_validator,
)

from headwater.access import permissions
from headwater.errors import InvalidEvent, InvalidRequest
from headwater.log.event_json import BYTES_TYPE, TEXT_TYPE, from_base64
from headwater.log.model import NewEvent
from headwater.log.settings import TopicSettings
from headwater.queue.settings import QueueSettings
from headwater.servers.http.setting_fields import changed_settings, new_settings
from headwater.setting_definitions import changeable, definitions

# Above every possible position, and exact as a double.
MAX_POSITION: Final = (1 << 53) - 1
MAX_TOKEN: Final = (1 << 63) - 1
MAX_EVENTS: Final = 1000
MAX_UNKNOWN_KEYS: Final = 20
EARLIEST: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d[Tt ]")
LATEST: Final = datetime(9000, 1, 1, tzinfo=UTC)


class UnreadableJson(ValueError):
    """The body is not strict JSON."""


def read_json(body: bytes) -> Any:
    """Parse strict JSON: NaN and Infinity are rejected."""

    def reject(text: str) -> Any:
        raise UnreadableJson(f"{text} is not JSON")

    try:
        return json.loads(body, parse_constant=reject)
    except RecursionError:
        raise UnreadableJson("nested too deeply") from None


def _text_only(value: Any) -> Any:
    if not isinstance(value, str) or not _DATE.match(value):
        raise ValueError("invalid time: expected RFC 3339 text such as 2026-03-01T12:00:00Z")
    return value


def _in_range(value: datetime) -> datetime:
    try:
        moment = value.astimezone(UTC)
    except OverflowError:
        raise ValueError("invalid time: expected a year from 1970 to 9000") from None
    if not EARLIEST <= moment <= LATEST:
        raise ValueError("invalid time: expected a year from 1970 to 9000")
    return moment


Position = Annotated[int, Field(strict=True, ge=0, le=MAX_POSITION)]
Number = Annotated[int, Field(strict=True, ge=0, le=2_147_483_647)]
Name = Annotated[str, Field(min_length=1, max_length=249)]
Text = Annotated[str, Field(max_length=10_000)]
Flag = Annotated[bool, Field(strict=True)]
Seconds = Annotated[float, Field(strict=True, ge=0, le=1e9, allow_inf_nan=False)]
Time = Annotated[AwareDatetime, BeforeValidator(_text_only), AfterValidator(_in_range)]
Object = dict[str, Any]

TopicName = Annotated[str, Path(min_length=1, max_length=249, description="the topic's name", examples=["orders"])]
QueueName = Annotated[str, Path(min_length=1, max_length=200, description="the queue's name", examples=["mailer"])]
DryRun = Annotated[bool, Query(description="delete nothing; report what would be deleted")]
BeforeQuery = Annotated[int | None, Query(ge=0, le=MAX_POSITION, description="only events before this position")]
EpochQuery = Annotated[
    int | None,
    Query(ge=0, le=2_147_483_647, description="the epoch of the positions; 409 if the log has another epoch"),
]
AfterQuery = Annotated[int | None, Query(ge=0, le=MAX_POSITION, description="only events after this position")]


class RequestModel(BaseModel):
    """The base of all request models. Unknown fields are rejected, so that typos do not pass silently."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _has_few_keys(cls, given: Any) -> Any:
        # The validator lists every unknown key before it reports the first: bound their number.
        if isinstance(given, dict) and len(given) > len(cls.model_fields) + MAX_UNKNOWN_KEYS:
            raise ValueError(f"too many keys: {len(given)}, expected at most {len(cls.model_fields)}")
        return given


# --- events ---


class EventContent(RequestModel):
    """The content of an event. At most one of data, text and base64 may be given."""

    type: str | None = Field(default=None, min_length=1, max_length=200, examples=["order.placed"])
    key: str | None = Field(default=None, max_length=65_535, description="events with the same key stay in order")
    key_base64: str | None = Field(
        default=None, max_length=90_000, description="the key as base64, if it is not UTF-8 text"
    )
    routing_key: str | None = Field(default=None, min_length=1, max_length=255)
    headers: Object | None = None
    content_type: str | None = Field(default=None, min_length=1, max_length=200)
    data: Any = Field(default=None, description="JSON. Numbers are stored as integers or doubles")
    text: str | None = Field(default=None, description="text, stored unchanged")
    base64: str | None = Field(default=None, description="binary data as base64")

    @model_validator(mode="after")
    def _has_one_payload(self) -> EventContent:
        if len({"data", "text", "base64"} & self.model_fields_set) > 1:
            raise ValueError("give only one of data, text and base64")
        if self.key is not None and self.key_base64 is not None:
            raise ValueError("give only one of key and key_base64")
        return self

    def payload(self) -> tuple[Any, str | None]:
        """The payload and its content type."""
        if self.text is not None:
            try:
                return self.text.encode(), self.content_type or TEXT_TYPE
            except UnicodeEncodeError:
                raise InvalidEvent("the text cannot be encoded as UTF-8") from None
        if self.base64 is not None:
            return from_base64(self.base64, "base64"), self.content_type or BYTES_TYPE
        return self.data, self.content_type

    def key_bytes(self) -> str | bytes | None:
        return self.key if self.key_base64 is None else from_base64(self.key_base64, "key_base64")


class EventToPublish(EventContent):
    """An event to publish."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"type": "order.placed", "key": "customer-7", "data": {"id": 1}}]},
    )

    event_id: str | None = Field(
        default=None,
        min_length=1,
        max_length=255,
        description="makes publishing idempotent: an event with an existing id is not published again",
    )
    partition: Annotated[int, Field(strict=True, ge=0, le=1023)] | None = None
    deliver_at: Time | None = Field(default=None, description="deliver not before this time")

    def new_event(self) -> NewEvent:
        payload, content_type = self.payload()
        return NewEvent(
            payload,
            self.key_bytes(),
            self.type,
            self.routing_key,
            self.headers or None,
            self.event_id,
            content_type,
            self.partition,
        )


class EventsToPublish(RequestModel):
    """Events to publish atomically, in this order."""

    events: Annotated[list[EventToPublish], FailFast()] = Field(min_length=1, max_length=MAX_EVENTS)


def _one_or_many(value: Any) -> str:
    return "many" if isinstance(value, Mapping) and "events" in value else "one"


Publish = Annotated[
    Annotated[EventToPublish, Tag("one")] | Annotated[EventsToPublish, Tag("many")], Discriminator(_one_or_many)
]


# --- topics ---


@new_settings(definitions(TopicSettings))
class TopicCreate(RequestModel):
    """A topic to create."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"name": "orders", "kind": "open"}]})

    name: Name
    event_store: Flag = Field(
        default=False, description="create an event store: a sequenced topic with one partition and append conditions"
    )
    if_missing: Flag = False


@changed_settings(changeable(TopicSettings))
class TopicUpdate(RequestModel):
    """Topic settings to change. Omitted settings stay unchanged."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"retention_seconds": 604800}]})

    dry_run: Flag = Field(
        default=False, description="change nothing; report which events the new retention would remove"
    )


# --- queues ---


class BindingCreate(RequestModel):
    """Selects the events for a queue: those that match every given field."""

    topic: Name | None = None
    type: str | None = Field(default=None, min_length=1, max_length=200)
    pattern: str | None = Field(default=None, min_length=1, max_length=255, examples=["parcel.*.late"])
    headers: Object | None = None
    from_position: Position | None = None


@new_settings(definitions(QueueSettings))
class QueueCreate(RequestModel):
    """A queue to create."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"name": "mailer", "bindings": [{"topic": "orders"}]}]}
    )

    name: Annotated[str, Field(min_length=1, max_length=200)]
    bindings: list[BindingCreate] = Field(default_factory=list, max_length=100)
    after: Position | None = Field(
        default=None, description="start after this position; default: the beginning of the log"
    )
    since: Time | None = None
    from_end: Flag = False
    if_missing: Flag = False


@changed_settings(changeable(QueueSettings))
class QueueUpdate(RequestModel):
    """Queue settings to change. Omitted settings stay unchanged; null or 0 removes a limit."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"lease_seconds": 60}]})


class ClaimRequest(RequestModel):
    """A worker's request for events."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"worker": "mailer-1", "batch_size": 10, "wait_seconds": 5}]}
    )

    worker: str = Field(min_length=1, max_length=200)
    batch_size: Annotated[int, Field(strict=True, ge=1, le=1000)] = 1
    lease_seconds: Annotated[float, Field(strict=True, ge=0.1, le=86_400, allow_inf_nan=False)] | None = None
    wait_seconds: Annotated[float, Field(strict=True, ge=0, le=30, allow_inf_nan=False)] = Field(
        default=0, description="how long to wait for events"
    )


def _token(value: Any) -> Any:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 19:
        return int(value)
    return value


Token = Annotated[
    int,
    BeforeValidator(_token, json_schema_input_type=str | int),
    Field(
        strict=True,
        ge=0,
        le=MAX_TOKEN,
        description="identifies the lease; a string, because it exceeds the integers of JavaScript",
    ),
]


class FailedEvent(RequestModel):
    """An event whose processing failed."""

    position: Position
    error: str = Field(default="failed", max_length=10_000)
    retry_in_seconds: Annotated[float, Field(strict=True, ge=0, le=31_536_000, allow_inf_nan=False)] | None = Field(
        default=None, description="default: the queue's backoff"
    )
    dead: Flag = Field(default=False, description="do not retry: make it a dead letter now")


class ReleasedEvent(RequestModel):
    """An event returned to the queue without counting an attempt."""

    position: Position
    after_seconds: Annotated[float, Field(strict=True, ge=0, le=31_536_000, allow_inf_nan=False)] = 0


class SettleRequest(RequestModel):
    """The outcomes of the events of a lease."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"token": "123", "done": "all"}]})

    token: Token
    done: Literal["all"] | Annotated[list[Position], Field(max_length=1000)] = Field(
        default_factory=list,
        description='positions, or "all": every event of the lease that is not listed as failed or released',
    )
    failed: list[FailedEvent] = Field(default_factory=list, max_length=1000)
    released: list[ReleasedEvent] = Field(default_factory=list, max_length=1000)


class ExtendRequest(RequestModel):
    """Extends a lease."""

    token: Token
    lease_seconds: Annotated[float, Field(strict=True, ge=0.1, le=86_400, allow_inf_nan=False)] | None = None


class RewindRequest(RequestModel):
    """Moves a queue to a position or a time."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"to": 0, "dry_run": True}]})

    to: Position | None = None
    since: Time | None = None
    dry_run: Flag = False


class DeadLetterSelection(RequestModel):
    """Selects dead letters of a queue."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"all": True, "dry_run": True}]})

    positions: list[Position] | None = Field(default=None, max_length=10_000)
    all: Flag = False
    handler: str | None = Field(
        default=None, max_length=200, description="only dead letters of this subscriber's handler"
    )
    subscription: Position | None = Field(default=None, description="only dead letters of this SQL subscription")
    dry_run: Flag = False

    def selected(self) -> list[int] | None:
        """The selected positions; None: all."""
        if self.all == (self.positions is not None):
            raise InvalidRequest("give exactly one of positions and all")
        return self.positions


# --- cursors, subscriptions, schedules ---


class CursorUpdate(RequestModel):
    """The new position of a cursor."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"position": 0, "topics": ["orders"]}]})

    position: Position | None = None
    epoch: Number | None = Field(
        default=None,
        description="the epoch of the position; if the log has another, the last common position is used",
    )
    since: Time | None = None
    topics: list[Name] | None = Field(default=None, max_length=1000)
    holds_retention: Flag | None = None


class SubscriptionCreate(RequestModel):
    """A SQL subscription to create: a queue, a filter and its parameters."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"queue": "alerts", "filter": "e.topic = 'orders' and (e.data ->> 'total')::numeric > 100"}]
        },
    )

    queue: Annotated[str, Field(min_length=1, max_length=200)]
    filter: str = Field(min_length=1, max_length=10_000)
    params: Object = Field(default_factory=dict)
    expires_after_seconds: Annotated[float, Field(strict=True, gt=0, le=1e9, allow_inf_nan=False)] | None = None
    from_position: Position | None = None
    topics: list[Name] | None = Field(default=None, max_length=1000)


class EventToSchedule(EventContent):
    """An event to deliver at a later time."""

    topic: Name
    deliver_at: Time
    event_id: str | None = Field(default=None, min_length=1, max_length=255)


class ScheduleUpdate(RequestModel):
    """The new delivery time of a scheduled event."""

    deliver_at: Time


class CronScheduleCreate(EventContent):
    """A cron schedule: an event that is published at the times of a cron expression."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    cron: str = Field(min_length=1, max_length=200, examples=["*/5 * * * *"])
    time_zone: str = Field(default="UTC", min_length=1, max_length=100)
    topic: Name


class CronScheduleUpdate(RequestModel):
    """Pauses or resumes a cron schedule."""

    paused: Flag


# --- accounts ---

Action = Literal["read", "write", "create", "delete", "alter", "describe", "all"]
Kind = Literal["topic", "consumer", "transaction", "log"]
assert Action.__args__ == permissions.ACTIONS  # type: ignore[attr-defined]
assert Kind.__args__ == permissions.KINDS  # type: ignore[attr-defined]
AccountName = Annotated[str, Field(min_length=1, max_length=200)]


class AccountCreate(RequestModel):
    """An account to create."""

    name: AccountName
    password: str = Field(min_length=1, max_length=1000)
    administrator: Flag = False


class AccountUpdate(RequestModel):
    """Changes to an account. Omitted fields stay unchanged."""

    password: str | None = Field(default=None, min_length=1, max_length=1000)
    administrator: Flag | None = None


class PermissionCreate(RequestModel):
    """A permission to grant."""

    action: Action
    kind: Kind
    name: Annotated[str, Field(min_length=1, max_length=1000)] = "*"
    prefix: Flag = False


class ApiKeyCreate(RequestModel):
    """An API key to create."""

    label: str = Field(default="", max_length=200)
    expires_in_seconds: Annotated[float, Field(strict=True, gt=0, le=1e9, allow_inf_nan=False)] | None = None


class SignInRequest(RequestModel):
    """Account name and password for a session."""

    name: AccountName
    password: str = Field(max_length=1000)


def seconds(value: float | None) -> timedelta | None:
    """A duration of a request."""
    return None if value is None else timedelta(seconds=value)
