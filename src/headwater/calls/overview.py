"""Calls of whoever looks at the log: single events, what bindings select, leases, lag, size, Kafka's groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from headwater.calls.call import Call, Rows, only_value
from headwater.calls.encoding import checked_text
from headwater.calls.reading import EVENT_COLUMNS, decode_events, topic_names
from headwater.model import Event, LogFault, Scheduled, Subscription

# Above every position that there can be.
NO_POSITION: Final = 281_474_976_710_655


@dataclass(frozen=True, slots=True)
class GroupLag:
    """A group of either kind, and how far behind it is."""

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
    """A lease that is out, as others see it."""

    token: int
    worker: str
    first_position: int
    last_position: int
    events: int
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class Contents:
    """How many there are; `events_is_more`: at least so many. And which are the first and the last."""

    events: int
    events_is_more: bool
    first_position: int | None = None
    last_position: int | None = None


NOTHING: Final = Contents(0, False)


@dataclass(frozen=True, slots=True)
class ReadingTopics:
    """What a group reads for its subscriptions; None: the whole log. `missing`: there is no such group yet."""

    missing: bool
    topics: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class LogSize:
    """How large the log is."""

    segments: int
    bytes: int
    events_estimate: int
    oldest: datetime | None


@dataclass(frozen=True, slots=True)
class KafkaGroupOverview:
    """A consumer group of Kafka's clients."""

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
    """How far a consumer group of Kafka's clients is in one partition."""

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
    """The events at these positions, also those that the caller's own transaction has published."""
    return Call(
        f"select {EVENT_COLUMNS} from headwater.events_at(%s::bigint[], %s::text[], %s)",
        (list(positions), topic_names(topics), up_to),
        decode_events,
    )


def read_bound(
    group: str, *, after: int, up_to: int | None = None, batch_size: int = 1000, max_bytes: int = 16_777_216
) -> Call[tuple[list[Event], int]]:
    """What a queue's bindings select after a position, up to what is stable or less, and where to go on."""

    def decode(rows: Rows) -> tuple[list[Event], int]:
        return decode_events(rows[:-1]), rows[-1][0]

    return Call(
        f"select {EVENT_COLUMNS} from headwater.read_bound(%s, %s, %s, %s, %s)",
        (checked_text(group, "group name"), after, up_to, batch_size, max_bytes),
        decode,
    )


def group_lags() -> Call[list[GroupLag]]:
    return Call(
        "select name, kind, state, paused, position, lag_events, lag_is_more, lag_seconds, leased, redeliveries, dead "
        "from headwater.group_lag order by name",
        (),
        lambda rows: [GroupLag(*row) for row in rows],
    )


def leases(group: str) -> Call[list[LeaseOverview]]:
    return Call(
        "select token, worker, first_position, last_position, events, expires_at from headwater.leases(%s)",
        (checked_text(group, "group name"),),
        lambda rows: [LeaseOverview(*row) for row in rows],
    )


def topic_contents(topic: str, *, up_to: int = NO_POSITION) -> Call[Contents]:
    """What a topic holds, or holds up to a position, counted up to a bound."""
    return Call(
        "select events, events_is_more, first_position, last_position from headwater.topic_contents(%s, %s)",
        (checked_text(topic, "topic name"), up_to),
        lambda rows: Contents(*rows[0]),
    )


def frontier(group: str) -> Call[int]:
    """The last position that a queue has claimed."""
    return Call(
        "select headwater.frontier(g) from headwater.find_queue(%s) as g",
        (checked_text(group, "group name"),),
        only_value,
    )


def bound_contents(
    group: str, *, after: int, up_to: int = NO_POSITION, only_binding: int | None = None
) -> Call[Contents]:
    """What a queue's bindings select after a position, up to another, counted up to a bound; or only one of them."""
    return Call(
        "select events, events_is_more, first_position, last_position "
        "from headwater.bound_contents(%s, %s, %s, %s::integer)",
        (checked_text(group, "group name"), after, up_to, only_binding),
        lambda rows: Contents(*rows[0]),
    )


def undone_contents(group: str) -> Call[Contents]:
    """What a queue has yet to be done with, counted up to a bound."""
    return Call(
        "select events, events_is_more, first_position, last_position from headwater.undone_contents(%s)",
        (checked_text(group, "group name"),),
        lambda rows: Contents(*rows[0]),
    )


def dead_letter_count(
    group: str,
    *,
    positions: Sequence[int] | None = None,
    handler: str | None = None,
    subscription_id: int | None = None,
) -> Call[Contents]:
    """How many dead letters of a group there are; all, or of those named."""
    return Call(
        "select letters, false, first_position, last_position "
        "from headwater.dead_letter_count(%s, %s::bigint[], handler => %s, subscription_id => %s)",
        (
            checked_text(group, "group name"),
            None if positions is None else list(positions),
            handler,
            subscription_id,
        ),
        lambda rows: Contents(*rows[0]),
    )


def event_stores() -> Call[frozenset[str]]:
    """The names of the topics that are event stores."""
    return Call(
        "select name from headwater.topic where event_store and deleted_at is null",
        (),
        lambda rows: frozenset(name for (name,) in rows),
    )


def log_faults() -> Call[list[LogFault]]:
    """What stops publishing or delivery, and cannot be seen in the log's figures. Asked of a primary only."""
    return Call(
        "select kind, name, position, head from headwater.log_faults()",
        (),
        lambda rows: [LogFault(*row) for row in rows],
    )


def topic_count() -> Call[int]:
    return Call("select count(*) from headwater.topic where deleted_at is null", (), only_value)


def log_size() -> Call[LogSize]:
    return Call(
        "select segments, bytes, events_estimate, oldest from headwater.log_size()", (), lambda rows: LogSize(*rows[0])
    )


def find_scheduled(schedule_id: int) -> Call[Scheduled | None]:
    """The event that waits under this id; None: none does."""
    return Call(
        "select s.id, s.due_at, t.name, s.key, s.type, s.event_id "
        "from headwater.scheduled s join headwater.topic t on t.id = s.topic_id where s.id = %s",
        (schedule_id,),
        lambda rows: Scheduled(*rows[0]) if rows else None,
    )


def find_subscription(subscription_id: int) -> Call[Subscription | None]:
    """The subscription of this id; None: there is none."""
    return Call(
        "select s.id, g.name, c.expression, s.params, s.from_position, s.expires_after, s.last_active_at, "
        "s.created_at, f.stopped_at is not null, "
        "case when f.stopped_at is null then c.last_error else f.error end, f.stopped_at, "
        "case when f.stopped_at is not null then f.position end, c.errors from headwater.subscription s "
        "join headwater.consumer_group g on g.id = s.group_id join headwater.condition c on c.id = s.condition_id "
        "left join headwater.filter_stop f on f.group_id = s.group_id and f.condition_id = s.condition_id "
        "where s.id = %s",
        (subscription_id,),
        lambda rows: Subscription(*rows[0]) if rows else None,
    )


def reading_topics(group: str) -> Call[ReadingTopics]:
    """The topics that a group reads for its subscriptions."""
    return Call(
        "select d.topics from headwater.consumer_group g join headwater.reading d on d.group_id = g.id "
        "where g.name = %s",
        (checked_text(group, "group name"),),
        lambda rows: ReadingTopics(not rows, tuple(rows[0][0]) if rows and rows[0][0] is not None else None),
    )


def group_exists(group: str) -> Call[bool]:
    return Call(
        "select exists (select from headwater.consumer_group where name = %s)",
        (checked_text(group, "group name"),),
        only_value,
    )


_KAFKA_OFFSETS = (
    "select o.group_name, t.name as topic, o.partition, o.committed_offset, "
    "l.end_offset, l.events as lag, l.is_more as lag_is_more, o.committed_at "
    "from headwater.kafka_offset o join headwater.topic t on t.id = o.topic_id and t.deleted_at is null "
    "cross join lateral headwater.kafka_lag(o.topic_id, o.partition, o.committed_offset) l"
)


def kafka_group_overview() -> Call[list[KafkaGroupOverview]]:
    return Call(
        "select g.name, "
        "exists (select from headwater.kafka_live_broker b where b.incarnation = g.coordinator) "
        "and g.protocol_type <> '', g.generation, g.protocol_type, g.updated_at, "
        "count(o.topic), coalesce(sum(o.lag), 0)::bigint, coalesce(bool_or(o.lag_is_more), false) "
        f"from headwater.kafka_group g left join ({_KAFKA_OFFSETS}) o on o.group_name = g.name "
        "group by g.name order by g.name limit 1000",
        (),
        lambda rows: [KafkaGroupOverview(*row) for row in rows],
    )


def kafka_group_offsets(group: str) -> Call[list[KafkaGroupOffset] | None]:
    """How far a group is in each partition; None: there is no such group."""

    def decode(rows: Rows) -> list[KafkaGroupOffset] | None:
        if not rows:
            return None
        return [KafkaGroupOffset(*row) for row in rows if row[0] is not None]

    return Call(
        "select o.topic, o.partition, o.committed_offset, o.end_offset, o.lag, o.lag_is_more, o.committed_at "
        f"from headwater.kafka_group g left join ({_KAFKA_OFFSETS}) o on o.group_name = g.name "
        "where g.name = %s order by o.topic, o.partition",
        (checked_text(group, "group name"),),
        decode,
    )


def redelivery_attempts() -> Call[int]:
    """How often all events that wait for another try were tried."""
    return Call("select coalesce(sum(attempt), 0)::bigint from headwater.redelivery", (), only_value)
