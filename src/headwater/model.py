"""The values that cross the API. All are immutable; none does anything.

Those that come by the thousand are named tuples: five times cheaper to make than frozen dataclasses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple

Payload = Any
"""Anything JSON can hold; bytes are kept to the bit; None is an event without a payload (Kafka's tombstone)."""

TopicKind = Literal["open", "sequenced"]


class NewEvent(NamedTuple):
    """An event as a publisher hands it over."""

    payload: Payload
    key: str | bytes | None = None
    type: str | None = None
    routing_key: str | None = None
    headers: Mapping[str, Any] | None = None
    event_id: str | None = None
    content_type: str | None = None
    partition: int | None = None


class Event(NamedTuple):
    """One immutable fact of the log."""

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
        """The payload read as JSON, each time anew."""
        return None if self.payload is None else json.loads(self.payload)

    @property
    def key_text(self) -> str | None:
        """The key as text, for keys that were published as text."""
        return None if self.key is None else self.key.decode()


@dataclass(frozen=True, slots=True)
class Topic:
    """A named part of the log with its settings."""

    id: int
    name: str
    kind: TopicKind
    partitions: int
    retention: timedelta | None
    max_payload_bytes: int
    max_header_bytes: int
    created_at: datetime
    expired_to: int


@dataclass(frozen=True, slots=True)
class TopicOverview:
    """A topic with what it holds."""

    name: str
    kind: TopicKind
    partitions: int
    retention: timedelta | None
    max_payload_bytes: int
    max_header_bytes: int
    created_at: datetime
    expired_to: int
    first_position: int | None
    last_position: int | None
    last_published_at: datetime | None


@dataclass(frozen=True, slots=True)
class Cursor:
    """A reader's saved position, with what it has yet to read: events of its own topics, counted up to 1000.

    `lag_is_more` says that there are more.
    """

    name: str
    position: int
    topics: tuple[str, ...] | None
    must_not_lose: bool
    updated_at: datetime
    lag_events: int
    lag_is_more: bool
    oldest_unread_age: timedelta | None


class OpenedCursor(NamedTuple):
    """Where a cursor stands, up to where events were gone already when it was set, and its topics; None: all."""

    position: int
    gone_to: int
    topics: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Scheduled:
    """An event that waits for its time."""

    id: int
    due_at: datetime
    topic: str
    key: bytes | None
    type: str | None
    event_id: str | None


class LogState(NamedTuple):
    """How far the log goes: `drawn` positions exist or may yet appear; up to `settled` nothing can change.

    `epoch`: positions of another epoch may stand for other events. Keep it beside every position that you remember.
    """

    drawn: int
    settled: int
    epoch: int


class LogStateByTopic(NamedTuple):
    """A LogState for a reader of many topics: `held` has those of `topics` that are stable only to below `drawn`.

    `bounds` are those of all open publishers: while they and `drawn` are the same, so is the answer for any topic.
    """

    drawn: int
    settled: int
    epoch: int
    bounds: tuple[int, ...]
    topics: frozenset[str]
    held: dict[str, int]


class Released(NamedTuple):
    """What entered the log because it was due, and in how many seconds the next one is."""

    released: int
    next_due_seconds: float | None


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What one round of maintenance did."""

    busy: bool
    released: int
    segments_made: int
    segments_dropped: int
    events_swept: int


class Sample(NamedTuple):
    """One figure: which metric, the values of its labels, how much."""

    name: str
    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True)
class LogHealth:
    """What tells whether the log can be worked with. None: there is nothing to tell, or a standby cannot."""

    primary_server: bool
    writable: bool
    maintained_seconds_ago: float | None
    positions_left: int | None
    oldest_publisher_pid: int | None
    oldest_publisher_seconds: float | None
    unsettled: int | None


@dataclass(frozen=True, slots=True)
class Publisher:
    """A transaction that has published and is still open: what readers wait for."""

    pid: int | None
    prepared: bool
    position_bound: int
    user_name: str | None
    application_name: str | None
    state: str | None
    began_at: datetime | None
    age: timedelta | None
    # None: it may publish to any. Readers of other topics do not wait for it.
    topics: Sequence[str] | None


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Settings of the whole log."""

    segment_interval: timedelta
    segments_ahead: int
    auto_create_topics: bool
    kafka_offsets_kept: timedelta
    # Publishing transactions that stay open longer are ended; None: never.
    max_publisher_seconds: float | None


# --- groups --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """A named consumer that keeps a lifecycle for each event, with its settings."""

    name: str
    start_position: int
    lease_seconds: float
    max_attempts: int
    backoff_seconds: float
    backoff_factor: float
    backoff_max_seconds: float
    backoff_jitter: float
    ordered_keys: bool
    max_in_flight: int | None
    must_not_lose: bool
    paused: bool
    created_at: datetime


@dataclass(frozen=True, slots=True)
class LogFault:
    """What stops publishing or delivery: a segment without its table; a register, cursor or group beyond the head."""

    kind: str
    name: str
    position: int
    head: int


@dataclass(frozen=True, slots=True)
class GroupOverview:
    """A group with how far it has come.

    `lag_events` is what it has not finished: ready, processing and retrying. New events are counted up to 1000;
    `ready_is_more` and `lag_is_more` say that there are more. `state` is running, paused, no_workers or stalled; of a
    group that reads for subscriptions, running or no_reader.
    """

    name: str
    kind: str
    state: str
    paused: bool
    frontier: int
    ready: int
    ready_is_more: bool
    lag_events: int
    lag_is_more: bool
    lag_seconds: float | None
    unfinished_seconds: float | None
    processing: int
    retrying: int
    dead: int
    done: int
    last_claimed_at: datetime | None
    last_worker: str | None
    ordered_keys: bool
    max_attempts: int
    lease_seconds: float
    max_in_flight: int | None
    must_not_lose: bool
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Binding:
    """Which events a group gets: those after `from_position`, up to `to_position`, that fit every part given."""

    id: int
    group: str
    topic: str | None
    type: str | None
    pattern: str | None
    headers: Mapping[str, Any] | None
    from_position: int
    to_position: int | None


class ClaimedEvent(NamedTuple):
    """An event as a worker gets it: which try this is, the lease that it came in, and the event itself."""

    token: int
    attempt: int
    alone: bool
    expires_at: datetime
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
    def event(self) -> Event:
        """The event without the lease."""
        return Event._make(self[4:])

    @property
    def data(self) -> Any:
        """The payload read as JSON, each time anew."""
        return None if self.payload is None else json.loads(self.payload)

    @property
    def key_text(self) -> str | None:
        """The key as text, for keys that were published as text."""
        return None if self.key is None else self.key.decode()


@dataclass(frozen=True, slots=True)
class Lease:
    """A worker's right to a batch of events until `expires_at`, proven by `token`."""

    group: str
    token: int
    expires_at: datetime
    events: tuple[ClaimedEvent, ...]

    @property
    def alone(self) -> bool:
        """Whether its one event may be what kills workers: run it with nothing else beside it."""
        return self.events[0].alone


@dataclass(frozen=True, slots=True)
class Retry:
    """The event failed: try again after so long, or after the group's backoff."""

    after: timedelta | None = None
    reason: str = "asked for another try"


@dataclass(frozen=True, slots=True)
class Dead:
    """The event will never succeed: a dead letter at once."""

    reason: str


@dataclass(frozen=True, slots=True)
class Snooze:
    """Not now: again after so long, not counted as a try."""

    after: timedelta = timedelta(0)


Outcome = Retry | Dead | Snooze | None
"""How an event ended; None is done."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """The state of one event for one group."""

    group: str
    position: int
    topic: str
    status: Literal["ready", "processing", "done", "dead"]
    attempts: int
    run_at: datetime | None
    leased_until: datetime | None
    worker: str | None
    last_error: str | None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An event that a group has given up on, with every try that it had."""

    position: int
    topic: str | None
    key: bytes | None
    type: str | None
    attempts: int
    last_error: str | None
    history: tuple[Mapping[str, Any], ...]
    died_at: datetime
    # Of a group that reads for subscriptions: which of them, and which handler gave up.
    subscription_id: int | None = None
    handler: str | None = None


@dataclass(frozen=True, slots=True)
class Webhook:
    """A group whose events are sent to a URL: those of a queue, or those that SQL subscriptions match. Its retries, and
    how many are sent at once, are those of its group."""

    id: int
    name: str
    group: str
    url: str
    headers: Mapping[str, str]
    body: Literal["envelope", "raw"]
    timeout_seconds: float
    max_concurrency: int | None
    rate_per_second: float | None
    gzip_above_bytes: int | None
    client_errors: Literal["retry", "dead"]
    state: Literal["active", "paused", "disabled"]
    state_reason: str | None
    created_at: datetime
    updated_at: datetime
    uid: str
    version: int
    # Not in a repr: what is printed ends up in logs.
    secrets: tuple[str, ...] = field(repr=False)


class WebhookRoute(NamedTuple):
    """A webhook that is to be delivered, with what a worker of its group must know."""

    webhook: Webhook
    lease_seconds: float
    ordered_keys: bool
    # 'queue', or 'cursor': its events are those that SQL subscriptions of the group match.
    kind: str = "queue"


@dataclass(frozen=True, slots=True)
class WebhookTest:
    """What came of a test: the answer's status and the beginning of its body, or why there was none."""

    webhook: str
    accepted: bool
    message_id: str
    status: int | None
    latency_ms: float
    response: str
    error: str | None


@dataclass(frozen=True, slots=True)
class Periodic:
    """An event that is published at the times of a cron expression."""

    name: str
    cron: str
    time_zone: str
    topic: str
    next_at: datetime
    last_at: datetime | None
    paused: bool


class DuePeriodic(NamedTuple):
    """A periodic event whose time has come."""

    name: str
    cron: str
    time_zone: str
    due_at: datetime


@dataclass(frozen=True, slots=True)
class Subscription:
    """A SQL condition with parameters, owned by a group."""

    id: int
    group: str
    condition: str
    params: Mapping[str, Any]
    from_position: int
    expires_after: timedelta | None
    last_active_at: datetime
    created_at: datetime
    broken: bool
    last_error: str | None
    stopped_at: datetime | None = None
    stopped_position: int | None = None
    errors: int = 0


class MatchedEvent(NamedTuple):
    """An event with the subscriptions that it matched; `handler` is set where one handler asked to have it again."""

    subscription_ids: tuple[int, ...]
    retry_id: int | None
    handler: str | None
    attempt: int
    event: Event


@dataclass(frozen=True, slots=True)
class Reading:
    """The next events of a group, and the position to go on from."""

    next_position: int
    events: tuple[MatchedEvent, ...]


class PipelineClaim(NamedTuple):
    """The answer to a runner that asked for a pipeline. Without a token it did not get it."""

    token: int | None
    place: int | None
    generation: int
    held_by: str | None
    stopped: bool
    rewound_in: int | None
    """The epoch in which it was last set back from a history that the log lost."""


class PipelineSnapshot(NamedTuple):
    """A table that a pipeline has loaded whole: what of it the snapshot saw, xmin:xmax:xip, and about where."""

    table: str
    visible: str
    lsn: int
    rows: int


@dataclass(frozen=True, slots=True)
class PipelineBatch:
    """A batch of a pipeline as its runner told of it, or, with an error, a try that failed."""

    ended_at: datetime
    rows: int
    details: Mapping[str, Any] | None
    error: str | None


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """A pipeline as it stands. `place` is a position of the log or an LSN.

    `behind` counts events of its own topics, up to 1000 (`behind_is_more`: there are more), or bytes of WAL.
    """

    name: str
    source: str
    state: str
    runner: str | None
    leased_until: datetime | None
    started_at: datetime | None
    place: int | None
    behind: int | None
    behind_is_more: bool
    batches: int
    rows: int
    last_batch: Mapping[str, Any] | None
    last_batch_at: datetime | None
    failures: int
    last_error: str | None
    last_error_at: datetime | None
    definition: Mapping[str, Any]
