"""The decision loop: read, decide, append, and repeat after a conflict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from headwater.errors import AppendConflict, EpochChanged, LogUnavailable
from headwater.eventstore.decider import (
    AppendStep,
    Decider,
    Decision,
    LoadSnapshot,
    ReadNext,
    SavedSnapshots,
    SavedState,
    SnapshotKey,
    Snapshots,
    steps,
)
from headwater.eventstore.query import Appended, Condition, NewStoreEvent, Query, StorePage
from headwater.observability.metrics import ERROR, logger

State = TypeVar("State")
Command = TypeVar("Command")


class Store(Protocol):
    """The methods of an event store that a decision needs."""

    async def read_page(self, query: Query, *, after: int, epoch: int | None, batch_size: int) -> StorePage: ...

    async def append(self, events: Sequence[NewStoreEvent], condition: Condition | None) -> Appended: ...

    async def load_snapshot(self, key: SnapshotKey) -> SavedState | None: ...

    async def save_snapshot(self, key: SnapshotKey, saved: SavedState) -> None: ...


async def execute(
    store: Store,
    decider: Decider[State, Command],
    command: Command,
    *,
    snapshots: Snapshots[State] | SavedSnapshots[State] | None = None,
    max_tries: int = 20,
    batch_size: int = 1000,
) -> Decision[State]:
    """Execute a command: read, decide, append. After a conflict the decision is repeated, up to `max_tries` times."""
    loop = steps(decider, command, snapshots=snapshots, max_tries=max_tries)
    outcome: Any = None
    conflict: AppendConflict | EpochChanged | None = None
    while True:
        try:
            step = loop.send(outcome) if conflict is None else loop.throw(conflict)
        except StopIteration as end:
            decision: Decision[State] = end.value
            return decision
        outcome = conflict = None
        try:
            if isinstance(step, ReadNext):
                outcome = await store.read_page(step.query, after=step.after, epoch=step.epoch, batch_size=batch_size)
            elif isinstance(step, AppendStep):
                outcome = await store.append(step.events, step.condition)
            elif isinstance(step, LoadSnapshot):
                outcome = await store.load_snapshot(step.key)
            else:
                await store.save_snapshot(step.key, step.saved)
        except AppendConflict as error:
            conflict = error
        except (EpochChanged, LogUnavailable) as error:
            if isinstance(error, EpochChanged) and isinstance(step, (ReadNext, AppendStep)):
                conflict = error
                continue
            if isinstance(step, (ReadNext, AppendStep, LoadSnapshot)):
                raise
            # The decision stands; the next one only has more events to read.
            logger.warning("snapshot not saved", extra={ERROR: error.message})
