"""Calls that publish: immediately, at a later time, or on a cron schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from headwater.calls.call import Call, nothing, only_value
from headwater.calls.encoding import (
    checked_text,
    encode_headers,
    encode_key,
    encode_payload,
    optional_text,
    packed_bytes,
    packed_bytes_or_null,
    packed_text_or_null,
)
from headwater.log.model import CronSchedule, DueCronSchedule, NewEvent, Payload, ReleaseResult, ScheduledEvent

# How to publish on a connection that calls cannot use, by the package that the connection comes with.
SQL_EXAMPLES: Mapping[str, str] = {
    "sqlalchemy": "session.execute(text('select headwater.publish(:topic, cast(:payload as jsonb))'), "
    "{'topic': 'orders', 'payload': json.dumps({'id': 42})})",
    "django": "connection.cursor().execute('select headwater.publish(%s, %s)', ['orders', json.dumps({'id': 42})])",
    "asyncpg": "await connection.execute('select headwater.publish($1, cast($2::text as jsonb))', 'orders', "
    "json.dumps({'id': 42}))",
    "psycopg2": "connection.cursor().execute('select headwater.publish(%s, %s)', ['orders', json.dumps({'id': 42})])",
}


def publish(
    topic: str,
    payload: Payload,
    *,
    key: str | bytes | None = None,
    type: str | None = None,
    routing_key: str | None = None,
    headers: Mapping[str, Any] | None = None,
    event_id: str | None = None,
    content_type: str | None = None,
    deliver_at: datetime | None = None,
) -> Call[int | None]:
    """Publish one event; returns its position, or None if it is scheduled for later."""
    body, content_type = encode_payload(payload, content_type)
    return Call(
        "select headwater.publish_bytes(%s, %b, %b, %s, %s, %s::jsonb, %s, %s, %s)",
        (
            checked_text(topic, "topic name"),
            body,
            encode_key(key),
            optional_text(type, "type"),
            optional_text(routing_key, "routing key"),
            encode_headers(headers),
            optional_text(content_type, "content type"),
            optional_text(event_id, "event id"),
            deliver_at,
        ),
        only_value,
    )


def publish_batch(topic: str, events: Sequence[NewEvent]) -> Call[list[int | None]]:
    """Publish all of these events or none, in this order; returns their positions."""
    bodies = [encode_payload(event.payload, event.content_type) for event in events]
    partitions = [event.partition for event in events]
    return Call(
        "select headwater.publish_batch(%s, %b, %b, %b, %b, %b, %b, %b, %s::int[])",
        (
            checked_text(topic, "topic name"),
            packed_bytes([body for body, _ in bodies]),
            packed_bytes_or_null([encode_key(event.key) for event in events]),
            packed_text_or_null([event.type for event in events], "type"),
            packed_text_or_null([event.routing_key for event in events], "routing key"),
            packed_text_or_null([encode_headers(event.headers) for event in events], "header"),
            packed_text_or_null([content_type for _, content_type in bodies], "content type"),
            packed_text_or_null([event.event_id for event in events], "event id"),
            partitions if any(partition is not None for partition in partitions) else None,
        ),
        only_value,
    )


def begin_copy(topic: str) -> Call[bool]:
    """Prepare a COPY of events of one topic, in its transaction; False: the role lacks the permission and must publish
    in batches."""
    return Call("select headwater_internal.begin_copy(%s)", (checked_text(topic, "topic name"),), only_value)


def end_copy() -> Call[None]:
    return Call("select headwater_internal.end_copy()", (), nothing)


def schedule(
    topic: str,
    payload: Payload,
    deliver_at: datetime,
    *,
    key: str | bytes | None = None,
    type: str | None = None,
    routing_key: str | None = None,
    headers: Mapping[str, Any] | None = None,
    event_id: str | None = None,
    content_type: str | None = None,
) -> Call[int | None]:
    """Schedule one event; returns its schedule id, or None if its event id is already in the log."""
    body, content_type = encode_payload(payload, content_type)
    return Call(
        "select headwater.schedule_bytes(%s, %b, %s, %b, %s, %s, %s::jsonb, %s, %s)",
        (
            checked_text(topic, "topic name"),
            body,
            deliver_at,
            encode_key(key),
            optional_text(type, "type"),
            optional_text(routing_key, "routing key"),
            encode_headers(headers),
            optional_text(content_type, "content type"),
            optional_text(event_id, "event id"),
        ),
        only_value,
    )


def scheduled(*, topics: Sequence[str] | None = None, batch_size: int = 100) -> Call[list[ScheduledEvent]]:
    """The scheduled events of these topics, or of all topics."""
    names = None if topics is None else list(topics)
    return Call(
        "select s.id, s.due_at, t.name, s.key, s.type, s.event_id "
        "from headwater_internal.scheduled s join headwater_internal.topic t on t.id = s.topic_id "
        "where %s::text[] is null or t.name = any (%s::text[]) order by s.due_at, s.id limit %s",
        (names, names, batch_size),
        lambda rows: [ScheduledEvent(*row) for row in rows],
    )


def cancel_scheduled(schedule_id: int) -> Call[bool]:
    return Call("select headwater.cancel_scheduled(%s)", (schedule_id,), only_value)


def move_scheduled(schedule_id: int, deliver_at: datetime) -> Call[bool]:
    return Call("select headwater.move_scheduled(%s, %s)", (schedule_id, deliver_at), only_value)


def release_due(*, batch_size: int = 1000) -> Call[ReleaseResult]:
    return Call(
        "select released, next_due_seconds from headwater_internal.release_due(%s)",
        (batch_size,),
        lambda rows: ReleaseResult(*rows[0]),
    )


def set_cron_schedule(
    name: str,
    cron: str,
    topic: str,
    payload: Payload,
    *,
    next_at: datetime,
    time_zone: str = "UTC",
    key: str | bytes | None = None,
    type: str | None = None,
    routing_key: str | None = None,
    headers: Mapping[str, Any] | None = None,
    content_type: str | None = None,
) -> Call[None]:
    """Create or replace a cron schedule."""
    body, content_type = encode_payload(payload, content_type)
    return Call(
        "select headwater.set_cron_schedule(%s, %s, %s, %s, %s, %b, %b, %s, %s, %s::jsonb, %s)",
        (
            checked_text(name, "schedule name"),
            cron,
            time_zone,
            checked_text(topic, "topic name"),
            next_at,
            body,
            encode_key(key),
            optional_text(type, "type"),
            optional_text(routing_key, "routing key"),
            encode_headers(headers),
            optional_text(content_type, "content type"),
        ),
        nothing,
    )


def due_cron_schedules() -> Call[list[DueCronSchedule]]:
    return Call(
        "select name, cron, time_zone, due_at from headwater_internal.due_cron_schedules()",
        (),
        lambda rows: [DueCronSchedule(*row) for row in rows],
    )


def fire_cron_schedule(name: str, *, due_at: datetime, next_at: datetime) -> Call[bool]:
    """Publish the event of a due cron schedule; False if another process did."""
    return Call("select headwater_internal.fire_cron_schedule(%s, %s, %s)", (name, due_at, next_at), only_value)


def pause_cron_schedule(name: str, *, paused: bool) -> Call[bool]:
    return Call(
        "select headwater.pause_cron_schedule(%s, %s)", (checked_text(name, "schedule name"), paused), only_value
    )


def delete_cron_schedule(name: str) -> Call[bool]:
    return Call("select headwater.delete_cron_schedule(%s)", (checked_text(name, "schedule name"),), only_value)


def cron_schedules() -> Call[list[CronSchedule]]:
    return Call(
        "select p.name, p.cron, p.time_zone, t.name, p.next_at, p.last_at, p.paused "
        "from headwater_internal.cron_schedule p join headwater_internal.topic t on t.id = p.topic_id order by p.name",
        (),
        lambda rows: [CronSchedule(*row) for row in rows],
    )
