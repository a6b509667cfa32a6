"""Carrying out decisions: read, decide, append; after a conflict once more."""
# Generated from eventstore/decision_loop.py by tools/unasync.py: write there.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from headwater.errors import AppendConflict, EpochChanged, LogUnavailable
from headwater.eventstore.decider import (
    Append,
    Decider,
    Decision,
    Load,
    ReadOn,
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
    """What of an event store a decision needs."""

    def read_page(self, query: Query, *, after: int, epoch: int | None, batch_size: int) -> StorePage: ...

    def append(self, events: Sequence[NewStoreEvent], condition: Condition | None) -> Appended: ...

    def load_snapshot(self, key: SnapshotKey) -> SavedState | None: ...

    def save_snapshot(self, key: SnapshotKey, saved: SavedState) -> None: ...


def execute(
    store: Store,
    decider: Decider[State, Command],
    command: Command,
    *,
    snapshots: Snapshots[State] | SavedSnapshots[State] | None = None,
    max_tries: int = 20,
    batch_size: int = 1000,
) -> Decision[State]:
    """Carry out a command: read, decide, append; after a conflict once more, at most `max_tries` times."""
    carried_out = steps(decider, command, snapshots=snapshots, max_tries=max_tries)
    outcome: Any = None
    conflict: AppendConflict | EpochChanged | None = None
    while True:
        try:
            step = carried_out.send(outcome) if conflict is None else carried_out.throw(conflict)
        except StopIteration as end:
            decision: Decision[State] = end.value
            return decision
        outcome = conflict = None
        try:
            if isinstance(step, ReadOn):
                outcome = store.read_page(step.query, after=step.after, epoch=step.epoch, batch_size=batch_size)
            elif isinstance(step, Append):
                outcome = store.append(step.events, step.condition)
            elif isinstance(step, Load):
                outcome = store.load_snapshot(step.key)
            else:
                store.save_snapshot(step.key, step.saved)
        except AppendConflict as error:
            conflict = error
        except (EpochChanged, LogUnavailable) as error:
            if isinstance(error, EpochChanged) and isinstance(step, (ReadOn, Append)):
                conflict = error
                continue
            if isinstance(step, (ReadOn, Append, Load)):
                raise
            # What was decided stands; only the next one has more to read.
            logger.warning("snapshot not saved", extra={ERROR: error.message})
