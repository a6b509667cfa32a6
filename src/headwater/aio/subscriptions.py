"""Subscriptions by SQL condition, and watched tables."""

from __future__ import annotations

from collections.abc import (
    Mapping,
    Sequence,
)
from datetime import timedelta
from typing import Any

from psycopg import AsyncConnection

from headwater import calls
from headwater.aio.shell import Shell, Topics, as_names
from headwater.model import (
    MatchedEvent,
    Reading,
    Subscription,
)


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
