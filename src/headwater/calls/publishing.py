"""Calls that publish: now, later, and at the times of a cron expression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from headwater.calls.call import Call, nothing, only_value
from headwater.calls.encoding import (
    PackedBytes,
    checked_text,
    encode_headers,
    encode_key,
    encode_payload,
    optional_text,
    pack,
    packed_bytes,
    packed_text,
)
from headwater.model import (
    DuePeriodic,
    NewEvent,
    Payload,
    Periodic,
    Released,
    Scheduled,
)


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
    """One event. The answer is its position, or None if it waits for its time."""
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
    """All of the events or none, in this order. The answer is their positions."""
    bodies = [encode_payload(event.payload, event.content_type) for event in events]
    partitions = [event.partition for event in events]
    return Call(
        "select headwater.publish_batch(%s, %b, %b, %b, %b, %b, %b, %b, %s::int[])",
        (
            checked_text(topic, "topic name"),
            PackedBytes(pack([body for body, _ in bodies], 17)),
            packed_bytes([encode_key(event.key) for event in events]),
            packed_text([event.type for event in events], "type"),
            packed_text([event.routing_key for event in events], "routing key"),
            packed_text([encode_headers(event.headers) for event in events], "header"),
            packed_text([content_type for _, content_type in bodies], "content type"),
            packed_text([event.event_id for event in events], "event id"),
            partitions if any(partition is not None for partition in partitions) else None,
        ),
        only_value,
    )


def begin_copy(topic: str) -> Call[bool]:
    """Before a COPY of events of one topic, in its transaction; False: this role may not, and publishes in batches."""
    return Call("select headwater.begin_copy(%s)", (checked_text(topic, "topic name"),), only_value)


def end_copy() -> Call[None]:
    return Call("select headwater.end_copy()", (), nothing)


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
    """One event for later. The answer is its schedule id; None if its event id is in the log already."""
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


def scheduled(*, topics: Sequence[str] | None = None, batch_size: int = 100) -> Call[list[Scheduled]]:
    """The events of these topics, or of all, that wait for their time."""
    names = None if topics is None else list(topics)
    return Call(
        "select s.id, s.due_at, t.name, s.key, s.type, s.event_id "
        "from headwater.scheduled s join headwater.topic t on t.id = s.topic_id "
        "where %s::text[] is null or t.name = any (%s::text[]) order by s.due_at, s.id limit %s",
        (names, names, batch_size),
        lambda rows: [Scheduled(*row) for row in rows],
    )


def cancel_scheduled(schedule_id: int) -> Call[bool]:
    return Call("select headwater.cancel_scheduled(%s)", (schedule_id,), only_value)


def move_scheduled(schedule_id: int, deliver_at: datetime) -> Call[bool]:
    return Call("select headwater.move_scheduled(%s, %s)", (schedule_id, deliver_at), only_value)


def release_due(*, batch_size: int = 1000) -> Call[Released]:
    return Call(
        "select released, next_due_seconds from headwater.release_due(%s)",
        (batch_size,),
        lambda rows: Released(*rows[0]),
    )


def set_periodic(
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
    """Declare an event that is published at the times of a cron expression."""
    body, content_type = encode_payload(payload, content_type)
    return Call(
        "select headwater.set_periodic(%s, %s, %s, %s, %s, %b, %b, %s, %s, %s::jsonb, %s)",
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


def due_periodics() -> Call[list[DuePeriodic]]:
    return Call(
        "select name, cron, time_zone, due_at from headwater.due_periodics()",
        (),
        lambda rows: [DuePeriodic(*row) for row in rows],
    )


def fire_periodic(name: str, *, due_at: datetime, next_at: datetime) -> Call[bool]:
    """Publish a periodic event; False if another process did."""
    return Call("select headwater.fire_periodic(%s, %s, %s)", (name, due_at, next_at), only_value)


def pause_periodic(name: str, *, paused: bool) -> Call[bool]:
    return Call("select headwater.pause_periodic(%s, %s)", (checked_text(name, "schedule name"), paused), only_value)


def delete_periodic(name: str) -> Call[bool]:
    return Call("select headwater.delete_periodic(%s)", (checked_text(name, "schedule name"),), only_value)


def periodics() -> Call[list[Periodic]]:
    return Call(
        "select p.name, p.cron, p.time_zone, t.name, p.next_at, p.last_at, p.paused "
        "from headwater.periodic p join headwater.topic t on t.id = p.topic_id order by p.name",
        (),
        lambda rows: [Periodic(*row) for row in rows],
    )
