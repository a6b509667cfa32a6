"""The API of queues: bindings, leases and dead letters."""

from __future__ import annotations

from collections.abc import (
    Mapping,
    Sequence,
)
from datetime import datetime, timedelta
from typing import Any, Unpack

from headwater.calls import queues as queue_calls
from headwater.calls import reading as reading_calls
from headwater.database.caller_connection import AsyncCallerConnection
from headwater.database.connection import CallRunner, Topics, as_names
from headwater.errors import InvalidRequest
from headwater.queue.model import (
    Binding,
    ClaimedEvent,
    Dead,
    DeadLetter,
    Delivery,
    Lease,
    Outcome,
    Queue,
    QueueOverview,
    Retry,
    Snooze,
)
from headwater.queue.settings import NewQueueSettings, QueueChanges


class QueueApi(CallRunner):
    """Queues: claim, settle, retry, redrive."""

    async def create_queue(
        self,
        name: str,
        topics: Topics = None,
        *,
        after: int | None = None,
        since: datetime | None = None,
        from_end: bool = False,
        if_missing: bool = False,
        connection: AsyncCallerConnection | None = None,
        **settings: Unpack[NewQueueSettings],
    ) -> Queue:
        """Create a queue bound to whole topics, or without bindings (see bind). It starts at the beginning of the log,
        after a position, since a time, or at the end."""
        call = queue_calls.create_queue(
            name,
            topics=as_names(topics),
            start_position=(await self._start(topics, after, since, from_end))[0],
            if_missing=if_missing,
            **settings,
        )
        return await self._run(call, connection)

    async def alter_queue(self, name: str, **changes: Unpack[QueueChanges]) -> Queue:
        """Change settings of a queue; None leaves a setting unchanged, 0 removes a limit."""
        return await self._run(queue_calls.alter_queue(name, **changes))

    async def queue(self, name: str) -> Queue:
        """A queue and its settings."""
        return await self._run(queue_calls.find_queue(name))

    async def queues(self, names: Sequence[str] | None = None) -> list[QueueOverview]:
        """All queues, or those of these names that exist, with their progress and lag."""
        return await self._run(queue_calls.queues(names))

    async def pause_queue(self, name: str) -> None:
        """Pause a queue: claims return nothing until it is resumed. Leased events can still be acknowledged."""
        await self._run(queue_calls.pause_queue(name))

    async def resume_queue(self, name: str) -> None:
        await self._run(queue_calls.resume_queue(name))

    async def delete_queue(self, name: str) -> bool:
        """Delete a queue with its bindings, leases and dead letters; False if it does not exist."""
        return await self._run(queue_calls.delete_queue(name))

    async def rewind_queue(self, name: str, *, position: int | None = None, since: datetime | None = None) -> int:
        """Move a queue to a position or a time, forwards or backwards; returns the position. Events after it are
        delivered again, and current leases are revoked."""
        if (position is None) == (since is None):
            raise InvalidRequest("give exactly one of position and since")
        if since is not None:
            position = await self._run(reading_calls.position_before(None, since))
        assert position is not None
        await self._run(queue_calls.rewind_queue(name, position))
        return position

    async def bind(
        self,
        queue: str,
        *,
        topic: str | None = None,
        pattern: str | None = None,
        headers: Mapping[str, Any] | None = None,
        type: str | None = None,
        from_position: int | None = None,
        connection: AsyncCallerConnection | None = None,
    ) -> Binding:
        """Bind a queue to events that match every given part: topic, routing-key pattern, contained headers, type.

        Takes effect after `from_position`; by default, after the queue's claimed position.
        """
        call = queue_calls.bind(
            queue, topic=topic, pattern=pattern, headers=headers, type=type, from_position=from_position
        )
        return await self._run(call, connection)

    async def unbind(
        self,
        queue: str,
        binding_id: int,
        *,
        to_position: int | None = None,
        connection: AsyncCallerConnection | None = None,
    ) -> int:
        """End a binding after a position, by default after the queue's claimed position; returns the position."""
        return await self._run(queue_calls.unbind(queue, binding_id, to_position=to_position), connection)

    async def bindings(self, queue: str) -> list[Binding]:
        """The bindings of a queue, including ended ones."""
        return await self._run(queue_calls.bindings(queue))

    async def claim(
        self,
        queue: str,
        *,
        worker: str,
        batch_size: int = 1,
        lease_seconds: float | None = None,
        connection: AsyncCallerConnection | None = None,
    ) -> Lease | None:
        """Claim up to `batch_size` events until the lease expires; None if no event is ready."""
        call = queue_calls.claim(
            queue, worker=worker, batch_size=batch_size, lease_seconds=lease_seconds, relaxed=connection is None
        )
        return await self._run(call, connection)

    async def ack(
        self,
        lease: Lease,
        *events: ClaimedEvent,
        connection: AsyncCallerConnection | None = None,
    ) -> None:
        """Acknowledge these events, or the rest of the lease if none is given. Raises LeaseLost if the lease has
        expired.

        With `connection`, the acknowledgement commits together with that transaction.
        """
        outcomes: dict[int, Outcome] = {event.position: None for event in events}
        call = queue_calls.settle(lease, outcomes, rest_done=not events, relaxed=connection is None)
        await self._run(call, connection)

    async def nack(
        self,
        lease: Lease,
        *events: ClaimedEvent,
        error: str,
        delay: timedelta | None = None,
        dead: bool = False,
    ) -> None:
        """Mark these events as failed: they are retried after `delay` or the queue's backoff, or become dead
        letters."""
        outcome: Outcome = Dead(error) if dead else Retry(delay, error)
        call = queue_calls.settle(lease, {event.position: outcome for event in events}, rest_done=False)
        await self._run(call)

    async def release(self, lease: Lease, *events: ClaimedEvent, delay: timedelta = timedelta(0)) -> None:
        """Return these events to the queue without counting an attempt; without events, all unsettled events of the
        lease."""
        outcomes: dict[int, Outcome] = {event.position: Snooze(delay) for event in events or lease.events}
        await self._run(queue_calls.settle(lease, outcomes, rest_done=False))

    async def settle(
        self,
        lease: Lease,
        outcomes: Mapping[int, Outcome],
        *,
        rest_done: bool = True,
        connection: AsyncCallerConnection | None = None,
    ) -> None:
        """Settle events of a lease with these outcomes by position; other events are done, unless rest_done=False."""
        await self._run(queue_calls.settle(lease, outcomes, rest_done=rest_done), connection)

    async def settle_and_claim(
        self,
        lease: Lease,
        outcomes: Mapping[int, Outcome] | None = None,
        *,
        worker: str,
        batch_size: int = 1,
        lease_seconds: float | None = None,
    ) -> Lease | None:
        """End a lease and claim the next batch in one round trip. Events without an outcome are done."""
        call = queue_calls.settle_and_claim(
            lease, outcomes or {}, worker=worker, batch_size=batch_size, lease_seconds=lease_seconds
        )
        return await self._run(call)

    async def extend(self, lease: Lease, *, lease_seconds: float | None = None) -> datetime:
        """Extend a lease; returns its new expiry. Raises LeaseLost if it has already expired."""
        return await self._run(queue_calls.extend_lease(lease, lease_seconds=lease_seconds))

    async def reap(self, queue: str) -> int:
        """Return the events of expired leases to the queue; returns their number. Workers do this automatically."""
        return await self._run(queue_calls.reap(queue))

    async def deliveries(
        self, queue: str, *, status: str | None = None, after: int = 0, batch_size: int = 100
    ) -> list[Delivery]:
        """The state of each event for a queue, in order."""
        return await self._run(queue_calls.deliveries(queue, status=status, after=after, batch_size=batch_size))

    async def dead_letters(
        self,
        queue: str,
        *,
        positions: Sequence[int] | None = None,
        topic: str | None = None,
        error_like: str | None = None,
        handler: str | None = None,
        subscription_id: int | None = None,
        after: int = 0,
        batch_size: int = 100,
    ) -> list[DeadLetter]:
        """The dead letters of a queue, optionally restricted to positions, a topic or an error pattern; for a queue of
        SQL subscriptions, also to a handler or a subscription.

        Dead letters of one event are not split, so there may be a few more than `batch_size`.
        """
        call = queue_calls.dead_letters(
            queue,
            positions=positions,
            topic=topic,
            error_like=error_like,
            handler=handler,
            subscription_id=subscription_id,
            after=after,
            batch_size=batch_size,
        )
        return await self._run(call)

    async def redrive(
        self,
        queue: str,
        *,
        positions: Sequence[int] | None = None,
        topic: str | None = None,
        error_like: str | None = None,
        handler: str | None = None,
        subscription_id: int | None = None,
    ) -> int:
        """Retry dead letters with a new set of attempts; returns their number. A dead letter of a subscriber goes to
        the handler that gave up."""
        call = queue_calls.redrive(
            queue,
            positions=positions,
            topic=topic,
            error_like=error_like,
            handler=handler,
            subscription_id=subscription_id,
        )
        return await self._run(call)

    async def discard(
        self,
        queue: str,
        *,
        positions: Sequence[int] | None = None,
        topic: str | None = None,
        error_like: str | None = None,
        handler: str | None = None,
        subscription_id: int | None = None,
    ) -> int:
        """Delete dead letters permanently; returns their number."""
        call = queue_calls.discard(
            queue,
            positions=positions,
            topic=topic,
            error_like=error_like,
            handler=handler,
            subscription_id=subscription_id,
        )
        return await self._run(call)
