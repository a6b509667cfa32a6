"""Response models for the OpenAPI document. Routes build responses by hand; tests check them against these models."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

from headwater.log.settings import TopicSettings
from headwater.queue.settings import QueueSettings
from headwater.servers.http.setting_fields import shown_settings
from headwater.setting_definitions import definitions

Time = datetime


class Event(BaseModel):
    """An event: its position, its metadata, and one of data, text and base64."""

    position: int
    topic: str
    partition: int
    offset: int | None
    type: str | None
    key: str | None = None
    key_base64: str | None = None
    routing_key: str | None = None
    headers: dict[str, Any] = {}
    tags: list[str] | None = Field(default=None, description="only for events of an event store")
    metadata: dict[str, Any] | None = Field(default=None, description="only for events of an event store")
    content_type: str | None
    event_id: str | None
    published_at: Time
    data: Any = None
    text: str | None = None
    base64: str | None = None


class EventPage(BaseModel):
    """A page of events. `next` is the query string of the next page, null on the last one. A page may be empty without
    being the last."""

    events: list[Event]
    next: str | None
    stable: int
    epoch: int = Field(description="the epoch of the positions; send it with them in later requests")


class PublishResult(BaseModel):
    """The positions of the published events; null for a scheduled one."""

    positions: list[int | None]


@shown_settings(definitions(TopicSettings))
class Topic(BaseModel):
    """A topic with its settings and contents."""

    name: str
    event_store: bool
    created_at: Time
    expired_to: int
    first_position: int | None
    last_position: int | None
    last_published_at: Time | None


class Topics(BaseModel):
    topics: list[Topic]


class EventRange(BaseModel):
    """A range of events: their number, counted up to 10,000, and the first and last position."""

    events: int
    events_is_more: bool = Field(description="the count stopped at its bound; there are more")
    first: int | None
    last: int | None


class TopicUpdateResult(Topic, EventRange):
    """A topic after the change, and the range of events that are older than the given retention and will be removed."""

    dry_run: bool


class DeleteResult(EventRange):
    """The events affected by a deletion: all events of a topic, the unfinished events of a queue or webhook, or the
    events that a subscription has not received, among the next 10,000 that its queue reads."""

    deleted: bool


@shown_settings(definitions(QueueSettings))
class Queue(BaseModel):
    """A queue with its settings, state and lag."""

    name: str
    kind: Literal["bindings", "subscriptions"]
    state: Literal["running", "paused", "no_workers", "stalled", "no_reader"]
    paused: bool
    claimed_position: int
    ready: int
    ready_is_more: bool = Field(description="the count is a lower bound: new events are counted up to 1000")
    lag_events: int = Field(description="unfinished events: ready, processing and retrying")
    lag_is_more: bool = Field(description="the count is a lower bound: new events are counted up to 1000")
    lag_seconds: float | None = Field(description="age of the oldest unclaimed event; null: none")
    unfinished_seconds: float | None = Field(description="age of the oldest unfinished event; null: none")
    processing: int
    retrying: int
    dead: int
    done: int
    last_claimed_at: Time | None = Field(description="time of the last claim, accurate to 10 seconds")
    last_worker: str | None = Field(description="the worker of the last claim")
    created_at: Time


class Queues(BaseModel):
    queues: list[Queue]


class QueueDetail(Queue):
    start_position: int


class QueueDeleteResult(DeleteResult):
    ready: int
    ready_is_more: bool
    processing: int
    dead: int


class Binding(BaseModel):
    id: int
    queue: str
    topic: str | None
    type: str | None
    pattern: str | None
    headers: dict[str, Any] | None
    from_position: int
    to_position: int | None


class Bindings(BaseModel):
    bindings: list[Binding]


class UnbindResult(EventRange):
    """The last position that the binding selects, and the events after it that no other binding selects."""

    to_position: int
    dry_run: bool


class ClaimedEvent(Event):
    attempt: int


class Lease(BaseModel):
    """Events leased to a worker until `expires_at`. Without events, none are ready."""

    token: str | None
    expires_at: Time | None
    isolated: bool = Field(description="its single event may have crashed a worker; process it separately")
    events: list[ClaimedEvent]


class SettleResult(BaseModel):
    settled: bool


class ExtendResult(BaseModel):
    expires_at: Time


class LeaseInfo(BaseModel):
    token: str
    worker: str
    first_position: int
    last_position: int
    events: int
    expires_at: Time


class Leases(BaseModel):
    leases: list[LeaseInfo]


class RewindResult(BaseModel):
    """The new position of a queue, and how many events follow it."""

    to: int
    events: int
    events_is_more: bool
    again: EventRange = Field(description="claimed events that are delivered again")
    skipped: EventRange = Field(description="unclaimed events that are skipped")
    dry_run: bool


class DeadLetter(BaseModel):
    position: int
    topic: str | None
    attempts: int
    error: str | None
    history: list[dict[str, Any]]
    died_at: Time
    subscription: int | None = Field(description="the SQL subscription; null for a queue with bindings")
    handler: str | None = Field(description="the subscriber's handler; null for a queue with bindings")
    event: Event | None = Field(description="null: removed by retention, or the topic was deleted")


class DeadLetters(BaseModel):
    dead: list[DeadLetter]
    next: str | None


class DeadLetterCount(BaseModel):
    count: int
    first: int | None
    last: int | None
    dry_run: bool


class PauseState(BaseModel):
    paused: bool


class Cursor(BaseModel):
    name: str
    position: int
    topics: list[str] | None
    holds_retention: bool
    updated_at: Time
    lag_events: int
    lag_is_more: bool = Field(description="the count is a lower bound: events are counted up to 1000")
    lag_seconds: float | None


class Cursors(BaseModel):
    cursors: list[Cursor]


class CursorSet(BaseModel):
    name: str
    position: int
    epoch: int = Field(description="the epoch of the positions; send it with them in later requests")


class DeleteConfirmation(BaseModel):
    deleted: bool


class Subscription(BaseModel):
    id: int
    queue: str
    filter: str
    params: dict[str, Any]
    from_position: int
    expires_after_seconds: float | None
    last_active_at: Time
    created_at: Time
    set_aside: bool
    last_error: str | None
    stopped_at: Time | None = None
    stopped_position: int | None = None
    errors: int = 0


class Subscriptions(BaseModel):
    subscriptions: list[Subscription]


class CreatedId(BaseModel):
    id: int | None


class ScheduledEvent(BaseModel):
    id: int
    deliver_at: Time
    topic: str
    key: str | None = None
    key_base64: str | None = None
    type: str | None
    event_id: str | None


class Schedules(BaseModel):
    schedules: list[ScheduledEvent]


class CronSchedule(BaseModel):
    name: str
    cron: str
    time_zone: str
    topic: str
    next_at: Time
    last_at: Time | None
    paused: bool


class CronSchedules(BaseModel):
    cron_schedules: list[CronSchedule]


class CronScheduleName(BaseModel):
    name: str


class AppendResult(BaseModel):
    """The positions of the appended events. `repeated`: they already exist from an earlier attempt."""

    positions: list[int]
    repeated: bool
    epoch: int = Field(description="the epoch of the positions; send it with them in later requests")


class StoreEventPage(BaseModel):
    events: list[Event]
    epoch: int = Field(description="the epoch of the positions; send it with them in later requests")


class StoreEventCount(BaseModel):
    count: int


class LatestEvents(BaseModel):
    """The latest event of each item of the query, null if there is none, and the position of the latest of all."""

    events: list[Event | None]
    position: int
    epoch: int = Field(description="the epoch of the positions; send it with them in later requests")


class Permission(BaseModel):
    account: str
    action: str
    kind: str
    name: str
    prefix: bool


class CurrentPrincipal(BaseModel):
    account: str | None
    administrator: bool
    authenticated: bool
    permissions: list[Permission]


class Account(BaseModel):
    name: str
    administrator: bool


class Accounts(BaseModel):
    accounts: list[Account]
    permissions: list[Permission]


class ApiKeyInfo(BaseModel):
    hash: str
    label: str
    created_at: Time
    expires_at: Time | None


class ApiKeys(BaseModel):
    keys: list[ApiKeyInfo]


class NewApiKey(BaseModel):
    """The new API key, which is shown only here, and its hash."""

    key: str
    hash: str


class Pipeline(BaseModel):
    name: str
    source: str
    state: str
    runner: str | None
    leased_until: Time | None
    started_at: Time | None
    checkpoint: int | None = Field(description="a position of the log, or an LSN")
    behind: int | None = Field(description="lag in events of its topics, or in bytes of WAL; null: not known yet")
    behind_is_more: bool = Field(description="the count is a lower bound: events are counted up to 1000")
    batches: int
    rows: int
    last_batch: dict[str, Any] | None
    last_batch_at: Time | None
    failures: int
    last_error: str | None
    last_error_at: Time | None
    definition: dict[str, Any]


class Pipelines(BaseModel):
    pipelines: list[Pipeline]


class PipelineBatch(BaseModel):
    """A batch as reported by the runner; a failed attempt has an error."""

    ended_at: Time
    rows: int
    seconds: float | None
    details: dict[str, Any] | None
    error: str | None


class PipelineBatches(BaseModel):
    batches: list[PipelineBatch]


class KafkaGroup(BaseModel):
    name: str
    active: bool
    generation: int
    partitions: int
    lag: int
    lag_is_more: bool = Field(
        description="the count is a lower bound: in an open topic, records are counted up to 1000"
    )
    committed_at: Time


class KafkaGroups(BaseModel):
    groups: list[KafkaGroup]


class KafkaOffset(BaseModel):
    topic: str
    partition: int
    committed_offset: int
    end_offset: int
    lag: int
    lag_is_more: bool = Field(
        description="the count is a lower bound: in an open topic, records are counted up to 1000"
    )
    committed_at: Time


class KafkaOffsets(BaseModel):
    name: str
    offsets: list[KafkaOffset]


class OldestPublisher(BaseModel):
    pid: int | None
    age_seconds: float | None


class QueueLag(BaseModel):
    name: str
    kind: str
    state: Literal["running", "paused", "no_workers", "stalled", "no_reader"]
    paused: bool
    position: int
    lag_events: int
    lag_is_more: bool = Field(description="the count is a lower bound: new events are counted up to 1000")
    lag_seconds: float | None
    leased: int
    redeliveries: int
    dead: int


class Rates(BaseModel):
    published_per_s: float | None


class Retention(BaseModel):
    oldest: Time | None


class Overview(BaseModel):
    """An overview of the log and its consumers."""

    head: int
    stable: int
    epoch: int
    oldest_publisher: OldestPublisher | None
    topics: int
    events_estimate: int
    rates: Rates
    queues: list[QueueLag]
    cursors: list[Cursor]
    pipelines: list[Pipeline]
    kafka_groups: list[KafkaGroup]
    segments: int
    bytes: int
    retention: Retention
    streams: int = Field(description="open SSE streams of this process")


class Health(BaseModel):
    status: Literal["alive"]


class ReadinessCheck(BaseModel):
    """The result of a check, and what to do if it failed. A check that is not `required` is only a warning."""

    name: str
    ok: bool
    detail: str
    action: str | None
    required: bool


class Readiness(BaseModel):
    ready: bool
    checks: list[ReadinessCheck]


class DcbEvent(BaseModel):
    """An event in the format of dcb.events."""

    id: str | None
    type: str
    data: str
    tags: list[str]
    position: int


class DcbAppendResult(BaseModel):
    durationInMicroseconds: int
    appendConditionFailed: bool


class DcbReadResult(BaseModel):
    durationInMicroseconds: int
    numberOfMatchingEvents: int
