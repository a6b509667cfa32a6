"""Reading: single reads, live followers, cursors, and processing with exactly-once effects."""

from __future__ import annotations

from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Sequence,
)
from datetime import datetime
from functools import partial
from typing import Any

from psycopg import AsyncConnection

from headwater.calls import log as log_calls
from headwater.calls import reading as reading_calls
from headwater.database.caller_connection import AsyncCallerConnection
from headwater.database.connection import CallRunner, Topics, as_names
from headwater.errors import HeadwaterError, InvalidRequest
from headwater.log import steps as log_steps
from headwater.log.model import Cursor, Event
from headwater.log.steps import ApplyStep, DeliverStep, FollowStep, OnEpochChange, RewindStep, WaitForGrowthStep
from headwater.observability import tracing
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import EPOCH, EPOCH_CHANGED, POSITION, READ_TO, logger

Handler = Callable[[AsyncConnection[Any], Sequence[Event]], Awaitable[None]]


class FollowApi(CallRunner):
    """Read and follow events; manage cursors."""

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
        epoch: int | None = None,
        connection: AsyncCallerConnection | None = None,
    ) -> list[Event]:
        """Stable events after a position or since a time, in order. An empty list means that no further event is stable
        yet.

        Raises PositionExpired if retention has removed events after the position, unless `skip_expired`. Raises
        EpochChanged for a position that this log never assigned; with `epoch`, the epoch in which the position was
        read, also if the log is in another epoch now.
        """
        names = as_names(topics)
        if since is not None:
            if after is not None:
                raise InvalidRequest("give only one of after and since")
            after = await self._run(reading_calls.position_before(names, since), connection)
            skip_expired = True
        call = reading_calls.read(
            names,
            after=after,
            batch_size=batch_size,
            max_bytes=max_bytes,
            up_to=up_to,
            skip_expired=skip_expired,
            epoch=epoch,
        )
        return await self._run(call, connection)

    async def read_backwards(
        self,
        topics: Topics = None,
        *,
        before: int | None = None,
        batch_size: int = 100,
        max_bytes: int = 16_777_216,
        connection: AsyncCallerConnection | None = None,
    ) -> list[Event]:
        """Stable events below a position, newest first."""
        call = reading_calls.read_backwards(as_names(topics), before=before, batch_size=batch_size, max_bytes=max_bytes)
        return await self._run(call, connection)

    async def position_before(self, at: datetime, topics: Topics = None) -> int:
        """The position to read after in order to get every event published at that time or later."""
        return await self._run(reading_calls.position_before(as_names(topics), at))

    async def follow(
        self,
        topics: Topics = None,
        *,
        cursor: str | None = None,
        after: int | None = None,
        epoch: int | None = None,
        since: datetime | None = None,
        from_end: bool = False,
        holds_retention: bool | None = None,
        batch_size: int = 1000,
        max_bytes: int = 16_777_216,
        skip_expired: bool = False,
        stop_when_caught_up: bool = False,
        on_epoch_change: OnEpochChange = "rewind",
        patience_seconds: float | None = 60.0,
    ) -> AsyncIterator[Event]:
        """Yield every event: existing events first, then new ones as they are published. See follow_batches."""
        async for events in self.follow_batches(
            topics,
            cursor=cursor,
            after=after,
            epoch=epoch,
            since=since,
            from_end=from_end,
            holds_retention=holds_retention,
            batch_size=batch_size,
            max_bytes=max_bytes,
            skip_expired=skip_expired,
            stop_when_caught_up=stop_when_caught_up,
            on_epoch_change=on_epoch_change,
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
        epoch: int | None = None,
        since: datetime | None = None,
        from_end: bool = False,
        holds_retention: bool | None = None,
        batch_size: int = 1000,
        max_bytes: int = 16_777_216,
        skip_expired: bool = False,
        stop_when_caught_up: bool = False,
        on_epoch_change: OnEpochChange = "rewind",
        patience_seconds: float | None = 60.0,
    ) -> AsyncIterator[Sequence[Event]]:
        """Yield every event, in batches: existing events first, then new ones as they are published.

        If the named cursor exists, reading starts there. The cursor is saved when the next batch is requested, so a
        crash repeats at most the current batch (at-least-once). A lost database connection is retried for up to
        `patience_seconds`.

        If positions may have been reassigned (Postgres crashed, failed over or was restored), reading continues from
        the cursor, or without one from the last common position, and skips nothing; with `on_epoch_change="error"` it
        raises EpochChanged. `epoch` is the epoch in which the caller got `after`: see LogState.
        """
        deliveries = self.follow_deliveries(
            topics,
            cursor=cursor,
            after=after,
            epoch=epoch,
            since=since,
            from_end=from_end,
            holds_retention=holds_retention,
            batch_size=batch_size,
            max_bytes=max_bytes,
            skip_expired=skip_expired,
            stop_when_caught_up=stop_when_caught_up,
            on_epoch_change=on_epoch_change,
            patience_seconds=patience_seconds,
        )
        async for delivery in deliveries:
            yield delivery.events

    async def follow_deliveries(
        self,
        topics: Topics = None,
        *,
        cursor: str | None = None,
        after: int | None = None,
        epoch: int | None = None,
        since: datetime | None = None,
        from_end: bool = False,
        holds_retention: bool | None = None,
        batch_size: int = 1000,
        max_bytes: int = 16_777_216,
        skip_expired: bool = False,
        stop_when_caught_up: bool = False,
        on_epoch_change: OnEpochChange = "rewind",
        patience_seconds: float | None = 60.0,
    ) -> AsyncIterator[DeliverStep]:
        """Like follow_batches, but each batch has the epoch of its positions: for readers that store positions
        themselves."""
        names = as_names(topics)
        start_after, epoch = await self._start(topics, after, since, from_end, epoch)
        steps = log_steps.follow(
            names,
            start_after=start_after,
            epoch=epoch,
            cursor=cursor,
            holds_retention=holds_retention,
            batch_size=batch_size,
            max_bytes=max_bytes,
            skip_expired=skip_expired or since is not None,
            stop_when_caught_up=stop_when_caught_up,
            rewind_on_epoch_change=on_epoch_change == "rewind",
        )
        async for delivery in self._drive(steps, topics=names, cursor=cursor, patience_seconds=patience_seconds):
            yield delivery

    async def process(
        self,
        topics: Topics,
        handler: Handler,
        *,
        cursor: str,
        after: int | None = None,
        epoch: int | None = None,
        since: datetime | None = None,
        from_end: bool = False,
        holds_retention: bool | None = None,
        batch_size: int = 1000,
        max_bytes: int = 16_777_216,
        skip_expired: bool = False,
        stop_when_caught_up: bool = False,
        on_epoch_change: OnEpochChange = "rewind",
        patience_seconds: float | None = 60.0,
    ) -> None:
        """Run `handler(connection, events)` on every batch, in the transaction that also moves the cursor.

        What the handler writes on that connection and the new position commit together, so each event takes effect
        exactly once.
        """
        names = as_names(topics)
        start_after, epoch = await self._start(topics, after, since, from_end, epoch)
        steps = log_steps.follow(
            names,
            start_after=start_after,
            epoch=epoch,
            cursor=cursor,
            holds_retention=holds_retention,
            batch_size=batch_size,
            max_bytes=max_bytes,
            skip_expired=skip_expired or since is not None,
            stop_when_caught_up=stop_when_caught_up,
            in_transaction=True,
            rewind_on_epoch_change=on_epoch_change == "rewind",
        )

        async def traced(connection: AsyncConnection[Any], events: Sequence[Event]) -> None:
            with tracing.consuming(cursor, events):
                await handler(connection, events)

        async for _ in self._drive(
            steps, topics=names, cursor=cursor, patience_seconds=patience_seconds, handler=traced
        ):
            raise AssertionError("a processing follower delivers nothing")

    async def _drive(
        self,
        steps: Generator[FollowStep, Any, None],
        *,
        topics: Sequence[str] | None,
        cursor: str | None,
        patience_seconds: float | None,
        handler: Handler | None = None,
    ) -> AsyncIterator[DeliverStep]:
        """Carry out the steps of a consumer, and run the log's maintenance between them."""
        patient = self.with_patience(patience_seconds)
        waiter = self.watcher.waiter(cursor=cursor, topics=topics)
        outcome: Any = None
        failure: HeadwaterError | None = None
        try:
            while True:
                try:
                    step = steps.send(outcome) if failure is None else steps.throw(failure)
                except StopIteration:
                    return
                outcome = failure = None
                if isinstance(step, DeliverStep):
                    yield step
                    continue
                if isinstance(step, RewindStep):
                    COUNTERS.add(EPOCH_CHANGED)
                    logger.warning(
                        "epoch changed",
                        extra={EPOCH: step.epoch, READ_TO: step.read_to, POSITION: step.position},
                    )
                    continue
                try:
                    await self.run_maintenance()
                    if isinstance(step, WaitForGrowthStep):
                        outcome = await waiter.wait(step.seconds)
                    elif isinstance(step, ApplyStep):
                        assert handler is not None
                        await self._patiently(partial(self._apply, step, handler), patience_seconds)
                    else:
                        outcome = await patient.run(step)
                except HeadwaterError as error:
                    failure = error
        finally:
            steps.close()

    async def _apply(self, step: ApplyStep, handler: Handler) -> None:
        async with self.transaction() as connection:
            await self._run(step.move, connection)
            await handler(connection, step.events)

    async def open_cursor(
        self,
        name: str,
        *,
        topics: Topics = None,
        start_after: int | None = None,
        holds_retention: bool | None = None,
        connection: AsyncCallerConnection | None = None,
    ) -> int:
        """The position of a cursor. A missing cursor is created at `start_after`, or before the first existing
        event."""
        call = reading_calls.open_cursor(
            name, topics=as_names(topics), start_after=start_after, holds_retention=holds_retention
        )
        return (await self._run(call, connection)).position

    async def advance_cursor(
        self,
        name: str,
        *,
        from_position: int,
        to_position: int,
        epoch: int | None = None,
        connection: AsyncCallerConnection | None = None,
    ) -> None:
        """Move a cursor; raises CursorMoved if it is not at `from_position`. For use in your own transaction.

        With `epoch`, the epoch in which the events were read, raises EpochChanged if the log is in another epoch now.
        """
        call = reading_calls.advance_cursor(name, from_position=from_position, to_position=to_position, epoch=epoch)
        await self._run(call, connection)

    async def set_cursor(
        self,
        name: str,
        *,
        position: int | None = None,
        since: datetime | None = None,
        topics: Topics = None,
        holds_retention: bool | None = None,
        epoch: int | None = None,
        connection: AsyncCallerConnection | None = None,
    ) -> int:
        """Set a cursor to a position or a time, forwards or backwards, and create it if it is missing; returns the
        position.

        A position of an older `epoch` is reduced to the last one that both epochs share.
        """
        if (position is None) == (since is None):
            raise InvalidRequest("give exactly one of position and since")
        if since is not None:
            position = await self._run(reading_calls.position_before(as_names(topics), since), connection)
        assert position is not None
        if epoch is not None:
            position = await self._run(log_calls.common_position(epoch, position), connection)
        await self._run(
            reading_calls.set_cursor(name, position, topics=as_names(topics), holds_retention=holds_retention),
            connection,
        )
        return position

    async def delete_cursor(self, name: str, *, connection: AsyncCallerConnection | None = None) -> bool:
        """Delete a cursor; False if it does not exist."""
        return await self._run(reading_calls.delete_cursor(name), connection)

    async def cursors(self) -> list[Cursor]:
        """All cursors with their lag."""
        return await self._run(reading_calls.cursors())
