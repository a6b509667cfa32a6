"""The blocking shell. Generated from aio.py by tools/unasync.py: write there."""

from __future__ import annotations

import random
import time
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, TypeVar

import psycopg
from psycopg import Connection
from psycopg_pool import ConnectionPool, PoolTimeout

from headwater import calls, errors, schema, subscription
from headwater.calls import Call
from headwater.errors import HeadwaterError, InvalidRequest, LogUnavailable
from headwater.model import (
    Cursor,
    Event,
    LogSettings,
    LogState,
    NewEvent,
    Payload,
    Publisher,
    Scheduled,
    Topic,
    TopicKind,
    TopicOverview,
    Upkeep,
)
from headwater.subscription import Apply, Deliver, Step, UpkeepTimes, Wait
from headwater.telemetry import ERROR, WAIT_SECONDS, logger

T = TypeVar("T")
Topics = str | Sequence[str] | None
"""One topic, several, or None for the whole log."""

Handler = Callable[[Connection[Any], Sequence[Event]], None]


def connect(
    dsn: str,
    *,
    pool_size: int = 10,
    connect_timeout_seconds: float = 10.0,
    application_name: str = "headwater",
) -> Headwater:
    """Open the log at this Postgres. Raises SchemaMismatch where program and database do not fit."""
    pool = ConnectionPool(
        dsn,
        min_size=1,
        max_size=pool_size,
        timeout=connect_timeout_seconds,
        kwargs={"autocommit": True, "application_name": application_name},
        open=False,
        name="headwater",
    )
    log = Headwater(pool)
    try:
        pool.open(wait=True, timeout=connect_timeout_seconds)
        schema.refuse_misfit(log._run(calls.installed()))
    except PoolTimeout as timeout:
        pool.close()
        raise LogUnavailable(
            f"no connection to Postgres within {connect_timeout_seconds:g} s",
            hint="Is it running? Check HEADWATER_DSN, or start an embedded one with `headwater up`.",
        ) from timeout
    except BaseException:
        pool.close()
        raise
    return log


class Headwater:
    """The log. Every method takes `connection=` to run inside the caller's own transaction."""

    def __init__(self, pool: ConnectionPool[Connection[Any]]) -> None:
        self._pool = pool
        self._upkeep = UpkeepTimes()

    def close(self) -> None:
        self._pool.close()

    def __enter__(self) -> Headwater:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- connections ---------------------------------------------------------------------------------------

    @contextmanager
    def connection(self) -> Iterator[Connection[Any]]:
        """A connection of the pool, in autocommit."""
        try:
            with self._pool.connection() as connection:
                yield connection
        except PoolTimeout as timeout:
            raise LogUnavailable("no free connection to Postgres in time") from timeout

    @contextmanager
    def transaction(self) -> Iterator[Connection[Any]]:
        """A connection with an open transaction: commits at the end, rolls back on an error."""
        with self.connection() as connection, connection.transaction():
            yield connection

    def _run(self, call: Call[T], connection: Connection[Any] | None = None) -> T:
        if connection is None:
            with self.connection() as own:
                return self._run(call, own)
        try:
            with connection.cursor(binary=True) as cursor:
                cursor.execute(call.sql, call.params)
                rows = cursor.fetchall()
        except psycopg.Error as error:
            raise _translated(error) from error
        return call.decode(rows)

    # --- publishing ----------------------------------------------------------------------------------------

    def publish(
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
        connection: Connection[Any] | None = None,
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
            headers=headers,
            event_id=event_id,
            content_type=content_type,
            deliver_at=_due(deliver_at, delay),
        )
        return self._run(call, connection)

    def publish_batch(
        self, topic: str, events: Sequence[NewEvent], *, connection: Connection[Any] | None = None
    ) -> list[int | None]:
        """Publish all of these events or none, in this order; returns their positions."""
        return self._run(calls.publish_batch(topic, events), connection)

    def publish_many(
        self,
        topic: str,
        events: Iterable[NewEvent],
        *,
        chunk_size: int = 1000,
        commit_every: int | None = None,
        connection: Connection[Any] | None = None,
    ) -> int:
        """Publish a stream of events by COPY; returns how many.

        All of them or none, unless `commit_every` says how many events make a transaction of their own.
        Readers wait for an open publisher, so a very long stream should commit now and then.
        """
        if connection is not None:
            if commit_every is not None:
                raise InvalidRequest("commit_every cannot be given inside the caller's own transaction")
            return self._publish_stream(topic, iter(events), chunk_size, None, connection)
        remaining = iter(events)
        total = 0
        while True:
            with self.transaction() as own:
                published = self._publish_stream(topic, remaining, chunk_size, commit_every, own)
            total += published
            if commit_every is None or published < commit_every:
                return total

    def _publish_stream(
        self,
        topic: str,
        events: Iterator[NewEvent],
        chunk_size: int,
        limit: int | None,
        connection: Connection[Any],
    ) -> int:
        """Publish up to `limit` events of the stream on this connection."""
        destination = self._run(calls.topic_to_publish(topic), connection)
        total = 0
        chunk = list(islice(events, _within(chunk_size, limit, total)))
        while chunk:
            if not calls.can_copy(destination, chunk):
                self._run(calls.publish_batch(topic, chunk), connection)
                total += len(chunk)
                chunk = list(islice(events, _within(chunk_size, limit, total)))
                continue
            try:
                with connection.cursor() as cursor, cursor.copy(calls.COPY_EVENTS) as copy:
                    copy.write(calls.COPY_START)
                    while chunk and calls.can_copy(destination, chunk):
                        copy.write(calls.copy_rows(destination, chunk))
                        total += len(chunk)
                        chunk = list(islice(events, _within(chunk_size, limit, total)))
                    copy.write(calls.COPY_END)
            except psycopg.Error as error:
                raise _translated(error) from error
        return total

    # --- scheduled events ----------------------------------------------------------------------------------

    def schedule(
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
        connection: Connection[Any] | None = None,
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
            headers=headers,
            event_id=event_id,
            content_type=content_type,
        )
        return self._run(call, connection)

    def scheduled(self, topic: str | None = None, *, batch_size: int = 100) -> list[Scheduled]:
        """The events that wait for their time, the next one first."""
        return self._run(calls.scheduled(topic=topic, batch_size=batch_size))

    def cancel_scheduled(self, schedule_id: int, *, connection: Connection[Any] | None = None) -> bool:
        """Take back a scheduled event; False if it is in the log already."""
        return self._run(calls.cancel_scheduled(schedule_id), connection)

    def move_scheduled(
        self, schedule_id: int, deliver_at: datetime, *, connection: Connection[Any] | None = None
    ) -> bool:
        """Give a scheduled event another time; False if it is in the log already."""
        return self._run(calls.move_scheduled(schedule_id, deliver_at), connection)

    # --- reading -------------------------------------------------------------------------------------------

    def read(
        self,
        topics: Topics = None,
        *,
        after: int | None = None,
        since: datetime | None = None,
        up_to: int | None = None,
        batch_size: int = 100,
        max_bytes: int = 16_777_216,
        skip_expired: bool = False,
        connection: Connection[Any] | None = None,
    ) -> list[Event]:
        """Settled events after a position or since a time, in order. Empty: nothing more is settled.

        Raises PositionExpired if retention took events after the position, unless `skip_expired`.
        """
        names = _names(topics)
        if since is not None:
            if after is not None:
                raise InvalidRequest("say where to start once: after or since")
            after = self._run(calls.position_before(names, since), connection)
            skip_expired = True
        call = calls.read(
            names,
            after=after,
            batch_size=batch_size,
            max_bytes=max_bytes,
            up_to=up_to,
            skip_expired=skip_expired,
        )
        return self._run(call, connection)

    def read_backwards(
        self,
        topics: Topics = None,
        *,
        before: int | None = None,
        batch_size: int = 100,
        max_bytes: int = 16_777_216,
        connection: Connection[Any] | None = None,
    ) -> list[Event]:
        """Settled events below a position, newest first."""
        call = calls.read_backwards(_names(topics), before=before, batch_size=batch_size, max_bytes=max_bytes)
        return self._run(call, connection)

    def position_before(self, at: datetime, topics: Topics = None) -> int:
        """The position to read after in order to get every event published at that time or later."""
        return self._run(calls.position_before(_names(topics), at))

    def follow(
        self,
        topics: Topics = None,
        *,
        cursor: str | None = None,
        after: int | None = None,
        since: datetime | None = None,
        from_end: bool = False,
        must_not_lose: bool | None = None,
        batch_size: int = 1000,
        max_bytes: int = 16_777_216,
        skip_expired: bool = False,
        poll_seconds: float = 0.01,
        stop_when_caught_up: bool = False,
        patience_seconds: float | None = 60.0,
    ) -> Iterator[Event]:
        """Every event, one by one: catches up, then stays live. See follow_batches."""
        for events in self.follow_batches(
            topics,
            cursor=cursor,
            after=after,
            since=since,
            from_end=from_end,
            must_not_lose=must_not_lose,
            batch_size=batch_size,
            max_bytes=max_bytes,
            skip_expired=skip_expired,
            poll_seconds=poll_seconds,
            stop_when_caught_up=stop_when_caught_up,
            patience_seconds=patience_seconds,
        ):
            for event in events:
                yield event

    def follow_batches(
        self,
        topics: Topics = None,
        *,
        cursor: str | None = None,
        after: int | None = None,
        since: datetime | None = None,
        from_end: bool = False,
        must_not_lose: bool | None = None,
        batch_size: int = 1000,
        max_bytes: int = 16_777_216,
        skip_expired: bool = False,
        poll_seconds: float = 0.01,
        stop_when_caught_up: bool = False,
        patience_seconds: float | None = 60.0,
    ) -> Iterator[Sequence[Event]]:
        """Every event, in batches: catches up, then stays live.

        A named cursor is where to start if it exists, and is saved when the next batch is asked for: a crash
        repeats at most the batch in hand. A lost database is waited for, up to `patience_seconds`.
        """
        steps = subscription.follow(
            _names(topics),
            start_after=self._start(topics, after, since, from_end),
            cursor=cursor,
            must_not_lose=must_not_lose,
            batch_size=batch_size,
            max_bytes=max_bytes,
            skip_expired=skip_expired or since is not None,
            poll_seconds=poll_seconds,
            stop_when_caught_up=stop_when_caught_up,
        )
        for delivery in self._drive(steps, patience_seconds=patience_seconds):
            yield delivery

    def process(
        self,
        topics: Topics,
        handler: Handler,
        *,
        cursor: str,
        after: int | None = None,
        since: datetime | None = None,
        from_end: bool = False,
        must_not_lose: bool | None = None,
        batch_size: int = 1000,
        max_bytes: int = 16_777_216,
        skip_expired: bool = False,
        poll_seconds: float = 0.01,
        stop_when_caught_up: bool = False,
        patience_seconds: float | None = 60.0,
    ) -> None:
        """Run `handler(connection, events)` on every batch, its transaction moving the cursor too.

        What the handler writes on that connection and the position commit together, so each event has its
        effect exactly once.
        """
        steps = subscription.follow(
            _names(topics),
            start_after=self._start(topics, after, since, from_end),
            cursor=cursor,
            must_not_lose=must_not_lose,
            batch_size=batch_size,
            max_bytes=max_bytes,
            skip_expired=skip_expired or since is not None,
            poll_seconds=poll_seconds,
            stop_when_caught_up=stop_when_caught_up,
            in_transaction=True,
        )
        for _ in self._drive(steps, patience_seconds=patience_seconds, handler=handler):
            raise AssertionError("a processing follower delivers nothing")

    def _start(self, topics: Topics, after: int | None, since: datetime | None, from_end: bool) -> int | None:
        if (after is not None) + (since is not None) + from_end > 1:
            raise InvalidRequest("say where to start once: after, since or from_end")
        if since is not None:
            return self._run(calls.position_before(_names(topics), since))
        if from_end:
            return (self._run(calls.log_state())).settled
        return after

    def _drive(
        self,
        steps: Generator[Step, Any, None],
        *,
        patience_seconds: float | None,
        handler: Handler | None = None,
    ) -> Iterator[Sequence[Event]]:
        """Carry out the steps of a consumer, doing the log's upkeep between them."""
        outcome: Any = None
        failure: HeadwaterError | None = None
        try:
            while True:
                try:
                    step = steps.send(outcome) if failure is None else steps.throw(failure)
                except StopIteration:
                    return
                outcome = failure = None
                if isinstance(step, Deliver):
                    yield step.events
                    continue
                try:
                    self._do_upkeep()
                    if isinstance(step, Wait):
                        time.sleep(step.seconds)
                    elif isinstance(step, Apply):
                        assert handler is not None
                        self._patiently(partial(self._apply, step, handler), patience_seconds)
                    else:
                        outcome = self._patiently(partial(self._run, step), patience_seconds)
                except HeadwaterError as error:
                    failure = error
        finally:
            steps.close()

    def _apply(self, step: Apply, handler: Handler) -> None:
        with self.transaction() as connection:
            self._run(step.move, connection)
            handler(connection, step.events)

    def _patiently(self, act: Callable[[], T], patience_seconds: float | None) -> T:
        """Do it, again and again while the database cannot be reached, until patience ends."""
        started = time.monotonic()
        wait = 0.05
        while True:
            try:
                return act()
            except LogUnavailable as error:
                if patience_seconds is not None and time.monotonic() - started + wait > patience_seconds:
                    raise
                logger.warning("log unavailable", extra={ERROR: error.message, WAIT_SECONDS: wait})
                time.sleep(wait * random.uniform(0.5, 1.0))
                wait = min(wait * 2, 5.0)

    def _do_upkeep(self) -> None:
        """This process's share of the log's upkeep, when it is time for it."""
        call = self._upkeep.next_call(time.monotonic())
        if call is None:
            return
        try:
            self._upkeep.heard(self._run(call), time.monotonic())
        except HeadwaterError as error:
            # Upkeep is everybody's; whoever can reach the database next does it.
            logger.warning("upkeep failed", extra={ERROR: error.message})

    # --- cursors -------------------------------------------------------------------------------------------

    def open_cursor(
        self,
        name: str,
        *,
        topics: Topics = None,
        start_after: int | None = None,
        must_not_lose: bool | None = None,
        connection: Connection[Any] | None = None,
    ) -> int:
        """Where a cursor stands; made at `start_after`, or the first event kept, if there is none."""
        call = calls.open_cursor(name, topics=_names(topics), start_after=start_after, must_not_lose=must_not_lose)
        return (self._run(call, connection)).position

    def advance_cursor(
        self,
        name: str,
        *,
        from_position: int,
        to_position: int,
        connection: Connection[Any] | None = None,
    ) -> None:
        """Move a cursor on from where it was read; CursorMoved if somebody else did. For your own transaction."""
        call = calls.advance_cursor(name, from_position=from_position, to_position=to_position)
        self._run(call, connection)

    def set_cursor(
        self,
        name: str,
        *,
        position: int | None = None,
        since: datetime | None = None,
        topics: Topics = None,
        must_not_lose: bool | None = None,
        connection: Connection[Any] | None = None,
    ) -> int:
        """Set a cursor to a position or a time, back or forth, making it if need be; returns the position."""
        if (position is None) == (since is None):
            raise InvalidRequest("say where to once: position or since")
        if since is not None:
            position = self._run(calls.position_before(_names(topics), since), connection)
        assert position is not None
        self._run(calls.set_cursor(name, position, topics=_names(topics), must_not_lose=must_not_lose), connection)
        return position

    def delete_cursor(self, name: str, *, connection: Connection[Any] | None = None) -> bool:
        """Forget a cursor; False if there was none."""
        return self._run(calls.delete_cursor(name), connection)

    def cursors(self) -> list[Cursor]:
        """Every cursor with what it has yet to read."""
        return self._run(calls.cursors())

    # --- topics --------------------------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        *,
        kind: TopicKind = "open",
        partitions: int = 1,
        retention: timedelta | None = None,
        max_payload_bytes: int | None = None,
        max_header_bytes: int | None = None,
        if_missing: bool = False,
        connection: Connection[Any] | None = None,
    ) -> Topic:
        """Create a topic. With `if_missing`, one that is there is returned as it is."""
        call = calls.create_topic(
            name,
            kind=kind,
            partitions=partitions,
            retention=retention,
            max_payload_bytes=max_payload_bytes,
            max_header_bytes=max_header_bytes,
            if_missing=if_missing,
        )
        return self._run(call, connection)

    def alter_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        retention: timedelta | None = None,
        keep_forever: bool = False,
        max_payload_bytes: int | None = None,
        max_header_bytes: int | None = None,
        connection: Connection[Any] | None = None,
    ) -> Topic:
        """Change settings of a topic; None leaves one as it is."""
        call = calls.alter_topic(
            name,
            partitions=partitions,
            retention=retention,
            keep_forever=keep_forever,
            max_payload_bytes=max_payload_bytes,
            max_header_bytes=max_header_bytes,
        )
        return self._run(call, connection)

    def delete_topic(self, name: str, *, connection: Connection[Any] | None = None) -> None:
        """Delete a topic with its events."""
        self._run(calls.delete_topic(name), connection)

    def topic(self, name: str) -> Topic:
        """One topic's settings."""
        return self._run(calls.find_topic(name))

    def topics(self) -> list[TopicOverview]:
        """Every topic with what it holds."""
        return self._run(calls.topics())

    # --- the log as a whole --------------------------------------------------------------------------------

    def state(self) -> LogState:
        """How far the log goes and how far it is settled."""
        return self._run(calls.log_state())

    def publishers_in_flight(self) -> list[Publisher]:
        """The open transactions that have published: what readers wait for."""
        return self._run(calls.publishers_in_flight())

    def settings(self) -> LogSettings:
        """The settings of the whole log."""
        return self._run(calls.log_settings())

    def change_settings(
        self,
        *,
        segment_interval: timedelta | None = None,
        segments_ahead: int | None = None,
        auto_create_topics: bool | None = None,
    ) -> LogSettings:
        """Change settings of the whole log; None leaves one as it is."""
        call = calls.change_log_settings(
            segment_interval=segment_interval,
            segments_ahead=segments_ahead,
            auto_create_topics=auto_create_topics,
        )
        return self._run(call)

    def maintain(self) -> Upkeep:
        """One round of upkeep: due events enter, segments are made ahead and dropped behind."""
        return self._run(calls.maintain())


def _names(topics: Topics) -> list[str] | None:
    if topics is None:
        return None
    return [topics] if isinstance(topics, str) else list(topics)


def _due(deliver_at: datetime | None, delay: timedelta | None) -> datetime | None:
    if deliver_at is not None and delay is not None:
        raise InvalidRequest("say when once: deliver_at or delay")
    if deliver_at is not None and deliver_at.tzinfo is None:
        raise InvalidRequest("deliver_at needs a time zone")
    return deliver_at if delay is None else datetime.now(UTC) + delay


def _within(chunk_size: int, limit: int | None, total: int) -> int:
    return chunk_size if limit is None else min(chunk_size, limit - total)


def _translated(error: psycopg.Error) -> BaseException:
    """Our error for one of Postgres; an error that is not ours to explain passes through."""
    if error.sqlstate is None:
        if isinstance(error, psycopg.OperationalError):
            return LogUnavailable(f"the connection to Postgres is lost: {error}".strip())
        if isinstance(error, psycopg.DataError):
            return errors.InvalidEvent(str(error))
        return error
    diag = error.diag
    ours = errors.from_sqlstate(
        error.sqlstate,
        diag.message_primary or str(error),
        hint=diag.message_hint,
        detail=diag.message_detail,
        constraint=diag.constraint_name if error.sqlstate == "23514" else None,
        table=diag.table_name,
    )
    return error if ours is None else ours
