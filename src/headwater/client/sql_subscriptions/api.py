"""The API of SQL subscriptions and watched tables."""
# Generated from sql_subscriptions/api.py by tools/unasync.py: write there.

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import (
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psycopg
from psycopg import Connection

from headwater.calls import publishing
from headwater.calls import subscriptions as subscription_calls
from headwater.client.database.connection import CallRunner, Topics, as_names
from headwater.database.caller_connection import CallCursor, CallerConnection, driver_connection
from headwater.errors import HeadwaterError, LogUnavailable, ReaderBusy
from headwater.log.model import Event, NewEvent
from headwater.log.payload_hooks import dumped
from headwater.observability.metrics import ERROR, QUEUE, logger
from headwater.sql_subscriptions.model import MatchedBatch, MatchedEvent, Subscription

# An event with this header goes only to the subscription with that id.
SUBSCRIPTION_HEADER = "headwater-subscription"
# How often a reader saves its position, retries to become the reader, and keeps its subscription from expiring.
NOTE_SECONDS = 1.0
BUSY_SECONDS = 0.5
KEEP_SECONDS = 5.0


def _keep_seconds(expires_after: timedelta | None) -> float:
    return KEEP_SECONDS if expires_after is None else min(KEEP_SECONDS, expires_after.total_seconds() / 4)


class SubscriptionApi(CallRunner):
    """SQL subscriptions and watched tables."""

    def subscribe(
        self,
        queue: str,
        filter: str,
        params: Mapping[str, Any] | None = None,
        *,
        expires_after: timedelta | None = None,
        from_position: int | None = None,
        topics: Topics = None,
        connection: CallerConnection | None = None,
    ) -> int:
        """Subscribe a queue to the events that match a filter; returns the subscription's id.

        The filter is a boolean SQL expression over the event `e` and the subscription `s`, for example "e.topic =
        'orders' and s.params @> jsonb_build_object('user', e.data -> 'user')". Equal subscriptions of a queue are one
        subscription. It expires when it has not been in use for `expires_after`.
        """
        call = subscription_calls.subscribe(
            queue,
            filter,
            params,
            expires_after=expires_after,
            from_position=from_position,
            topics=as_names(topics),
        )
        return self._run(call, connection)

    def unsubscribe(self, subscription_id: int) -> bool:
        """Remove a subscription; False if it does not exist."""
        return self._run(subscription_calls.unsubscribe(subscription_id))

    def resume_filter(self, subscription_id: int) -> bool:
        """Resume the stopped filter of a subscription from where it was stopped; False if it was not stopped."""
        return self._run(subscription_calls.resume_filter(subscription_id))

    def keep_subscriptions(self, subscription_ids: Sequence[int]) -> None:
        """Say that these are in use, so that they do not expire."""
        self._run(subscription_calls.keep_subscriptions(subscription_ids))

    def subscriptions(self, queue: str | None = None) -> list[Subscription]:
        """The subscriptions of a queue, or of all queues."""
        return self._run(subscription_calls.subscriptions(queue))

    def read_next(
        self,
        queue: str,
        *,
        reader: str,
        after: int | None = None,
        batch_size: int = 100,
        lease_seconds: float = 30.0,
        peek: bool = False,
        timeout_seconds: float = 5.0,
        epoch: int | None = None,
        connection: CallerConnection | None = None,
    ) -> MatchedBatch:
        """The next events of a queue, each once, with the ids of all its subscriptions that match.

        Does not move the queue: commit_reading does. A queue has one reader at a time (ReaderBusy); `peek` reads
        without becoming the reader. After `timeout_seconds` it returns nothing, and the same events are read in smaller
        parts. A filter that takes longer than that on one event is stopped there; the others continue. `epoch`: that of
        `after`; raises EpochChanged if the log is in another epoch.
        """
        call = subscription_calls.read_next(
            queue,
            reader=reader,
            after=after,
            batch_size=batch_size,
            lease_seconds=lease_seconds,
            peek=peek,
            epoch=epoch,
        )
        own = None if connection is None else driver_connection(connection)
        with self.transaction() if own is None else own.transaction() as inside:
            here = inside if own is None else own
            assert isinstance(here, Connection)
            timeout = str(int(timeout_seconds * 1000))
            CallCursor(here).execute("select set_config('statement_timeout', %s, true)", (timeout,))
            return self._run(call, here)

    def commit_reading(
        self, queue: str, position: int, *, reader: str, release: bool = False, epoch: int | None = None
    ) -> None:
        """Save the position up to which a queue has read; `release` lets another reader take over immediately.

        With `epoch`, the epoch in which the events were read, raises EpochChanged if the log is in another epoch.
        """
        self._run(subscription_calls.commit_reading(queue, position, reader=reader, release=release, epoch=epoch))

    def retry_later(
        self,
        queue: str,
        matched: MatchedEvent,
        *,
        handler: str,
        delay_seconds: float | None = None,
        error: str | None = None,
    ) -> bool:
        """Schedule a retry of this event for one handler; False if its attempts are used up, and it is now a dead
        letter."""
        again = False
        for subscription_id in matched.subscription_ids:
            again = self._run(
                subscription_calls.retry_later(
                    queue,
                    subscription_id,
                    handler=handler,
                    position=matched.event.position,
                    attempt=matched.attempt,
                    delay_seconds=delay_seconds,
                    error=error,
                )
            )
        return again

    def finish_retry(self, retry_id: int) -> bool:
        """Record that a handler is done with a retried event."""
        return self._run(subscription_calls.finish_retry(retry_id))

    def subscribed(
        self,
        queue: str,
        filter: str,
        params: Mapping[str, Any] | None = None,
        *,
        expires_after: timedelta | None = None,
        from_position: int | None = None,
        topics: Topics = None,
        reader: str | None = None,
        batch_size: int = 100,
        lease_seconds: float = 60.0,
        patience_seconds: float | None = 60.0,
    ) -> Iterator[Event]:
        """Subscribe a queue and read for it: yields every event that matches the filter, without end.

        Requesting the next event marks the one before as done. When the loop is left, the queue's position is behind
        the last done event; the current event is delivered to the next reader. The position is saved about once a
        second: after a lost connection or a crash, later events are delivered again (at-least-once).

        A queue has one reader at a time: another iterator on it, in any process, waits until this one is closed or has
        spent more than `lease_seconds` on one event. The iterator ends when the subscription is removed or has expired.
        """
        name = reader or f"{socket.gethostname()}:{os.getpid()}/{secrets.token_hex(4)}"
        wanted = self.subscribe(
            queue, filter, params, expires_after=expires_after, from_position=from_position, topics=topics
        )
        waiter = self.watcher.waiter(queue=queue)
        lost_at: float | None = None
        while True:
            try:
                # Results of a lost connection do not count: the database has the queue's position.
                with self.own_connection() as connection:
                    after: int | None = None
                    done_to: int | None = None
                    note_at = keep_at = 0.0
                    try:
                        while True:
                            if time.monotonic() >= keep_at:
                                alive = self._run(subscription_calls.keep_alive([wanted]), connection)
                                if wanted not in alive:
                                    return
                                keep_at = time.monotonic() + _keep_seconds(expires_after)
                            if done_to is not None and time.monotonic() >= note_at:
                                self._run(subscription_calls.commit_reading(queue, done_to, reader=name), connection)
                                done_to, note_at = None, time.monotonic() + NOTE_SECONDS
                            reading = self.read_next(
                                queue,
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
                                waiter.wait(max(0.0, min(keep_at - time.monotonic(), NOTE_SECONDS)))
                            else:
                                done_to = after
                    finally:
                        # The current event is not done: the queue's position stays before it.
                        with suppress(HeadwaterError, psycopg.Error):
                            if done_to is not None:
                                move = subscription_calls.commit_reading(queue, done_to, reader=name, release=True)
                                self._run(move, connection)
                            else:
                                self._run(subscription_calls.release_reading(queue, reader=name), connection)
            except ReaderBusy:
                # Another process is the reader. It reads again what this one has not saved as done.
                time.sleep(BUSY_SECONDS)
            except (LogUnavailable, psycopg.OperationalError) as error:
                now = time.monotonic()
                lost_at = now if lost_at is None else lost_at
                if patience_seconds is not None and now - lost_at > patience_seconds:
                    raise
                logger.warning("log unavailable", extra={QUEUE: queue, ERROR: str(error)})
                time.sleep(BUSY_SECONDS)

    def send_to_subscription(
        self,
        subscription_id: int,
        topic: str,
        payload: Any = None,
        *,
        key: str | bytes | None = None,
        type: str | None = None,
        routing_key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        connection: CallerConnection | None = None,
    ) -> int | None:
        """Publish an event that, of all SQL subscriptions, only this one receives, whatever its filter.

        It is an ordinary event of the topic: queues, cursors and Kafka consumers of the topic receive it too. The
        subscription's queue must read the topic. Any publisher can do this by setting the header that this method sets.
        """
        directed = {**(headers or {}), SUBSCRIPTION_HEADER: str(subscription_id)}
        payload, content_type = dumped(self._dumps, payload, None)
        event = NewEvent(payload, key, type, routing_key, directed, content_type=content_type)
        return (self._run(publishing.publish_batch(topic, [event]), connection))[0]

    def watch_table(
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
        connection: CallerConnection | None = None,
    ) -> str:
        """Publish the changes of a table, in the writer's own transaction; returns the topic."""
        call = subscription_calls.watch_table(
            table,
            topic=topic,
            inserts=inserts,
            updates=updates,
            deletes=deletes,
            truncates=truncates,
            columns=columns,
            when_changed=when_changed,
        )
        return self._run(call, connection)

    def unwatch_table(self, table: str, *, connection: CallerConnection | None = None) -> bool:
        """Stop publishing the changes of a table; False if it was not watched."""
        return self._run(subscription_calls.unwatch_table(table), connection)
