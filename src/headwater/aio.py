"""The asyncio shell: connections, transactions, and the carrying out of calls and steps.

`client.py` is generated from this file by tools/unasync.py; write here, then run that.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from headwater import calls, errors, schema, subscription
from headwater.calls import Call
from headwater.cron import next_time
from headwater.errors import HeadwaterError, InvalidRequest, LogUnavailable
from headwater.model import (
    Binding,
    ClaimedEvent,
    Cursor,
    Dead,
    DeadLetter,
    Delivery,
    Event,
    Group,
    GroupOverview,
    Lease,
    LogSettings,
    LogState,
    MatchedEvent,
    NewEvent,
    Outcome,
    Payload,
    Periodic,
    Publisher,
    Reading,
    Retry,
    Scheduled,
    Snooze,
    Subscription,
    Topic,
    TopicKind,
    TopicOverview,
    Upkeep,
)
from headwater.subscription import Apply, Deliver, FollowStep, UpkeepTimes, Wait
from headwater.telemetry import ERROR, WAIT_SECONDS, logger

T = TypeVar("T")
Topics = str | Sequence[str] | None
"""One topic, several, or None for the whole log."""

Handler = Callable[[AsyncConnection[Any], Sequence[Event]], Awaitable[None]]


class _Connection(AsyncConnection[Any]):
    """A connection of the pool, with a cursor for calls that have it to themselves.

    A new cursor finds out anew how each type is sent and read, which costs as much as half a round trip.
    """

    kept_cursor: psycopg.AsyncCursor[Any] | None = None


async def connect(
    dsn: str,
    *,
    pool_size: int = 10,
    connect_timeout_seconds: float = 10.0,
    application_name: str = "headwater",
) -> AsyncHeadwater:
    """Open the log at this Postgres. Raises SchemaMismatch where program and database do not fit."""
    pool = AsyncConnectionPool(
        dsn,
        min_size=1,
        max_size=pool_size,
        timeout=connect_timeout_seconds,
        kwargs={"autocommit": True, "application_name": application_name},
        open=False,
        connection_class=_Connection,
        name="headwater",
    )
    log = AsyncHeadwater(pool)
    try:
        await pool.open(wait=True, timeout=connect_timeout_seconds)
        schema.refuse_misfit(await log._run(calls.installed()))
    except PoolTimeout as timeout:
        await pool.close()
        raise LogUnavailable(
            f"no connection to Postgres within {connect_timeout_seconds:g} s",
            hint="Is it running? Check HEADWATER_DSN, or start an embedded one with `headwater up`.",
        ) from timeout
    except BaseException:
        await pool.close()
        raise
    return log


class AsyncHeadwater:
    """The log. Every method takes `connection=` to run inside the caller's own transaction."""

    def __init__(self, pool: AsyncConnectionPool[_Connection]) -> None:
        self._pool = pool
        self._upkeep = UpkeepTimes()

    async def close(self) -> None:
        await self._pool.close()

    async def __aenter__(self) -> AsyncHeadwater:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- connections ---------------------------------------------------------------------------------------

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection[Any]]:
        """A connection of the pool, in autocommit."""
        try:
            async with self._pool.connection() as connection:
                yield connection
        except PoolTimeout as timeout:
            raise LogUnavailable("no free connection to Postgres in time") from timeout

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection[Any]]:
        """A connection with an open transaction: commits at the end, rolls back on an error."""
        try:
            async with self.connection() as connection, connection.transaction():
                yield connection
        except psycopg.OperationalError as error:
            # The caller's own statements and the commit can lose the connection as calls can.
            ours = _translated(error)
            if ours is error:
                raise
            raise ours from error

    async def _run(self, call: Call[T], connection: AsyncConnection[Any] | None = None) -> T:
        if connection is not None:
            async with connection.cursor(binary=True) as cursor:
                return call.decode(await _rows(cursor, call))
        # What self.connection() does, without its three context managers: they cost more than the call's packing.
        try:
            own = await self._pool.getconn()
        except PoolTimeout as timeout:
            raise LogUnavailable("no free connection to Postgres in time") from timeout
        try:
            kept, own.kept_cursor = own.kept_cursor or own.cursor(binary=True), None
            rows = await _rows(kept, call)
            if len(rows) <= 1:
                # One that holds a large answer is let go with it.
                own.kept_cursor = kept
        finally:
            await self._pool.putconn(own)
        return call.decode(rows)

    async def run(self, call: Call[T], *, patience_seconds: float | None = 60.0) -> T:
        """Carry out a call, waiting for a lost database up to `patience_seconds`."""
        return await self._patiently(partial(self._run, call), patience_seconds)

    # --- publishing ----------------------------------------------------------------------------------------

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
            headers=headers,
            event_id=event_id,
            content_type=content_type,
            deliver_at=_due(deliver_at, delay),
        )
        return await self._run(call, connection)

    async def publish_batch(
        self, topic: str, events: Sequence[NewEvent], *, connection: AsyncConnection[Any] | None = None
    ) -> list[int | None]:
        """Publish all of these events or none, in this order; returns their positions."""
        return await self._run(calls.publish_batch(topic, events), connection)

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
            return await self._publish_stream(topic, iter(events), chunk_size, None, connection)
        remaining = iter(events)
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
            if not calls.can_copy(destination, chunk):
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
                raise _translated(error) from error
        return total

    # --- scheduled events ----------------------------------------------------------------------------------

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
            headers=headers,
            event_id=event_id,
            content_type=content_type,
        )
        return await self._run(call, connection)

    async def scheduled(self, topic: str | None = None, *, batch_size: int = 100) -> list[Scheduled]:
        """The events that wait for their time, the next one first."""
        return await self._run(calls.scheduled(topic=topic, batch_size=batch_size))

    async def cancel_scheduled(self, schedule_id: int, *, connection: AsyncConnection[Any] | None = None) -> bool:
        """Take back a scheduled event; False if it is in the log already."""
        return await self._run(calls.cancel_scheduled(schedule_id), connection)

    async def move_scheduled(
        self, schedule_id: int, deliver_at: datetime, *, connection: AsyncConnection[Any] | None = None
    ) -> bool:
        """Give a scheduled event another time; False if it is in the log already."""
        return await self._run(calls.move_scheduled(schedule_id, deliver_at), connection)

    # --- periodic events -----------------------------------------------------------------------------------

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

    # --- reading -------------------------------------------------------------------------------------------

    async def read(
        self,
        topics: Topics = None,
        *,
        after: int | None = None,
        since: datetime | None = None,
        up_to: int | None = None,
        batch_size: int = 100,
        max_bytes: int = 16_777_216,
        skip_expired: bool = False,
        connection: AsyncConnection[Any] | None = None,
    ) -> list[Event]:
        """Settled events after a position or since a time, in order. Empty: nothing more is settled.

        Raises PositionExpired if retention took events after the position, unless `skip_expired`.
        """
        names = _names(topics)
        if since is not None:
            if after is not None:
                raise InvalidRequest("say where to start once: after or since")
            after = await self._run(calls.position_before(names, since), connection)
            skip_expired = True
        call = calls.read(
            names,
            after=after,
            batch_size=batch_size,
            max_bytes=max_bytes,
            up_to=up_to,
            skip_expired=skip_expired,
        )
        return await self._run(call, connection)

    async def read_backwards(
        self,
        topics: Topics = None,
        *,
        before: int | None = None,
        batch_size: int = 100,
        max_bytes: int = 16_777_216,
        connection: AsyncConnection[Any] | None = None,
    ) -> list[Event]:
        """Settled events below a position, newest first."""
        call = calls.read_backwards(_names(topics), before=before, batch_size=batch_size, max_bytes=max_bytes)
        return await self._run(call, connection)

    async def position_before(self, at: datetime, topics: Topics = None) -> int:
        """The position to read after in order to get every event published at that time or later."""
        return await self._run(calls.position_before(_names(topics), at))

    async def follow(
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
    ) -> AsyncIterator[Event]:
        """Every event, one by one: catches up, then stays live. See follow_batches."""
        async for events in self.follow_batches(
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

    async def follow_batches(
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
    ) -> AsyncIterator[Sequence[Event]]:
        """Every event, in batches: catches up, then stays live.

        A named cursor is where to start if it exists, and is saved when the next batch is asked for: a crash
        repeats at most the batch in hand. A lost database is waited for, up to `patience_seconds`.
        """
        steps = subscription.follow(
            _names(topics),
            start_after=await self._start(topics, after, since, from_end),
            cursor=cursor,
            must_not_lose=must_not_lose,
            batch_size=batch_size,
            max_bytes=max_bytes,
            skip_expired=skip_expired or since is not None,
            poll_seconds=poll_seconds,
            stop_when_caught_up=stop_when_caught_up,
        )
        async for delivery in self._drive(steps, patience_seconds=patience_seconds):
            yield delivery

    async def process(
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
            start_after=await self._start(topics, after, since, from_end),
            cursor=cursor,
            must_not_lose=must_not_lose,
            batch_size=batch_size,
            max_bytes=max_bytes,
            skip_expired=skip_expired or since is not None,
            poll_seconds=poll_seconds,
            stop_when_caught_up=stop_when_caught_up,
            in_transaction=True,
        )
        async for _ in self._drive(steps, patience_seconds=patience_seconds, handler=handler):
            raise AssertionError("a processing follower delivers nothing")

    async def _start(self, topics: Topics, after: int | None, since: datetime | None, from_end: bool) -> int | None:
        if (after is not None) + (since is not None) + from_end > 1:
            raise InvalidRequest("say where to start once: after, since or from_end")
        if since is not None:
            return await self._run(calls.position_before(_names(topics), since))
        if from_end:
            return (await self._run(calls.log_state())).settled
        return after

    async def _drive(
        self,
        steps: Generator[FollowStep, Any, None],
        *,
        patience_seconds: float | None,
        handler: Handler | None = None,
    ) -> AsyncIterator[Sequence[Event]]:
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
                    await self.do_upkeep()
                    if isinstance(step, Wait):
                        await asyncio.sleep(step.seconds)
                    elif isinstance(step, Apply):
                        assert handler is not None
                        await self._patiently(partial(self._apply, step, handler), patience_seconds)
                    else:
                        outcome = await self.run(step, patience_seconds=patience_seconds)
                except HeadwaterError as error:
                    failure = error
        finally:
            steps.close()

    async def _apply(self, step: Apply, handler: Handler) -> None:
        async with self.transaction() as connection:
            await self._run(step.move, connection)
            await handler(connection, step.events)

    async def _patiently(self, act: Callable[[], Awaitable[T]], patience_seconds: float | None) -> T:
        """Do it, again and again while the database cannot be reached, until patience ends."""
        started = time.monotonic()
        wait = 0.05
        while True:
            try:
                return await act()
            except LogUnavailable as error:
                if patience_seconds is not None and time.monotonic() - started + wait > patience_seconds:
                    raise
                logger.warning("log unavailable", extra={ERROR: error.message, WAIT_SECONDS: wait})
                await asyncio.sleep(wait * random.uniform(0.5, 1.0))
                wait = min(wait * 2, 5.0)

    async def do_upkeep(self) -> None:
        """This process's share of the log's upkeep, when it is time for it. Consumers do this by themselves."""
        call = self._upkeep.next_call(time.monotonic())
        if call is None:
            return
        try:
            answer = await self._run(call)
            for further in self._upkeep.heard(answer, time.monotonic(), datetime.now(UTC)):
                await self._run(further)
        except (HeadwaterError, psycopg.Error) as error:
            # Upkeep is everybody's; whoever can do it next does it.
            logger.warning("upkeep failed", extra={ERROR: str(error)})

    # --- cursors -------------------------------------------------------------------------------------------

    async def open_cursor(
        self,
        name: str,
        *,
        topics: Topics = None,
        start_after: int | None = None,
        must_not_lose: bool | None = None,
        connection: AsyncConnection[Any] | None = None,
    ) -> int:
        """Where a cursor stands; made at `start_after`, or the first event kept, if there is none."""
        call = calls.open_cursor(name, topics=_names(topics), start_after=start_after, must_not_lose=must_not_lose)
        return (await self._run(call, connection)).position

    async def advance_cursor(
        self,
        name: str,
        *,
        from_position: int,
        to_position: int,
        connection: AsyncConnection[Any] | None = None,
    ) -> None:
        """Move a cursor on from where it was read; CursorMoved if somebody else did. For your own transaction."""
        call = calls.advance_cursor(name, from_position=from_position, to_position=to_position)
        await self._run(call, connection)

    async def set_cursor(
        self,
        name: str,
        *,
        position: int | None = None,
        since: datetime | None = None,
        topics: Topics = None,
        must_not_lose: bool | None = None,
        connection: AsyncConnection[Any] | None = None,
    ) -> int:
        """Set a cursor to a position or a time, back or forth, making it if need be; returns the position."""
        if (position is None) == (since is None):
            raise InvalidRequest("say where to once: position or since")
        if since is not None:
            position = await self._run(calls.position_before(_names(topics), since), connection)
        assert position is not None
        await self._run(
            calls.set_cursor(name, position, topics=_names(topics), must_not_lose=must_not_lose), connection
        )
        return position

    async def delete_cursor(self, name: str, *, connection: AsyncConnection[Any] | None = None) -> bool:
        """Forget a cursor; False if there was none."""
        return await self._run(calls.delete_cursor(name), connection)

    async def cursors(self) -> list[Cursor]:
        """Every cursor with what it has yet to read."""
        return await self._run(calls.cursors())

    # --- groups --------------------------------------------------------------------------------------------

    async def create_group(
        self,
        name: str,
        topics: Topics = None,
        *,
        after: int | None = None,
        since: datetime | None = None,
        from_end: bool = False,
        lease_seconds: float | None = None,
        max_attempts: int | None = None,
        backoff_seconds: float | None = None,
        backoff_factor: float | None = None,
        backoff_max_seconds: float | None = None,
        backoff_jitter: float | None = None,
        ordered_keys: bool | None = None,
        max_in_flight: int | None = None,
        must_not_lose: bool | None = None,
        if_missing: bool = False,
        connection: AsyncConnection[Any] | None = None,
    ) -> Group:
        """Create a group bound to whole topics, or to none yet (see bind). It starts at the beginning of the log,
        or after a position, since a time, or at the end."""
        call = calls.create_group(
            name,
            topics=_names(topics),
            start_position=await self._start(topics, after, since, from_end),
            lease_seconds=lease_seconds,
            max_attempts=max_attempts,
            backoff_seconds=backoff_seconds,
            backoff_factor=backoff_factor,
            backoff_max_seconds=backoff_max_seconds,
            backoff_jitter=backoff_jitter,
            ordered_keys=ordered_keys,
            max_in_flight=max_in_flight,
            must_not_lose=must_not_lose,
            if_missing=if_missing,
        )
        return await self._run(call, connection)

    async def alter_group(
        self,
        name: str,
        *,
        lease_seconds: float | None = None,
        max_attempts: int | None = None,
        backoff_seconds: float | None = None,
        backoff_factor: float | None = None,
        backoff_max_seconds: float | None = None,
        backoff_jitter: float | None = None,
        max_in_flight: int | None = None,
        must_not_lose: bool | None = None,
    ) -> Group:
        """Change settings of a group; None leaves one as it is, max_in_flight=0 removes the limit."""
        call = calls.alter_group(
            name,
            lease_seconds=lease_seconds,
            max_attempts=max_attempts,
            backoff_seconds=backoff_seconds,
            backoff_factor=backoff_factor,
            backoff_max_seconds=backoff_max_seconds,
            backoff_jitter=backoff_jitter,
            max_in_flight=max_in_flight,
            must_not_lose=must_not_lose,
        )
        return await self._run(call)

    async def group(self, name: str) -> Group:
        """One group's settings."""
        return await self._run(calls.find_group(name))

    async def groups(self) -> list[GroupOverview]:
        """Every group with how far it has come."""
        return await self._run(calls.groups())

    async def pause_group(self, name: str) -> None:
        """No more claims until resumed. What is leased may still be acknowledged."""
        await self._run(calls.pause_group(name))

    async def resume_group(self, name: str) -> None:
        await self._run(calls.resume_group(name))

    async def delete_group(self, name: str) -> bool:
        """Forget a group with everything about it; False if there was none."""
        return await self._run(calls.delete_group(name))

    async def rewind_group(self, name: str, *, position: int | None = None, since: datetime | None = None) -> int:
        """Let a group begin anew after a position or since a time, back or forth; returns the position."""
        if (position is None) == (since is None):
            raise InvalidRequest("say where to once: position or since")
        if since is not None:
            position = await self._run(calls.position_before(None, since))
        assert position is not None
        await self._run(calls.rewind_group(name, position))
        return position

    async def bind(
        self,
        group: str,
        *,
        topic: str | None = None,
        pattern: str | None = None,
        headers: Mapping[str, Any] | None = None,
        type: str | None = None,
        from_position: int | None = None,
        connection: AsyncConnection[Any] | None = None,
    ) -> Binding:
        """Bind a group to events that fit every part given: topic, routing-key pattern, headers contained, type.

        Takes effect after `from_position`; by default, after what the group has claimed.
        """
        call = calls.bind(group, topic=topic, pattern=pattern, headers=headers, type=type, from_position=from_position)
        return await self._run(call, connection)

    async def unbind(
        self,
        group: str,
        binding_id: int,
        *,
        to_position: int | None = None,
        connection: AsyncConnection[Any] | None = None,
    ) -> int:
        """End a binding after a position, by default after what the group has claimed; returns the position."""
        return await self._run(calls.unbind(group, binding_id, to_position=to_position), connection)

    async def bindings(self, group: str) -> list[Binding]:
        """What a group is and was bound to."""
        return await self._run(calls.bindings(group))

    # --- working a queue -----------------------------------------------------------------------------------

    async def claim(
        self,
        group: str,
        *,
        worker: str,
        batch_size: int = 1,
        lease_seconds: float | None = None,
        connection: AsyncConnection[Any] | None = None,
    ) -> Lease | None:
        """Claim up to `batch_size` events until the lease ends; None if there is nothing to do now."""
        call = calls.claim(
            group, worker=worker, batch_size=batch_size, lease_seconds=lease_seconds, relaxed=connection is None
        )
        return await self._run(call, connection)

    async def ack(
        self,
        lease: Lease,
        *events: ClaimedEvent,
        connection: AsyncConnection[Any] | None = None,
    ) -> None:
        """These events are done; without any, all that is left of the lease. LeaseLost if it is too late.

        With `connection`, they are done when that transaction commits, together with what it wrote.
        """
        outcomes: dict[int, Outcome] = {event.position: None for event in events}
        call = calls.settle(lease, outcomes, rest_done=not events, relaxed=connection is None)
        await self._run(call, connection)

    async def nack(
        self,
        lease: Lease,
        *events: ClaimedEvent,
        error: str,
        delay: timedelta | None = None,
        dead: bool = False,
    ) -> None:
        """These events failed: again after the delay or the group's backoff, or dead at once."""
        outcome: Outcome = Dead(error) if dead else Retry(delay, error)
        call = calls.settle(lease, {event.position: outcome for event in events}, rest_done=False)
        await self._run(call)

    async def release(self, lease: Lease, *events: ClaimedEvent, delay: timedelta = timedelta(0)) -> None:
        """Give these events back, not counted as a try; without any, all of the lease that is not settled."""
        outcomes: dict[int, Outcome] = {event.position: Snooze(delay) for event in events or lease.events}
        await self._run(calls.settle(lease, outcomes, rest_done=False))

    async def settle(
        self,
        lease: Lease,
        outcomes: Mapping[int, Outcome],
        *,
        rest_done: bool = True,
        connection: AsyncConnection[Any] | None = None,
    ) -> None:
        """Say how the events of a lease ended, by position; those not named are done, unless rest_done=False."""
        await self._run(calls.settle(lease, outcomes, rest_done=rest_done), connection)

    async def settle_and_claim(
        self,
        lease: Lease,
        outcomes: Mapping[int, Outcome] | None = None,
        *,
        worker: str,
        batch_size: int = 1,
        lease_seconds: float | None = None,
    ) -> Lease | None:
        """End a lease, its events done but for the outcomes named, and claim the next batch in the same trip."""
        call = calls.settle_and_claim(
            lease, outcomes or {}, worker=worker, batch_size=batch_size, lease_seconds=lease_seconds
        )
        return await self._run(call)

    async def extend(self, lease: Lease, *, lease_seconds: float | None = None) -> datetime:
        """Keep a lease for longer; returns when it ends now. LeaseLost if it is too late."""
        return await self._run(calls.extend_lease(lease, lease_seconds=lease_seconds))

    async def reap(self, group: str) -> int:
        """Give the events of leases that ran out to others; returns how many. Workers do this by themselves."""
        return await self._run(calls.reap(group))

    async def deliveries(
        self, group: str, *, status: str | None = None, after: int = 0, batch_size: int = 100
    ) -> list[Delivery]:
        """The state of each event for a group, in order."""
        return await self._run(calls.deliveries(group, status=status, after=after, batch_size=batch_size))

    async def dead_letters(
        self,
        group: str,
        *,
        positions: Sequence[int] | None = None,
        topic: str | None = None,
        error_like: str | None = None,
        after: int = 0,
        batch_size: int = 100,
    ) -> list[DeadLetter]:
        """The events that a group has given up on; all, or those named, of a topic, or with an error like this."""
        call = calls.dead_letters(
            group, positions=positions, topic=topic, error_like=error_like, after=after, batch_size=batch_size
        )
        return await self._run(call)

    async def redrive(
        self,
        group: str,
        *,
        positions: Sequence[int] | None = None,
        topic: str | None = None,
        error_like: str | None = None,
    ) -> int:
        """Give dead letters a fresh set of tries; returns how many."""
        return await self._run(calls.redrive(group, positions=positions, topic=topic, error_like=error_like))

    async def discard(
        self,
        group: str,
        *,
        positions: Sequence[int] | None = None,
        topic: str | None = None,
        error_like: str | None = None,
    ) -> int:
        """Drop dead letters for good; returns how many."""
        return await self._run(calls.discard(group, positions=positions, topic=topic, error_like=error_like))

    # --- subscriptions by SQL condition --------------------------------------------------------------------

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
            topics=_names(topics),
        )
        return await self._run(call, connection)

    async def unsubscribe(self, subscription_id: int) -> bool:
        """End a subscription; False if there was none."""
        return await self._run(calls.unsubscribe(subscription_id))

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
    ) -> Reading:
        """The next events of a group, each once, with the ids of all its subscriptions that match.

        Moves nothing: set_reading does. One reader at a time (ReaderBusy); `peek` reads without being it. A
        condition that takes longer than `timeout_seconds` is set aside.
        """
        call = calls.read_next(
            group, reader=reader, after=after, batch_size=batch_size, lease_seconds=lease_seconds, peek=peek
        )
        async with self.transaction() as connection:
            await connection.execute(
                "select set_config('statement_timeout', %s, true)", (str(int(timeout_seconds * 1000)),)
            )
            return await self._run(call, connection)

    async def set_reading(self, group: str, position: int, *, reader: str, release: bool = False) -> None:
        """Note how far a group has read; `release` lets another reader take over at once."""
        await self._run(calls.set_reading(group, position, reader=reader, release=release))

    async def retry_later(
        self,
        group: str,
        matched: MatchedEvent,
        *,
        handler: str,
        delay_seconds: float | None = None,
        error: str | None = None,
    ) -> bool:
        """Have one handler get this event again; False if its tries are used up."""
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

    # --- tables --------------------------------------------------------------------------------------------

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

    # --- topics --------------------------------------------------------------------------------------------

    async def create_topic(
        self,
        name: str,
        *,
        kind: TopicKind = "open",
        partitions: int = 1,
        retention: timedelta | None = None,
        max_payload_bytes: int | None = None,
        max_header_bytes: int | None = None,
        if_missing: bool = False,
        connection: AsyncConnection[Any] | None = None,
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
        return await self._run(call, connection)

    async def alter_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        retention: timedelta | None = None,
        keep_forever: bool = False,
        max_payload_bytes: int | None = None,
        max_header_bytes: int | None = None,
        connection: AsyncConnection[Any] | None = None,
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
        return await self._run(call, connection)

    async def delete_topic(self, name: str, *, connection: AsyncConnection[Any] | None = None) -> None:
        """Delete a topic with its events."""
        await self._run(calls.delete_topic(name), connection)

    async def topic(self, name: str) -> Topic:
        """One topic's settings."""
        return await self._run(calls.find_topic(name))

    async def topics(self) -> list[TopicOverview]:
        """Every topic with what it holds."""
        return await self._run(calls.topics())

    # --- the log as a whole --------------------------------------------------------------------------------

    async def state(self) -> LogState:
        """How far the log goes and how far it is settled."""
        return await self._run(calls.log_state())

    async def publishers_in_flight(self) -> list[Publisher]:
        """The open transactions that have published: what readers wait for."""
        return await self._run(calls.publishers_in_flight())

    async def settings(self) -> LogSettings:
        """The settings of the whole log."""
        return await self._run(calls.log_settings())

    async def change_settings(
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
        return await self._run(call)

    async def maintain(self) -> Upkeep:
        """One round of upkeep: due events enter, segments are made ahead and dropped behind."""
        return await self._run(calls.maintain())


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


async def _rows(cursor: psycopg.AsyncCursor[Any], call: Call[Any]) -> list[Any]:
    try:
        await cursor.execute(call.sql, call.params)
        return await cursor.fetchall()
    except psycopg.Error as error:
        raise _translated(error) from error


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
