"""Groups: what they are bound to, and the life of events in them."""

from __future__ import annotations

from collections.abc import (
    Mapping,
    Sequence,
)
from datetime import datetime, timedelta
from typing import Any

from psycopg import AsyncConnection

from headwater import calls
from headwater.database.connection import Shell, Topics, as_names
from headwater.errors import InvalidRequest
from headwater.model import (
    Binding,
    ClaimedEvent,
    Dead,
    DeadLetter,
    Delivery,
    Group,
    GroupOverview,
    Lease,
    Outcome,
    Retry,
    Snooze,
)


class Groups(Shell):
    """Queue groups: claim, settle, retry, redrive."""

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
            topics=as_names(topics),
            start_position=(await self._start(topics, after, since, from_end))[0],
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

    async def groups(self, names: Sequence[str] | None = None) -> list[GroupOverview]:
        """Every group with how far it has come; or those of these names that exist."""
        return await self._run(calls.groups(names))

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
        handler: str | None = None,
        subscription_id: int | None = None,
        after: int = 0,
        batch_size: int = 100,
    ) -> list[DeadLetter]:
        """The events that a group has given up on; all, or those named, of a topic, or with an error like this; of a
        group that reads for subscriptions, those of a handler or of a subscription.

        Letters of one event come together, so there may be a few more than `batch_size`.
        """
        call = calls.dead_letters(
            group,
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
        group: str,
        *,
        positions: Sequence[int] | None = None,
        topic: str | None = None,
        error_like: str | None = None,
        handler: str | None = None,
        subscription_id: int | None = None,
    ) -> int:
        """Give dead letters a fresh set of tries; returns how many. Those of subscribers go to the handler that gave
        up."""
        call = calls.redrive(
            group,
            positions=positions,
            topic=topic,
            error_like=error_like,
            handler=handler,
            subscription_id=subscription_id,
        )
        return await self._run(call)

    async def discard(
        self,
        group: str,
        *,
        positions: Sequence[int] | None = None,
        topic: str | None = None,
        error_like: str | None = None,
        handler: str | None = None,
        subscription_id: int | None = None,
    ) -> int:
        """Drop dead letters for good; returns how many."""
        call = calls.discard(
            group,
            positions=positions,
            topic=topic,
            error_like=error_like,
            handler=handler,
            subscription_id=subscription_id,
        )
        return await self._run(call)
