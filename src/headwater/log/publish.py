"""Publishing: single events, batches and streams; immediately, at a later time, or on a cron schedule."""

from __future__ import annotations

from collections.abc import (
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import psycopg
from psycopg import AsyncConnection
from psycopg.pq import PipelineStatus, TransactionStatus

from headwater.calls import encoding, publishing
from headwater.calls import log as log_calls
from headwater.database.caller_connection import AsyncCallCursor, AsyncCallerConnection, async_driver_connection
from headwater.database.connection import CallRunner
from headwater.database.driver_errors import translate_error
from headwater.errors import InvalidRequest
from headwater.log.cron import next_time
from headwater.log.model import CronSchedule, NewEvent, Payload, ScheduledEvent
from headwater.log.payload_hooks import dumped, dumped_events
from headwater.observability import tracing
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import PUBLISHED


class PublishApi(CallRunner):
    """Publish and schedule events."""

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
        connection: AsyncCallerConnection | None = None,
    ) -> int | None:
        """Publish one event; returns its position, or None if it is scheduled for later.

        With `connection`, the event is published when that transaction commits, and not at all if it rolls back. With
        `event_id`, publishing is idempotent: a repeat returns the position of the first event.
        """
        payload, content_type = dumped(self._dumps, payload, content_type)
        call = publishing.publish(
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
        self.watcher.hint()
        if position is not None:
            COUNTERS.add(PUBLISHED, topic)
        return position

    async def publish_batch(
        self, topic: str, events: Sequence[NewEvent], *, connection: AsyncCallerConnection | None = None
    ) -> list[int | None]:
        """Publish all of these events or none, in this order; returns their positions."""
        if self._dumps is not None:
            events = list(dumped_events(self._dumps, events))
        positions = await self._run(publishing.publish_batch(topic, tracing.outgoing_batch(events)), connection)
        self.watcher.hint()
        COUNTERS.add(PUBLISHED, topic, by=len(positions))
        return positions

    async def publish_many(
        self,
        topic: str,
        events: Iterable[NewEvent],
        *,
        chunk_size: int = 1000,
        commit_every: int | None = None,
        connection: AsyncCallerConnection | None = None,
    ) -> int:
        """Publish a stream of events with COPY; returns their number.

        The stream is one transaction, unless `commit_every` gives the number of events per transaction. Readers wait
        for open publishing transactions, so a long stream should set `commit_every`.
        """
        remaining = tracing.outgoing_stream(dumped_events(self._dumps, events))
        if connection is not None:
            if commit_every is not None:
                raise InvalidRequest("commit_every cannot be combined with connection")
            own = await async_driver_connection(connection)
            # In autocommit mode every statement would commit.
            begin = own.autocommit and own.info.transaction_status == TransactionStatus.IDLE
            async with own.transaction() if begin else nullcontext():
                return await self._publish_stream(topic, remaining, chunk_size, None, own)
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
        destination = await self._run(log_calls.topic_to_publish(topic), connection)
        # Postgres has no COPY in pipeline mode.
        is_pipeline = connection.pgconn.pipeline_status != PipelineStatus.OFF
        total = 0
        chunk = list(islice(events, _within(chunk_size, limit, total)))
        while chunk:
            if (
                is_pipeline
                or not encoding.can_copy(destination, chunk)
                or not await self._run(publishing.begin_copy(topic), connection)
            ):
                await self._run(publishing.publish_batch(topic, chunk), connection)
                total += len(chunk)
                chunk = list(islice(events, _within(chunk_size, limit, total)))
                continue
            try:
                async with AsyncCallCursor(connection) as cursor, cursor.copy(encoding.COPY_EVENTS) as copy:
                    await copy.write(encoding.COPY_START)
                    while chunk and encoding.can_copy(destination, chunk):
                        await copy.write(encoding.copy_rows(destination, chunk))
                        total += len(chunk)
                        chunk = list(islice(events, _within(chunk_size, limit, total)))
                    await copy.write(encoding.COPY_END)
            except psycopg.Error as error:
                raise translate_error(error) from error
            await self._run(publishing.end_copy(), connection)
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
        connection: AsyncCallerConnection | None = None,
    ) -> int | None:
        """Schedule one event for a later time; returns its schedule id.

        If an event with this `event_id` is already in the log, nothing is scheduled and the result is None.
        """
        due = _due(deliver_at, delay)
        if due is None:
            raise InvalidRequest("give deliver_at or delay")
        payload, content_type = dumped(self._dumps, payload, content_type)
        call = publishing.schedule(
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

    async def scheduled(self, topic: str | None = None, *, batch_size: int = 100) -> list[ScheduledEvent]:
        """Scheduled events, the next one first."""
        return await self._run(publishing.scheduled(topics=None if topic is None else [topic], batch_size=batch_size))

    async def cancel_scheduled(self, schedule_id: int, *, connection: AsyncCallerConnection | None = None) -> bool:
        """Cancel a scheduled event; False if it has already been published."""
        return await self._run(publishing.cancel_scheduled(schedule_id), connection)

    async def move_scheduled(
        self, schedule_id: int, deliver_at: datetime, *, connection: AsyncCallerConnection | None = None
    ) -> bool:
        """Change the time of a scheduled event; False if it has already been published."""
        return await self._run(publishing.move_scheduled(schedule_id, deliver_at), connection)

    async def set_cron_schedule(
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
        """Create or replace a cron schedule, which publishes this event at the times of a cron expression. Each
        occurrence is published exactly once, by any running process."""
        payload, content_type = dumped(self._dumps, payload, content_type)
        call = publishing.set_cron_schedule(
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

    async def cron_schedules(self) -> list[CronSchedule]:
        """All cron schedules with their next time."""
        return await self._run(publishing.cron_schedules())

    async def pause_cron_schedule(self, name: str, *, paused: bool = True) -> bool:
        """Pause or resume a cron schedule; False if it does not exist."""
        return await self._run(publishing.pause_cron_schedule(name, paused=paused))

    async def delete_cron_schedule(self, name: str) -> bool:
        """Delete a cron schedule; False if it does not exist."""
        return await self._run(publishing.delete_cron_schedule(name))


def _due(deliver_at: datetime | None, delay: timedelta | None) -> datetime | None:
    if deliver_at is not None and delay is not None:
        raise InvalidRequest("give only one of deliver_at and delay")
    if deliver_at is not None and deliver_at.tzinfo is None:
        raise InvalidRequest("deliver_at needs a time zone")
    return deliver_at if delay is None else datetime.now(UTC) + delay


def _within(chunk_size: int, limit: int | None, total: int) -> int:
    return chunk_size if limit is None else min(chunk_size, limit - total)
