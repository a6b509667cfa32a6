"""Calls for inspecting the log: single events, bound events, leases, lag, size, Kafka consumer groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from headwater.calls.call import Call, Rows, only_value
from headwater.calls.encoding import checked_text
from headwater.calls.reading import EVENT_COLUMNS, decode_events, topic_names
from headwater.log.model import Event, LogFault, ScheduledEvent
from headwater.sql_subscriptions.model import Subscription

# Above every possible position.
MAX_POSITION: Final = 281_474_976_710_655


@dataclass(frozen=True, slots=True)
class QueueLag:
    """A queue of either kind with its lag."""

    name: str
    kind: str
    state: str
    paused: bool
    position: int
    lag_events: int
    lag_is_more: bool
    lag_seconds: float | None
    leased: int
    redeliveries: int
    dead: int


@dataclass(frozen=True, slots=True)
class LeaseOverview:
    """An active lease."""

    token: int
    worker: str
    first_position: int
    last_position: int
    events: int
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class EventRange:
    """A number of events, and the first and last of them. `events_is_more`: the count stopped at a bound."""

    events: int
    events_is_more: bool
    first_position: int | None = None
    last_position: int | None = None


NOTHING: Final = EventRange(0, False)


@dataclass(frozen=True, slots=True)
class SubscriptionTopics:
    """The topics that a queue reads for its subscriptions; None: the whole log. `missing`: it reads for none."""

    missing: bool
    topics: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class LogSize:
    """The size of the log."""

    segments: int
    bytes: int
    events_estimate: int
    oldest: datetime | None


@dataclass(frozen=True, slots=True)
class KafkaGroupOverview:
    """A Kafka consumer group."""

    name: str
    active: bool
    generation: int
    protocol_type: str
    updated_at: datetime
    partitions: int
    lag_events: int
    lag_is_more: bool


@dataclass(frozen=True, slots=True)
class KafkaGroupOffset:
    """The committed offset of a Kafka consumer group in one partition."""

    topic: str
    partition: int
    committed_offset: int
    end_offset: int
    lag: int
    lag_is_more: bool
    committed_at: datetime


def events_at(
    positions: Sequence[int], *, topics: Sequence[str] | None = None, up_to: int | None = None
) -> Call[list[Event]]:
    """The events at these positions, including those published by the current transaction."""
    return Call(
        f"select {EVENT_COLUMNS} from headwater_internal.events_at(%s::bigint[], %s::text[], %s)",
        (list(positions), topic_names(topics), up_to),
        decode_events,
    )


def read_bound(
    queue: str, *, after: int, up_to: int | None = None, batch_size: int = 1000, max_bytes: int = 16_777_216
) -> Call[tuple[list[Event], int]]:
    """Read the events that a queue's bindings select, up to the stable position; and the position to continue after."""

    def decode(rows: Rows) -> tuple[list[Event], int]:
        return decode_events(rows[:-1]), rows[-1][0]

    return Call(
        f"select {EVENT_COLUMNS} from headwater_internal.read_bound(%s, %s, %s, %s, %s)",
        (checked_text(queue, "queue name"), after, up_to, batch_size, max_bytes),
        decode,
    )


def queue_lags() -> Call[list[QueueLag]]:
    return Call(
        "select name, kind, state, paused, position, lag_events, lag_is_more, lag_seconds, leased, redeliveries, dead "
        "from headwater.queue_lag order by name",
        (),
        lambda rows: [QueueLag(*row) for row in rows],
    )


def leases(queue: str) -> Call[list[LeaseOverview]]:
    return Call(
        "select token, worker, first_position, last_position, events, expires_at from headwater_internal.leases(%s)",
        (checked_text(queue, "queue name"),),
        lambda rows: [LeaseOverview(*row) for row in rows],
    )


def topic_contents(topic: str, *, up_to: int = MAX_POSITION) -> Call[EventRange]:
    """Count the events of a topic up to a position; the count is bounded."""
    return Call(
        "select events, events_is_more, first_position, last_position from headwater_internal.topic_contents(%s, %s)",
        (checked_text(topic, "topic name"), up_to),
        lambda rows: EventRange(*rows[0]),
    )


def claimed_position(queue: str) -> Call[int]:
    """The claimed position of a queue."""
    return Call(
        "select headwater_internal.claimed_position(g) from headwater_internal.find_bound_queue(%s) as g",
        (checked_text(queue, "queue name"),),
        only_value,
    )


def bound_contents(
    queue: str, *, after: int, up_to: int = MAX_POSITION, only_binding: int | None = None
) -> Call[EventRange]:
    """Count the events between two positions that a queue's bindings, or only one of them, select; bounded."""
    return Call(
        "select events, events_is_more, first_position, last_position "
        "from headwater_internal.bound_contents(%s, %s, %s, %s::integer)",
        (checked_text(queue, "queue name"), after, up_to, only_binding),
        lambda rows: EventRange(*rows[0]),
    )


def unfinished_contents(queue: str) -> Call[EventRange]:
    """Count the events that a queue has not finished; the count is bounded."""
    return Call(
        "select events, events_is_more, first_position, last_position from headwater_internal.undone_contents(%s)",
        (checked_text(queue, "queue name"),),
        lambda rows: EventRange(*rows[0]),
    )


def dead_letter_count(
    queue: str,
    *,
    positions: Sequence[int] | None = None,
    handler: str | None = None,
    subscription_id: int | None = None,
) -> Call[EventRange]:
    """Count the dead letters of a queue: all, or the selected ones."""
    return Call(
        "select letters, false, first_position, last_position "
        "from headwater_internal.dead_letter_count(%s, %s::bigint[], handler => %s, subscription_id => %s)",
        (
            checked_text(queue, "queue name"),
            None if positions is None else list(positions),
            handler,
            subscription_id,
        ),
        lambda rows: EventRange(*rows[0]),
    )


def log_faults() -> Call[list[LogFault]]:
    """Faults that stop publishing or delivery and do not show in the health figures. Works on a primary only."""
    return Call(
        "select kind, name, position, head from headwater_internal.log_faults()",
        (),
        lambda rows: [LogFault(*row) for row in rows],
    )


def topic_count() -> Call[int]:
    return Call("select count(*) from headwater_internal.topic where deleted_at is null", (), only_value)


def log_size() -> Call[LogSize]:
    return Call(
        "select segments, bytes, events_estimate, oldest from headwater_internal.log_size()",
        (),
        lambda rows: LogSize(*rows[0]),
    )


def find_scheduled(schedule_id: int) -> Call[ScheduledEvent | None]:
    """The scheduled event with this id; None if it does not exist."""
    return Call(
        "select s.id, s.due_at, t.name, s.key, s.type, s.event_id "
        "from headwater_internal.scheduled s join headwater_internal.topic t on t.id = s.topic_id where s.id = %s",
        (schedule_id,),
        lambda rows: ScheduledEvent(*rows[0]) if rows else None,
    )


def find_subscription(subscription_id: int) -> Call[Subscription | None]:
    """The subscription with this id; None if it does not exist."""
    return Call(
        "select s.id, g.name, c.expression, s.params, s.from_position, s.expires_after, s.last_active_at, "
        "s.created_at, f.stopped_at is not null, "
        "case when f.stopped_at is null then c.last_error else f.error end, f.stopped_at, "
        "case when f.stopped_at is not null then f.position end, c.errors from headwater_internal.subscription s "
        "join headwater_internal.queue g on g.id = s.queue_id join headwater_internal.filter c on c.id = s.filter_id "
        "left join headwater_internal.filter_stop f on f.queue_id = s.queue_id and f.filter_id = s.filter_id "
        "where s.id = %s",
        (subscription_id,),
        lambda rows: Subscription(*rows[0]) if rows else None,
    )


def reading_topics(queue: str) -> Call[SubscriptionTopics]:
    """The topics that a queue reads for its subscriptions."""
    return Call(
        "select d.topics from headwater_internal.queue g join headwater_internal.reading d on d.queue_id = g.id "
        "where g.name = %s",
        (checked_text(queue, "queue name"),),
        lambda rows: SubscriptionTopics(not rows, tuple(rows[0][0]) if rows and rows[0][0] is not None else None),
    )


def queue_exists(queue: str) -> Call[bool]:
    return Call(
        "select exists (select from headwater_internal.queue where name = %s)",
        (checked_text(queue, "queue name"),),
        only_value,
    )


_KAFKA_OFFSETS = (
    "select o.group_name, t.name as topic, o.partition, o.committed_offset, "
    "l.end_offset, l.events as lag, l.is_more as lag_is_more, o.committed_at "
    "from headwater_internal.kafka_offset o join headwater_internal.topic t on t.id = o.topic_id and t.deleted_at "
    "is null "
    "cross join lateral headwater_internal.kafka_lag(o.topic_id, o.partition, o.committed_offset) l"
)


def kafka_group_overview() -> Call[list[KafkaGroupOverview]]:
    return Call(
        "select g.name, "
        "exists (select from headwater.kafka_live_broker b where b.incarnation = g.coordinator) "
        "and g.protocol_type <> '', g.generation, g.protocol_type, g.updated_at, "
        "count(o.topic), coalesce(sum(o.lag), 0)::bigint, coalesce(bool_or(o.lag_is_more), false) "
        f"from headwater_internal.kafka_group g left join ({_KAFKA_OFFSETS}) o on o.group_name = g.name "
        "group by g.name order by g.name limit 1000",
        (),
        lambda rows: [KafkaGroupOverview(*row) for row in rows],
    )


def kafka_group_offsets(group: str) -> Call[list[KafkaGroupOffset] | None]:
    """The committed offsets of a Kafka consumer group; None if the group does not exist."""

    def decode(rows: Rows) -> list[KafkaGroupOffset] | None:
        if not rows:
            return None
        return [KafkaGroupOffset(*row) for row in rows if row[0] is not None]

    return Call(
        "select o.topic, o.partition, o.committed_offset, o.end_offset, o.lag, o.lag_is_more, o.committed_at "
        f"from headwater_internal.kafka_group g left join ({_KAFKA_OFFSETS}) o on o.group_name = g.name "
        "where g.name = %s order by o.topic, o.partition",
        (checked_text(group, "group name"),),
        decode,
    )


def redelivery_attempts() -> Call[int]:
    """The sum of the attempts of all events that wait for a retry."""
    return Call("select coalesce(sum(attempt), 0)::bigint from headwater_internal.redelivery", (), only_value)
