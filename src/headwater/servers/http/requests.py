"""What requests are made of, and their bounds. What only the database can say is left to it."""

from __future__ import annotations

import base64
import binascii
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
from headwater.model import NewEvent

# Above every position there can be, and whole in every language's numbers.
MAX_POSITION: Final = (1 << 53) - 1
MAX_TOKEN: Final = (1 << 63) - 1
MAX_EVENTS: Final = 1000
MAX_UNKNOWN_KEYS: Final = 20
EARLIEST: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d[Tt ]")
LATEST: Final = datetime(9000, 1, 1, tzinfo=UTC)


class NotReadable(ValueError):
    """A body that is no JSON that the log could keep."""


def read_json(body: bytes) -> Any:
    """JSON without what is none, such as NaN. What else the log cannot keep is refused where it is kept."""

    def refuse(text: str) -> Any:
        raise NotReadable(f"{text} is not JSON")

    try:
        return json.loads(body, parse_constant=refuse)
    except RecursionError:
        raise NotReadable("nested too deeply") from None


def _text_only(value: Any) -> Any:
    if not isinstance(value, str) or not _DATE.match(value):
        raise ValueError("a time is a text as in RFC 3339: 2026-03-01T12:00:00Z")
    return value


def _in_range(value: datetime) -> datetime:
    try:
        moment = value.astimezone(UTC)
    except OverflowError:
        raise ValueError("a time is from 1970 to 9000") from None
    if not EARLIEST <= moment <= LATEST:
        raise ValueError("a time is from 1970 to 9000")
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
GroupName = Annotated[str, Path(min_length=1, max_length=200, description="the group's name", examples=["mailer"])]
DryRun = Annotated[bool, Query(description="only say what would be deleted")]
BeforeQuery = Annotated[int | None, Query(ge=0, le=MAX_POSITION, description="only events before this position")]
EpochQuery = Annotated[
    int | None,
    Query(ge=0, le=2_147_483_647, description="the epoch that the positions are of; 409 if the log is in another"),
]
AfterQuery = Annotated[int | None, Query(ge=0, le=MAX_POSITION, description="only events after this position")]


class Shape(BaseModel):
    """A part of a request: nothing that is not named, so that a slip of the pen is not silence."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _is_small(cls, given: Any) -> Any:
        # Every key that is not known is a problem, and all problems are listed before the first is told.
        if isinstance(given, dict) and len(given) > len(cls.model_fields) + MAX_UNKNOWN_KEYS:
            raise ValueError(f"{len(given)} keys, where there are {len(cls.model_fields)}")
        return given


# --- events ---


class EventContent(Shape):
    """What an event holds: one of data, text and base64, or nothing."""

    type: str | None = Field(default=None, min_length=1, max_length=200, examples=["order.placed"])
    key: str | None = Field(default=None, max_length=65_535, description="events of one key stay in order")
    key_base64: str | None = Field(default=None, max_length=90_000, description="the same, for a key that is no text")
    routing_key: str | None = Field(default=None, min_length=1, max_length=255)
    headers: Object | None = None
    content_type: str | None = Field(default=None, min_length=1, max_length=200)
    data: Any = Field(default=None, description="JSON. Numbers are kept as a double or a whole number can hold them")
    text: str | None = Field(default=None, description="kept to the letter")
    base64: str | None = Field(default=None, description="bytes")

    @model_validator(mode="after")
    def _says_it_once(self) -> EventContent:
        if len({"data", "text", "base64"} & self.model_fields_set) > 1:
            raise ValueError("one of data, text and base64")
        if self.key is not None and self.key_base64 is not None:
            raise ValueError("one of key and key_base64")
        return self

    def payload(self) -> tuple[Any, str | None]:
        """The payload and its content type."""
        if self.text is not None:
            try:
                return self.text.encode(), self.content_type or "text/plain"
            except UnicodeEncodeError:
                raise InvalidEvent("the text is not text that UTF-8 can hold") from None
        if self.base64 is not None:
            return from_base64(self.base64, "base64"), self.content_type or "application/octet-stream"
        return self.data, self.content_type

    def key_bytes(self) -> str | bytes | None:
        return self.key if self.key_base64 is None else from_base64(self.key_base64, "key_base64")


class EventToPublish(EventContent):
    """An event that is to be published."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"type": "order.placed", "key": "customer-7", "data": {"id": 1}}]},
    )

    event_id: str | None = Field(
        default=None, min_length=1, max_length=255, description="an event with an id that is there is not repeated"
    )
    partition: Annotated[int, Field(strict=True, ge=0, le=1023)] | None = None
    deliver_at: Time | None = Field(default=None, description="not before this time")

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


class EventsToPublish(Shape):
    """Events that are published together or not at all, in this order."""

    events: Annotated[list[EventToPublish], FailFast()] = Field(min_length=1, max_length=MAX_EVENTS)


def _one_or_many(value: Any) -> str:
    return "many" if isinstance(value, Mapping) and "events" in value else "one"


Publish = Annotated[
    Annotated[EventToPublish, Tag("one")] | Annotated[EventsToPublish, Tag("many")], Discriminator(_one_or_many)
]


def from_base64(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidEvent(f"{what} is not base64") from None


# --- topics ---


class TopicToCreate(Shape):
    """A topic that is to be made."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"name": "orders", "kind": "open"}]})

    name: Name
    kind: Literal["open", "sequenced"] = "open"
    event_store: Flag = Field(default=False, description="a sequenced topic of one partition, appended to by condition")
    partitions: Annotated[int, Field(strict=True, ge=1, le=1024)] = 1
    retention_seconds: Annotated[float, Field(strict=True, gt=0, le=1e9, allow_inf_nan=False)] | None = None
    max_payload_bytes: Number | None = None
    max_header_bytes: Number | None = None
    if_missing: Flag = False


class TopicChanges(Shape):
    """Settings of a topic that are to change. What is not named stays."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"retention_seconds": 604800}]})

    partitions: Annotated[int, Field(strict=True, ge=1, le=1024)] | None = None
    retention_seconds: Annotated[float, Field(strict=True, gt=0, le=1e9, allow_inf_nan=False)] | None = Field(
        default=None, description="null: events are kept for ever"
    )
    max_payload_bytes: Number | None = None
    max_header_bytes: Number | None = None
    dry_run: Flag = Field(default=False, description="change nothing, only say which events a new retention takes")


# --- groups ---


class BindingToMake(Shape):
    """Which events a group is to get: those that fit every part given."""

    topic: Name | None = None
    type: str | None = Field(default=None, min_length=1, max_length=200)
    pattern: str | None = Field(default=None, min_length=1, max_length=255, examples=["parcel.*.late"])
    headers: Object | None = None
    from_position: Position | None = None


class GroupSettings(Shape):
    """Settings of a group."""

    lease_seconds: Seconds | None = None
    max_attempts: Number | None = None
    backoff_seconds: Seconds | None = None
    backoff_factor: Seconds | None = None
    backoff_max_seconds: Seconds | None = None
    backoff_jitter: Seconds | None = None
    max_in_flight: Number | None = None
    must_not_lose: Flag | None = None


class GroupToCreate(GroupSettings):
    """A queue group that is to be made."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"name": "mailer", "bindings": [{"topic": "orders"}]}]}
    )

    name: Annotated[str, Field(min_length=1, max_length=200)]
    bindings: list[BindingToMake] = Field(default_factory=list, max_length=100)
    ordered_keys: Flag | None = None
    after: Position | None = Field(default=None, description="begin after this position; default: at the beginning")
    since: Time | None = None
    from_end: Flag = False
    if_missing: Flag = False


class GroupChanges(GroupSettings):
    """Settings of a group that are to change. What is not named stays; max_in_flight 0 removes the limit."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"lease_seconds": 60}]})


class Claim(Shape):
    """Asks for events to work on."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"worker": "mailer-1", "batch_size": 10, "wait_seconds": 5}]}
    )

    worker: str = Field(min_length=1, max_length=200)
    batch_size: Annotated[int, Field(strict=True, ge=1, le=1000)] = 1
    lease_seconds: Annotated[float, Field(strict=True, ge=0.1, le=86_400, allow_inf_nan=False)] | None = None
    wait_seconds: Annotated[float, Field(strict=True, ge=0, le=30, allow_inf_nan=False)] = Field(
        default=0, description="how long to wait for something to do"
    )


def _token(value: Any) -> Any:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 19:
        return int(value)
    return value


Token = Annotated[
    int,
    BeforeValidator(_token, json_schema_input_type=str | int),
    Field(strict=True, ge=0, le=MAX_TOKEN, description="proves the lease; a text, since it is too long for JavaScript"),
]


class FailedEvent(Shape):
    """An event that did not succeed."""

    position: Position
    error: str = Field(default="failed", max_length=10_000)
    retry_in_seconds: Annotated[float, Field(strict=True, ge=0, le=31_536_000, allow_inf_nan=False)] | None = Field(
        default=None, description="default: the group's backoff"
    )
    dead: Flag = Field(default=False, description="never again: a dead letter at once")


class ReleasedEvent(Shape):
    """An event that is given back, not counted as a try."""

    position: Position
    after_seconds: Annotated[float, Field(strict=True, ge=0, le=31_536_000, allow_inf_nan=False)] = 0


class Settle(Shape):
    """Says how events of a lease ended."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"token": "123", "done": "all"}]})

    token: Token
    done: Literal["all"] | Annotated[list[Position], Field(max_length=1000)] = Field(
        default_factory=list, description='positions, or "all" that are not named otherwise'
    )
    failed: list[FailedEvent] = Field(default_factory=list, max_length=1000)
    released: list[ReleasedEvent] = Field(default_factory=list, max_length=1000)


class Extend(Shape):
    """Keeps a lease for longer."""

    token: Token
    lease_seconds: Annotated[float, Field(strict=True, ge=0.1, le=86_400, allow_inf_nan=False)] | None = None


class Rewind(Shape):
    """Lets a group begin anew, after a position or since a time."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"to": 0, "dry_run": True}]})

    to: Position | None = None
    since: Time | None = None
    dry_run: Flag = False


class Letters(Shape):
    """Which dead letters are meant."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"all": True, "dry_run": True}]})

    positions: list[Position] | None = Field(default=None, max_length=10_000)
    all: Flag = False
    handler: str | None = Field(default=None, max_length=200, description="only of this handler of a subscriber")
    subscription: Position | None = Field(default=None, description="only of this SQL subscription")
    dry_run: Flag = False

    def meant(self) -> list[int] | None:
        """Positions; None: all."""
        if self.all == (self.positions is not None):
            raise InvalidRequest("say which: positions, or all")
        return self.positions


# --- cursors, subscriptions, schedules ---


class CursorToSet(Shape):
    """Where a cursor is to stand."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"position": 0, "topics": ["orders"]}]})

    position: Position | None = None
    epoch: Number | None = Field(
        default=None,
        description="the epoch of the position; in another, the last common position is taken",
    )
    since: Time | None = None
    topics: list[Name] | None = Field(default=None, max_length=1000)
    must_not_lose: Flag | None = None


class SubscriptionToMake(Shape):
    """A SQL condition with parameters, for a group."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"group": "alerts", "condition": "e.topic = 'orders' and (e.data ->> 'total')::numeric > 100"}]
        },
    )

    group: Annotated[str, Field(min_length=1, max_length=200)]
    condition: str = Field(min_length=1, max_length=10_000)
    params: Object = Field(default_factory=dict)
    expires_after_seconds: Annotated[float, Field(strict=True, gt=0, le=1e9, allow_inf_nan=False)] | None = None
    from_position: Position | None = None
    topics: list[Name] | None = Field(default=None, max_length=1000)


class EventToSchedule(EventContent):
    """An event for later."""

    topic: Name
    deliver_at: Time
    event_id: str | None = Field(default=None, min_length=1, max_length=255)


class ScheduleChange(Shape):
    """Another time for a scheduled event."""

    deliver_at: Time


class PeriodicToSet(EventContent):
    """An event that is published at the times of a cron expression."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    cron: str = Field(min_length=1, max_length=200, examples=["*/5 * * * *"])
    time_zone: str = Field(default="UTC", min_length=1, max_length=100)
    topic: Name


class PeriodicChange(Shape):
    """Stops a periodic event, or lets it go on."""

    paused: Flag


# --- accounts ---

Action = Literal["read", "write", "create", "delete", "alter", "describe", "all"]
Kind = Literal["topic", "group", "transaction", "log"]
assert Action.__args__ == permissions.ACTIONS  # type: ignore[attr-defined]
assert Kind.__args__ == permissions.KINDS  # type: ignore[attr-defined]
AccountName = Annotated[str, Field(min_length=1, max_length=200)]


class AccountToCreate(Shape):
    """An account that is to be made."""

    name: AccountName
    password: str = Field(min_length=1, max_length=1000)
    administrator: Flag = False


class AccountChanges(Shape):
    """A new password, and whether the account administers. What is not named stays."""

    password: str | None = Field(default=None, min_length=1, max_length=1000)
    administrator: Flag | None = None


class PermissionToGive(Shape):
    """Something that an account may do."""

    action: Action
    kind: Kind
    name: Annotated[str, Field(min_length=1, max_length=1000)] = "*"
    prefix: Flag = False


class KeyToMake(Shape):
    """An API key that is to be made."""

    label: str = Field(default="", max_length=200)
    expires_in_seconds: Annotated[float, Field(strict=True, gt=0, le=1e9, allow_inf_nan=False)] | None = None


class SignIn(Shape):
    """Who wants a session."""

    name: AccountName
    password: str = Field(max_length=1000)


def seconds(value: float | None) -> timedelta | None:
    """A time span of a request."""
    return None if value is None else timedelta(seconds=value)
