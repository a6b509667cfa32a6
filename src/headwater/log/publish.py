"""Publish: one event, a batch, a stream; now, later, and at the times of a cron expression."""

from __future__ import annotations

from collections.abc import (
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import psycopg
from psycopg import AsyncConnection

from headwater import calls
from headwater.database.connection import Shell
from headwater.errors import InvalidRequest, translated
from headwater.log.cron import next_time
from headwater.model import (
    NewEvent,
    Payload,
    Periodic,
    Scheduled,
)
from headwater.observability import tracing
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import PUBLISHED


class Publishing(Shell):
    """The publishing side of the log."""

    async def publish(
        self,
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
        delay: timedelta | None = None,
        connection: AsyncConnection[Any] | None = None,
    ) -> int | None:
        """Publish one event; returns its position, or None if it waits for its time.

        With `connection`, it is published when that transaction commits and leaves nothing if it rolls back.
        With `event_id`, a repeat returns the position of the first.
        """
        call = calls.publish(
            topic,
            payload,
            key=key,
            type=type,
            routing_key=routing_key,
            headers=tracing.outgoing(headers),
            event_id=event_id,
            content_type=content_type,
            deliver_at=_due(deliver_at, delay),
        )
        position = await self._run(call, connection)
        if position is not None:
            COUNTERS.add(PUBLISHED, topic)
        return position

    async def publish_batch(
        self, topic: str, events: Sequence[NewEvent], *, connection: AsyncConnection[Any] | None = None
    ) -> list[int | None]:
        """Publish all of these events or none, in this order; returns their positions."""
        positions = await self._run(calls.publish_batch(topic, tracing.outgoing_batch(events)), connection)
        COUNTERS.add(PUBLISHED, topic, by=len(positions))
        return positions

    async def publish_many(
        self,
        topic: str,
        events: Iterable[NewEvent],
        *,
        chunk_size: int = 1000,
        commit_every: int | None = None,
        connection: AsyncConnection[Any] | None = None,
    ) -> int:
        """Publish a stream of events by COPY; returns how many.

        All of them or none, unless `commit_every` says how many events make a transaction of their own.
        Readers wait for an open publisher, so a very long stream should commit now and then.
        """
        if connection is not None:
            if commit_every is not None:
                raise InvalidRequest("commit_every cannot be given inside the caller's own transaction")
            return await self._publish_stream(topic, tracing.outgoing_stream(events), chunk_size, None, connection)
        remaining = tracing.outgoing_stream(events)
        total = 0
        while True:
            async with self.transaction() as own:
                published = await self._publish_stream(topic, remaining, chunk_size, commit_every, own)
            total += published
            if commit_every is None or published < commit_every:
                return total

    async def _publish_stream(
        self,
        topic: str,
        events: Iterator[NewEvent],
        chunk_size: int,
        limit: int | None,
        connection: AsyncConnection[Any],
    ) -> int:
        """Publish up to `limit` events of the stream on this connection."""
        destination = await self._run(calls.topic_to_publish(topic), connection)
        total = 0
        chunk = list(islice(events, _within(chunk_size, limit, total)))
        while chunk:
            if not calls.can_copy(destination, chunk) or not await self._run(calls.begin_copy(topic), connection):
                await self._run(calls.publish_batch(topic, chunk), connection)
                total += len(chunk)
                chunk = list(islice(events, _within(chunk_size, limit, total)))
                continue
            try:
                async with connection.cursor() as cursor, cursor.copy(calls.COPY_EVENTS) as copy:
                    await copy.write(calls.COPY_START)
                    while chunk and calls.can_copy(destination, chunk):
                        await copy.write(calls.copy_rows(destination, chunk))
                        total += len(chunk)
                        chunk = list(islice(events, _within(chunk_size, limit, total)))
                    await copy.write(calls.COPY_END)
            except psycopg.Error as error:
                raise translated(error) from error
            await self._run(calls.end_copy(), connection)
        COUNTERS.add(PUBLISHED, topic, by=total)
        return total

    async def schedule(
        self,
        topic: str,
        payload: Payload,
        *,
        deliver_at: datetime | None = None,
        delay: timedelta | None = None,
        key: str | bytes | None = None,
        type: str | None = None,
        routing_key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        event_id: str | None = None,
        content_type: str | None = None,
        connection: AsyncConnection[Any] | None = None,
    ) -> int | None:
        """Schedule one event, however far ahead; returns its schedule id.

        With an `event_id` that is in the log already, nothing is scheduled and the answer is None.
        """
        due = _due(deliver_at, delay)
        if due is None:
            raise InvalidRequest("say when: deliver_at or delay")
        call = calls.schedule(
            topic,
            payload,
            due,
            key=key,
            type=type,
            routing_key=routing_key,
            headers=tracing.outgoing(headers),
            event_id=event_id,
            content_type=content_type,
        )
        return await self._run(call, connection)

    async def scheduled(self, topic: str | None = None, *, batch_size: int = 100) -> list[Scheduled]:
        """The events that wait for their time, the next one first."""
        return await self._run(calls.scheduled(topics=None if topic is None else [topic], batch_size=batch_size))

    async def cancel_scheduled(self, schedule_id: int, *, connection: AsyncConnection[Any] | None = None) -> bool:
        """Take back a scheduled event; False if it is in the log already."""
        return await self._run(calls.cancel_scheduled(schedule_id), connection)

    async def move_scheduled(
        self, schedule_id: int, deliver_at: datetime, *, connection: AsyncConnection[Any] | None = None
    ) -> bool:
        """Give a scheduled event another time; False if it is in the log already."""
        return await self._run(calls.move_scheduled(schedule_id, deliver_at), connection)

    async def set_periodic(
        self,
        name: str,
        cron: str,
        topic: str,
        payload: Payload,
        *,
        time_zone: str = "UTC",
        key: str | bytes | None = None,
        type: str | None = None,
        routing_key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        content_type: str | None = None,
    ) -> None:
        """Publish this event at the times of a cron expression: once each, by whichever process is alive."""
        call = calls.set_periodic(
            name,
            cron,
            topic,
            payload,
            next_at=next_time(cron, time_zone, datetime.now(UTC)),
            time_zone=time_zone,
            key=key,
            type=type,
            routing_key=routing_key,
            headers=headers,
            content_type=content_type,
        )
        await self._run(call)

    async def periodics(self) -> list[Periodic]:
        """Every periodic event with its next time."""
        return await self._run(calls.periodics())

    async def pause_periodic(self, name: str, *, paused: bool = True) -> bool:
        """Stop a periodic event from being published, or let it go on; False if there is none."""
        return await self._run(calls.pause_periodic(name, paused=paused))

    async def delete_periodic(self, name: str) -> bool:
        """Forget a periodic event; False if there is none."""
        return await self._run(calls.delete_periodic(name))


def _due(deliver_at: datetime | None, delay: timedelta | None) -> datetime | None:
    if deliver_at is not None and delay is not None:
        raise InvalidRequest("say when once: deliver_at or delay")
    if deliver_at is not None and deliver_at.tzinfo is None:
        raise InvalidRequest("deliver_at needs a time zone")
    return deliver_at if delay is None else datetime.now(UTC) + delay


def _within(chunk_size: int, limit: int | None, total: int) -> int:
    return chunk_size if limit is None else min(chunk_size, limit - total)
