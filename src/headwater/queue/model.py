"""Values of queues: settings, bindings, leases, outcomes and dead letters. Immutable and without behavior."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple

from headwater.log.model import Event
from headwater.queue.settings import QueueSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue(QueueSettings):
    """A queue and its settings. A queue is a named consumer with leases, retries and dead letters."""

    name: str
    start_position: int
    paused: bool
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOverview(QueueSettings):
    """A queue, its settings, its progress and its lag.

    `lag_events` counts the unfinished events: ready, processing and retrying. New events are counted up to 1000;
    `ready_is_more` and `lag_is_more` mean that the true number is greater. `state` is running, paused, no_workers or
    stalled; for a queue of SQL subscriptions, running or no_reader.
    """

    name: str
    kind: str
    state: str
    paused: bool
    claimed_position: int
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
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Binding:
    """A rule for which events a queue receives: those after `from_position`, up to `to_position`, that match every part
    that is not None."""

    id: int
    queue: str
    topic: str | None
    type: str | None
    pattern: str | None
    headers: Mapping[str, Any] | None
    from_position: int
    to_position: int | None


class ClaimedEvent(NamedTuple):
    """An event that a worker has claimed, with its lease and the number of this attempt."""

    token: int
    attempt: int
    isolated: bool
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
        """The payload decoded as JSON. Decodes on every access."""
        return None if self.payload is None else json.loads(self.payload)

    @property
    def key_text(self) -> str | None:
        """The key decoded as UTF-8, for keys that were published as text."""
        return None if self.key is None else self.key.decode()


@dataclass(frozen=True, slots=True)
class Lease:
    """A worker's right to a batch of events until `expires_at`, proven by `token`."""

    queue: str
    token: int
    expires_at: datetime
    events: tuple[ClaimedEvent, ...]

    @property
    def isolated(self) -> bool:
        """Whether its one event was leased before and that lease expired, so that it may be what crashes workers. Run
        no other handler at the same time."""
        return self.events[0].isolated


@dataclass(frozen=True, slots=True)
class Retry:
    """The event failed: retry it after `after`, or after the queue's backoff."""

    after: timedelta | None = None
    reason: str = "the handler requested a retry"


@dataclass(frozen=True, slots=True)
class Dead:
    """The event cannot succeed: make it a dead letter without further attempts."""

    reason: str


@dataclass(frozen=True, slots=True)
class Snooze:
    """Deliver the event again after `after`, without counting this as an attempt."""

    after: timedelta = timedelta(0)


Outcome = Retry | Dead | Snooze | None
"""The outcome of an event; None means done."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """The state of one event for one queue."""

    queue: str
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
    """An event that a queue has given up on, with the history of its attempts."""

    position: int
    topic: str | None
    key: bytes | None
    type: str | None
    attempts: int
    last_error: str | None
    history: tuple[Mapping[str, Any], ...]
    died_at: datetime
    # For a queue of SQL subscriptions: the subscription, and the handler that gave up.
    subscription_id: int | None = None
    handler: str | None = None
