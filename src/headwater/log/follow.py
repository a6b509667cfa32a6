"""Read and follow: once, live, with a cursor, and with effects exactly once."""

from __future__ import annotations

import asyncio
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

from headwater import calls
from headwater.database.connection import Shell, Topics, as_names
from headwater.errors import HeadwaterError, InvalidRequest
from headwater.log import steps as log_steps
from headwater.log.steps import Apply, Deliver, FollowStep, OnEpochChange, Rewound, Wait
from headwater.model import (
    Cursor,
    Event,
)
from headwater.observability import tracing
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import EPOCH, EPOCH_CHANGED, POSITION, READ_TO, logger

Handler = Callable[[AsyncConnection[Any], Sequence[Event]], Awaitable[None]]


class Following(Shell):
    """The reading side of the log, with its cursors."""

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
        connection: AsyncConnection[Any] | None = None,
    ) -> list[Event]:
        """Settled events after a position or since a time, in order. Empty: nothing more is settled.

        Raises PositionExpired if retention took events after the position, unless `skip_expired`. Raises EpochChanged
        for a position that this log never issued; with `epoch`, the one in which the position was read, also if the
        log is in another by now.
        """
        names = as_names(topics)
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
        connection: AsyncConnection[Any] | None = None,
    ) -> list[Event]:
        """Settled events below a position, newest first."""
        call = calls.read_backwards(as_names(topics), before=before, batch_size=batch_size, max_bytes=max_bytes)
        return await self._run(call, connection)

    async def position_before(self, at: datetime, topics: Topics = None) -> int:
        """The position to read after in order to get every event published at that time or later."""
        return await self._run(calls.position_before(as_names(topics), at))

    async def follow(
        self,
        topics: Topics = None,
        *,
        cursor: str | None = None,
        after: int | None = None,
        epoch: int | None = None,
        since: datetime | None = None,
        from_end: bool = False,
        must_not_lose: bool | None = None,
        batch_size: int = 1000,
        max_bytes: int = 16_777_216,
        skip_expired: bool = False,
        poll_seconds: float = 0.01,
        stop_when_caught_up: bool = False,
        on_epoch_change: OnEpochChange = "rewind",
        patience_seconds: float | None = 60.0,
    ) -> AsyncIterator[Event]:
        """Every event, one by one: catches up, then stays live. See follow_batches."""
        async for events in self.follow_batches(
            topics,
            cursor=cursor,
            after=after,
            epoch=epoch,
            since=since,
            from_end=from_end,
            must_not_lose=must_not_lose,
            batch_size=batch_size,
            max_bytes=max_bytes,
            skip_expired=skip_expired,
            poll_seconds=poll_seconds,
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
        must_not_lose: bool | None = None,
        batch_size: int = 1000,
        max_bytes: int = 16_777_216,
        skip_expired: bool = False,
        poll_seconds: float = 0.01,
        stop_when_caught_up: bool = False,
        on_epoch_change: OnEpochChange = "rewind",
        patience_seconds: float | None = 60.0,
    ) -> AsyncIterator[Sequence[Event]]:
        """Every event, in batches: catches up, then stays live.

        A named cursor is where to start if it exists, and is saved when the next batch is asked for: a crash
        repeats at most the batch in hand. A lost database is waited for, up to `patience_seconds`.

        If positions may have been issued again (Postgres crashed, failed over or was restored), it goes on from the
        cursor, or without one from the last common position, and skips nothing; with `on_epoch_change="error"` it
        raises EpochChanged. `epoch` is the one in which the caller got `after`: see LogState.
        """
        deliveries = self.follow_deliveries(
            topics,
            cursor=cursor,
            after=after,
            epoch=epoch,
            since=since,
            from_end=from_end,
            must_not_lose=must_not_lose,
            batch_size=batch_size,
            max_bytes=max_bytes,
            skip_expired=skip_expired,
            poll_seconds=poll_seconds,
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
        must_not_lose: bool | None = None,
        batch_size: int = 1000,
        max_bytes: int = 16_777_216,
        skip_expired: bool = False,
        poll_seconds: float = 0.01,
        stop_when_caught_up: bool = False,
        on_epoch_change: OnEpochChange = "rewind",
        patience_seconds: float | None = 60.0,
    ) -> AsyncIterator[Deliver]:
        """The same, each batch with the epoch that its positions are of: for readers that remember them themselves."""
        start_after, epoch = await self._start(topics, after, since, from_end, epoch)
        steps = log_steps.follow(
            as_names(topics),
            start_after=start_after,
            epoch=epoch,
            cursor=cursor,
            must_not_lose=must_not_lose,
            batch_size=batch_size,
            max_bytes=max_bytes,
            skip_expired=skip_expired or since is not None,
            poll_seconds=poll_seconds,
            stop_when_caught_up=stop_when_caught_up,
            rewind_on_epoch_change=on_epoch_change == "rewind",
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
        epoch: int | None = None,
        since: datetime | None = None,
        from_end: bool = False,
        must_not_lose: bool | None = None,
        batch_size: int = 1000,
        max_bytes: int = 16_777_216,
        skip_expired: bool = False,
        poll_seconds: float = 0.01,
        stop_when_caught_up: bool = False,
        on_epoch_change: OnEpochChange = "rewind",
        patience_seconds: float | None = 60.0,
    ) -> None:
        """Run `handler(connection, events)` on every batch, its transaction moving the cursor too.

        What the handler writes on that connection and the position commit together, so each event has its
        effect exactly once.
        """
        start_after, epoch = await self._start(topics, after, since, from_end, epoch)
        steps = log_steps.follow(
            as_names(topics),
            start_after=start_after,
            epoch=epoch,
            cursor=cursor,
            must_not_lose=must_not_lose,
            batch_size=batch_size,
            max_bytes=max_bytes,
            skip_expired=skip_expired or since is not None,
            poll_seconds=poll_seconds,
            stop_when_caught_up=stop_when_caught_up,
            in_transaction=True,
            rewind_on_epoch_change=on_epoch_change == "rewind",
        )

        async def traced(connection: AsyncConnection[Any], events: Sequence[Event]) -> None:
            with tracing.consuming(cursor, events):
                await handler(connection, events)

        async for _ in self._drive(steps, patience_seconds=patience_seconds, handler=traced):
            raise AssertionError("a processing follower delivers nothing")

    async def _drive(
        self,
        steps: Generator[FollowStep, Any, None],
        *,
        patience_seconds: float | None,
        handler: Handler | None = None,
    ) -> AsyncIterator[Deliver]:
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
                    yield step
                    continue
                if isinstance(step, Rewound):
                    COUNTERS.add(EPOCH_CHANGED)
                    logger.warning(
                        "epoch changed",
                        extra={EPOCH: step.epoch, READ_TO: step.read_to, POSITION: step.position},
                    )
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
        call = calls.open_cursor(name, topics=as_names(topics), start_after=start_after, must_not_lose=must_not_lose)
        return (await self._run(call, connection)).position

    async def advance_cursor(
        self,
        name: str,
        *,
        from_position: int,
        to_position: int,
        epoch: int | None = None,
        connection: AsyncConnection[Any] | None = None,
    ) -> None:
        """Move a cursor on from where it was read; CursorMoved if it is elsewhere. For your own transaction.

        With `epoch`, the one in which the events were read, EpochChanged if the log is in another by now.
        """
        call = calls.advance_cursor(name, from_position=from_position, to_position=to_position, epoch=epoch)
        await self._run(call, connection)

    async def set_cursor(
        self,
        name: str,
        *,
        position: int | None = None,
        since: datetime | None = None,
        topics: Topics = None,
        must_not_lose: bool | None = None,
        epoch: int | None = None,
        connection: AsyncConnection[Any] | None = None,
    ) -> int:
        """Set a cursor to a position or a time, back or forth, making it if need be; returns the position.

        A position of an older `epoch` is taken back to the last one that both epochs share.
        """
        if (position is None) == (since is None):
            raise InvalidRequest("say where to once: position or since")
        if since is not None:
            position = await self._run(calls.position_before(as_names(topics), since), connection)
        assert position is not None
        if epoch is not None:
            position = await self._run(calls.common_position(epoch, position), connection)
        await self._run(
            calls.set_cursor(name, position, topics=as_names(topics), must_not_lose=must_not_lose), connection
        )
        return position

    async def delete_cursor(self, name: str, *, connection: AsyncConnection[Any] | None = None) -> bool:
        """Forget a cursor; False if there was none."""
        return await self._run(calls.delete_cursor(name), connection)

    async def cursors(self) -> list[Cursor]:
        """Every cursor with what it has yet to read."""
        return await self._run(calls.cursors())
