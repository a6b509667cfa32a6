"""What answers are made of, for the description of the API. Answers are written by hand, and tested against these."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

Time = datetime


class Event(BaseModel):
    """An event: its place, what it is about, and one of data, text and base64."""

    position: int
    topic: str
    partition: int
    offset: int | None
    type: str | None
    key: str | None = None
    key_base64: str | None = None
    routing_key: str | None = None
    headers: dict[str, Any] = {}
    tags: list[str] | None = Field(default=None, description="of an event of an event store")
    metadata: dict[str, Any] | None = Field(default=None, description="of an event of an event store")
    content_type: str | None
    event_id: str | None
    published_at: Time
    data: Any = None
    text: str | None = None
    base64: str | None = None


class EventPage(BaseModel):
    """Events, and the query string of the next page; null: there is none. A page may be empty and not the last."""

    events: list[Event]
    next: str | None
    settled: int
    epoch: int = Field(description="the epoch that the positions are of: give it back with them")


class Published(BaseModel):
    """Where events are; null for one that waits for its time."""

    positions: list[int | None]


class Topic(BaseModel):
    """A topic with what it holds."""

    name: str
    kind: Literal["open", "sequenced"]
    event_store: bool
    partitions: int
    retention_seconds: float | None
    max_payload_bytes: int
    max_header_bytes: int
    created_at: Time
    expired_to: int
    first_position: int | None
    last_position: int | None
    last_published_at: Time | None


class Topics(BaseModel):
    topics: list[Topic]


class Some(BaseModel):
    """Some events: how many, counted up to 10,000, and between which positions."""

    events: int
    events_is_more: bool = Field(description="there are more than were counted")
    first: int | None
    last: int | None


class ChangedTopic(Topic, Some):
    """A topic as it is now, and its events that are older than the retention asked for: those that go with it."""

    dry_run: bool


class Deleted(Some):
    """What was deleted, or would be: the events of a topic; of a group or a webhook, those it has yet to be done with;
    of a subscription, those it has yet to get, among the next 10,000 that its group reads."""

    deleted: bool


class Group(BaseModel):
    """A queue group with its settings and how far it has come."""

    name: str
    kind: Literal["queue", "cursor"]
    state: Literal["running", "paused", "no_workers", "stalled", "no_reader"]
    paused: bool
    frontier: int
    ready: int
    ready_is_more: bool = Field(description="there are more: new events are counted up to 1000")
    lag_events: int = Field(description="what it has not finished: ready, processing and retrying")
    lag_is_more: bool = Field(description="there are more: new events are counted up to 1000")
    lag_seconds: float | None = Field(description="age of the oldest event that it has not claimed; null: none")
    unfinished_seconds: float | None = Field(description="age of the oldest event that it has not finished; null: none")
    processing: int
    retrying: int
    dead: int
    done: int
    last_claimed_at: Time | None = Field(description="when a worker last asked for events, within 10 seconds")
    last_worker: str | None = Field(description="the worker that asked then")
    ordered_keys: bool
    max_attempts: int
    lease_seconds: float
    max_in_flight: int | None
    must_not_lose: bool
    created_at: Time


class Groups(BaseModel):
    groups: list[Group]


class GroupDetail(Group):
    start_position: int
    backoff_seconds: float
    backoff_factor: float
    backoff_max_seconds: float
    backoff_jitter: float


class DeletedGroup(Deleted):
    ready: int
    ready_is_more: bool
    processing: int
    dead: int


class Binding(BaseModel):
    id: int
    group: str
    topic: str | None
    type: str | None
    pattern: str | None
    headers: dict[str, Any] | None
    from_position: int
    to_position: int | None


class Bindings(BaseModel):
    bindings: list[Binding]


class Unbound(Some):
    """The last position that the binding still takes, and the events after it that no other binding selects."""

    to_position: int
    dry_run: bool


class ClaimedEvent(Event):
    attempt: int


class Lease(BaseModel):
    """A worker's right to events until it ends. Without events there is nothing to do now."""

    token: str | None
    expires_at: Time | None
    alone: bool = Field(description="its one event may be what kills workers: run it with nothing beside it")
    events: list[ClaimedEvent]


class Settled(BaseModel):
    settled: bool


class Extended(BaseModel):
    expires_at: Time


class HeldLease(BaseModel):
    token: str
    worker: str
    first_position: int
    last_position: int
    events: int
    expires_at: Time


class Leases(BaseModel):
    leases: list[HeldLease]


class Rewound(BaseModel):
    """Where a group begins anew, and how many events come after that."""

    to: int
    events: int
    events_is_more: bool
    again: Some = Field(description="those that it had claimed, and gets once more")
    skipped: Some = Field(description="those that it had not claimed, and never gets")
    dry_run: bool


class DeadLetter(BaseModel):
    position: int
    topic: str | None
    attempts: int
    error: str | None
    history: list[dict[str, Any]]
    died_at: Time
    subscription: int | None = Field(description="the SQL subscription; null: the group is a queue")
    handler: str | None = Field(description="the subscriber's handler that gave up; null: the group is a queue")
    event: Event | None = Field(description="null: retention took it, or its topic is gone")


class DeadLetters(BaseModel):
    dead: list[DeadLetter]
    next: str | None


class Counted(BaseModel):
    count: int
    first: int | None
    last: int | None
    dry_run: bool


class Paused(BaseModel):
    paused: bool


class Cursor(BaseModel):
    name: str
    position: int
    topics: list[str] | None
    must_not_lose: bool
    updated_at: Time
    lag_events: int
    lag_is_more: bool = Field(description="there are more: events are counted up to 1000")
    lag_seconds: float | None


class Cursors(BaseModel):
    cursors: list[Cursor]


class CursorSet(BaseModel):
    name: str
    position: int
    epoch: int = Field(description="the epoch that the positions are of: give it back with them")


class Gone(BaseModel):
    deleted: bool


class Subscription(BaseModel):
    id: int
    group: str
    condition: str
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


class Made(BaseModel):
    id: int | None


class Scheduled(BaseModel):
    id: int
    deliver_at: Time
    topic: str
    key: str | None = None
    key_base64: str | None = None
    type: str | None
    event_id: str | None


class Schedules(BaseModel):
    schedules: list[Scheduled]


class Periodic(BaseModel):
    name: str
    cron: str
    time_zone: str
    topic: str
    next_at: Time
    last_at: Time | None
    paused: bool


class Periodics(BaseModel):
    periodics: list[Periodic]


class Named(BaseModel):
    name: str


class Appended(BaseModel):
    """Where the events are. `repeated`: they were there already, from an earlier try."""

    positions: list[int]
    repeated: bool
    epoch: int = Field(description="the epoch that the positions are of: give it back with them")


class StoreEvents(BaseModel):
    events: list[Event]
    epoch: int = Field(description="the epoch that the positions are of: give it back with them")


class Count(BaseModel):
    count: int


class LatestEvents(BaseModel):
    """The latest event of each item of the query, null where there is none, and the position of the latest of all."""

    events: list[Event | None]
    position: int
    epoch: int = Field(description="the epoch that the positions are of: give it back with them")


class Permission(BaseModel):
    account: str
    action: str
    kind: str
    name: str
    prefix: bool


class Me(BaseModel):
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


class Key(BaseModel):
    hash: str
    label: str
    created_at: Time
    expires_at: Time | None


class Keys(BaseModel):
    keys: list[Key]


class NewKey(BaseModel):
    """The key, which is shown this once, and the hash by which it is named."""

    key: str
    hash: str


class Pipeline(BaseModel):
    name: str
    source: str
    state: str
    runner: str | None
    leased_until: Time | None
    started_at: Time | None
    place: int | None
    behind: int | None = Field(description="events of its own topics, or bytes of WAL; null: not known yet")
    behind_is_more: bool = Field(description="there are more: events are counted up to 1000")
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
    """A batch as its runner told of it; with an error, a try that failed."""

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
    lag_is_more: bool = Field(description="there are more: in an open topic records are counted up to 1000")
    committed_at: Time


class KafkaGroups(BaseModel):
    groups: list[KafkaGroup]


class KafkaOffset(BaseModel):
    topic: str
    partition: int
    committed_offset: int
    end_offset: int
    lag: int
    lag_is_more: bool = Field(description="there are more: in an open topic records are counted up to 1000")
    committed_at: Time


class KafkaOffsets(BaseModel):
    name: str
    offsets: list[KafkaOffset]


class OldestPublisher(BaseModel):
    pid: int | None
    age_seconds: float | None


class GroupLag(BaseModel):
    name: str
    kind: str
    state: Literal["running", "paused", "no_workers", "stalled", "no_reader"]
    paused: bool
    position: int
    lag_events: int
    lag_is_more: bool = Field(description="there are more: new events are counted up to 1000")
    lag_seconds: float | None
    leased: int
    redeliveries: int
    dead: int


class Rates(BaseModel):
    published_per_s: float | None


class Retention(BaseModel):
    oldest: Time | None


class Overview(BaseModel):
    """The log at a glance."""

    head: int
    settled: int
    epoch: int
    oldest_publisher: OldestPublisher | None
    topics: int
    events_estimate: int
    rates: Rates
    groups: list[GroupLag]
    cursors: list[Cursor]
    pipelines: list[Pipeline]
    kafka_groups: list[KafkaGroup]
    segments: int
    bytes: int
    retention: Retention
    streams: int = Field(description="live streams of this process")


class Health(BaseModel):
    status: Literal["alive"]


class Check(BaseModel):
    """What was looked at, and what to do if it is not well. One that is not `required` is a warning only."""

    name: str
    ok: bool
    detail: str
    action: str | None
    required: bool


class Ready(BaseModel):
    ready: bool
    checks: list[Check]


class DcbEvent(BaseModel):
    """An event in the shape of dcb.events."""

    id: str | None
    type: str
    data: str
    tags: list[str]
    position: int


class DcbAppended(BaseModel):
    durationInMicroseconds: int
    appendConditionFailed: bool


class DcbCounted(BaseModel):
    durationInMicroseconds: int
    numberOfMatchingEvents: int
