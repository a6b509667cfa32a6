"""Subscriptions by SQL condition, and watched tables."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import (
    AsyncIterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psycopg
from psycopg import AsyncConnection

from headwater import calls
from headwater.database.connection import Shell, Topics, as_names
from headwater.errors import HeadwaterError, LogUnavailable, ReaderBusy
from headwater.model import (
    Event,
    MatchedEvent,
    NewEvent,
    Reading,
    Subscription,
)
from headwater.observability.metrics import ERROR, GROUP, logger

# An event with this header goes to the subscription of that id, and to no other.
SUBSCRIPTION_HEADER = "headwater-subscription"
# How often a reader notes how far it is, tries again to become the reader, and keeps its subscription alive.
NOTE_SECONDS = 1.0
BUSY_SECONDS = 0.5
KEEP_SECONDS = 5.0


def _keep_seconds(expires_after: timedelta | None) -> float:
    return KEEP_SECONDS if expires_after is None else min(KEEP_SECONDS, expires_after.total_seconds() / 4)


class Subscriptions(Shell):
    """SQL subscriptions and table events."""

    async def subscribe(
        self,
        group: str,
        condition: str,
        params: Mapping[str, Any] | None = None,
        *,
        expires_after: timedelta | None = None,
        from_position: int | None = None,
        topics: Topics = None,
        connection: AsyncConnection[Any] | None = None,
    ) -> int:
        """Subscribe a group to the events that fulfil a condition; returns the subscription's id.

        The condition is a boolean SQL expression over the event `e` and the subscription `s`, for example
        "e.topic = 'orders' and s.params @> jsonb_build_object('user', e.data -> 'user')". Equal subscriptions of
        a group are one. It ends when it was not in use for `expires_after`.
        """
        call = calls.subscribe(
            group,
            condition,
            params,
            expires_after=expires_after,
            from_position=from_position,
            topics=as_names(topics),
        )
        return await self._run(call, connection)

    async def unsubscribe(self, subscription_id: int) -> bool:
        """End a subscription; False if there was none."""
        return await self._run(calls.unsubscribe(subscription_id))

    async def resume_filter(self, subscription_id: int) -> bool:
        """Try the filter of a subscription again, from where it was stopped; False if it was not stopped."""
        return await self._run(calls.resume_filter(subscription_id))

    async def keep_subscriptions(self, subscription_ids: Sequence[int]) -> None:
        """Say that these are in use, so that they do not expire."""
        await self._run(calls.keep_subscriptions(subscription_ids))

    async def subscriptions(self, group: str | None = None) -> list[Subscription]:
        """The subscriptions of a group, or all."""
        return await self._run(calls.subscriptions(group))

    async def read_next(
        self,
        group: str,
        *,
        reader: str,
        after: int | None = None,
        batch_size: int = 100,
        lease_seconds: float = 30.0,
        peek: bool = False,
        timeout_seconds: float = 5.0,
        epoch: int | None = None,
        connection: AsyncConnection[Any] | None = None,
    ) -> Reading:
        """The next events of a group, each once, with the ids of all its subscriptions that match.

        Moves nothing: set_reading does. One reader at a time (ReaderBusy); `peek` reads without being it. After
        `timeout_seconds` it returns nothing, and the same events come in smaller parts. A filter that takes longer on
        one event is stopped there; the others go on. `epoch`: that of `after`; EpochChanged if the log is in another.
        """
        call = calls.read_next(
            group,
            reader=reader,
            after=after,
            batch_size=batch_size,
            lease_seconds=lease_seconds,
            peek=peek,
            epoch=epoch,
        )
        async with self.transaction() if connection is None else connection.transaction() as inside:
            here = connection if connection is not None else inside
            assert isinstance(here, AsyncConnection)
            await here.execute("select set_config('statement_timeout', %s, true)", (str(int(timeout_seconds * 1000)),))
            return await self._run(call, here)

    async def set_reading(
        self, group: str, position: int, *, reader: str, release: bool = False, epoch: int | None = None
    ) -> None:
        """Note how far a group has read; `release` lets another reader take over at once.

        With `epoch`, the one in which it was read, EpochChanged if the log is in another.
        """
        await self._run(calls.set_reading(group, position, reader=reader, release=release, epoch=epoch))

    async def retry_later(
        self,
        group: str,
        matched: MatchedEvent,
        *,
        handler: str,
        delay_seconds: float | None = None,
        error: str | None = None,
    ) -> bool:
        """Have one handler get this event again; False if its tries are used up: then it is a dead letter."""
        again = False
        for subscription_id in matched.subscription_ids:
            again = await self._run(
                calls.retry_later(
                    group,
                    subscription_id,
                    handler=handler,
                    position=matched.event.position,
                    attempt=matched.attempt,
                    delay_seconds=delay_seconds,
                    error=error,
                )
            )
        return again

    async def finish_retry(self, retry_id: int) -> bool:
        """A handler is done with an event that it asked to have again."""
        return await self._run(calls.finish_retry(retry_id))

    async def subscribed(
        self,
        group: str,
        condition: str,
        params: Mapping[str, Any] | None = None,
        *,
        expires_after: timedelta | None = None,
        from_position: int | None = None,
        topics: Topics = None,
        reader: str | None = None,
        batch_size: int = 100,
        lease_seconds: float = 60.0,
        poll_seconds: float = 0.05,
        patience_seconds: float | None = 60.0,
    ) -> AsyncIterator[Event]:
        """Subscribe a group and read for it: every event that fulfils the condition, one by one, for ever.

        Asking for the next event says that the one before is done. Leave the loop, and the group stands behind the last
        event that was done: the one in hand comes again to the next reader. After a lost connection, and to another
        process after a crash, what was not noted as done comes again; notes are made about once a second.

        A group has one reader at a time: another iterator of it, in any process, waits until this one is left, or took
        longer than `lease_seconds` with one event. It ends when the subscription is removed or has expired.
        """
        name = reader or f"{socket.gethostname()}:{os.getpid()}/{secrets.token_hex(4)}"
        wanted = await self.subscribe(
            group, condition, params, expires_after=expires_after, from_position=from_position, topics=topics
        )
        lost_at: float | None = None
        while True:
            try:
                # What was read on a connection that was lost counts no more: the database knows how far the group is.
                async with self.own_connection() as connection:
                    after: int | None = None
                    done_to: int | None = None
                    note_at = keep_at = 0.0
                    try:
                        while True:
                            if time.monotonic() >= keep_at:
                                alive = await self._run(calls.keep_alive([wanted]), connection)
                                if wanted not in alive:
                                    return
                                keep_at = time.monotonic() + _keep_seconds(expires_after)
                            if done_to is not None and time.monotonic() >= note_at:
                                await self._run(calls.set_reading(group, done_to, reader=name), connection)
                                done_to, note_at = None, time.monotonic() + NOTE_SECONDS
                            reading = await self.read_next(
                                group,
                                reader=name,
                                after=after,
                                batch_size=batch_size,
                                lease_seconds=lease_seconds,
                                connection=connection,
                            )
                            lost_at = None
                            idle = after == reading.next_position and not reading.events
                            for matched in reading.events:
                                if wanted in matched.subscription_ids and matched.retry_id is None:
                                    yield matched.event
                                    done_to = matched.event.position
                            after = reading.next_position
                            if idle:
                                await asyncio.sleep(poll_seconds)
                            else:
                                done_to = after
                    finally:
                        # The event in hand is not done: the group stays before it.
                        with suppress(HeadwaterError, psycopg.Error):
                            if done_to is not None:
                                move = calls.set_reading(group, done_to, reader=name, release=True)
                                await self._run(move, connection)
                            else:
                                await self._run(calls.release_reading(group, reader=name), connection)
            except ReaderBusy:
                # Another reads. What this one has not noted, that one reads again.
                await asyncio.sleep(BUSY_SECONDS)
            except (LogUnavailable, psycopg.OperationalError) as error:
                now = time.monotonic()
                lost_at = now if lost_at is None else lost_at
                if patience_seconds is not None and now - lost_at > patience_seconds:
                    raise
                logger.warning("log unavailable", extra={GROUP: group, ERROR: str(error)})
                await asyncio.sleep(BUSY_SECONDS)

    async def send_to_subscription(
        self,
        subscription_id: int,
        topic: str,
        payload: Any = None,
        *,
        key: str | bytes | None = None,
        type: str | None = None,
        routing_key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        connection: AsyncConnection[Any] | None = None,
    ) -> int | None:
        """Publish an event that, of all SQL subscriptions, goes to this one only, whatever its condition says.

        It is an event of the topic like any other: queues, cursors and Kafka consumers of the topic get it too. The
        group of the subscription must read the topic. Any publisher can do so with the header that this sets.
        """
        directed = {**(headers or {}), SUBSCRIPTION_HEADER: str(subscription_id)}
        event = NewEvent(payload, key=key, type=type, routing_key=routing_key, headers=directed)
        return (await self._run(calls.publish_batch(topic, [event]), connection))[0]

    async def watch_table(
        self,
        table: str,
        *,
        topic: str | None = None,
        inserts: bool = True,
        updates: bool = True,
        deletes: bool = True,
        truncates: bool = True,
        columns: Sequence[str] | None = None,
        when_changed: Sequence[str] | None = None,
        connection: AsyncConnection[Any] | None = None,
    ) -> str:
        """Publish what happens to a table, in the writer's own transaction; returns the topic."""
        call = calls.watch_table(
            table,
            topic=topic,
            inserts=inserts,
            updates=updates,
            deletes=deletes,
            truncates=truncates,
            columns=columns,
            when_changed=when_changed,
        )
        return await self._run(call, connection)

    async def unwatch_table(self, table: str, *, connection: AsyncConnection[Any] | None = None) -> bool:
        """Publish no more of what happens to a table; False if it was not watched."""
        return await self._run(calls.unwatch_table(table), connection)
