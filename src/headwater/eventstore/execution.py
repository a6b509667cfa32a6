"""`execute` for every event store: blocking for a blocking store, awaitable for an async one."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar, cast, overload

from headwater.client.eventstore import decision_loop as blocking
from headwater.eventstore import decision_loop as asynchronous
from headwater.eventstore.decider import Decider, Decision, SavedSnapshots, Snapshots
from headwater.eventstore.subscribe import StoreSubscriptions

State = TypeVar("State")
Command = TypeVar("Command")


@overload
def execute(
    store: blocking.Store,
    decider: Decider[State, Command],
    command: Command,
    *,
    snapshots: Snapshots[State] | SavedSnapshots[State] | None = None,
    max_tries: int = 20,
    batch_size: int = 1000,
) -> Decision[State]: ...


@overload
def execute(
    store: asynchronous.Store,
    decider: Decider[State, Command],
    command: Command,
    *,
    snapshots: Snapshots[State] | SavedSnapshots[State] | None = None,
    max_tries: int = 20,
    batch_size: int = 1000,
) -> Awaitable[Decision[State]]: ...


def execute(
    store: blocking.Store | asynchronous.Store,
    decider: Decider[State, Command],
    command: Command,
    *,
    snapshots: Snapshots[State] | SavedSnapshots[State] | None = None,
    max_tries: int = 20,
    batch_size: int = 1000,
) -> Decision[State] | Awaitable[Decision[State]]:
    """Execute a command: read, decide, append. After a conflict the decision is repeated, up to `max_tries` times."""
    if isinstance(store, StoreSubscriptions):
        awaited = cast("asynchronous.Store", store)
        return asynchronous.execute(
            awaited, decider, command, snapshots=snapshots, max_tries=max_tries, batch_size=batch_size
        )
    waiting = cast("blocking.Store", store)
    return blocking.execute(waiting, decider, command, snapshots=snapshots, max_tries=max_tries, batch_size=batch_size)


execute_async = asynchronous.execute
