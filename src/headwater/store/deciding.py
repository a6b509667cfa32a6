"""Decide on events and append what was decided, again if others were faster. The decision itself is pure.

`steps` says what to do next and is sent the outcome; `execute` does it with threads, `execute_async` with tasks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, TypeVar

from headwater import aio
from headwater.client.store import EventStore
from headwater.errors import AppendConflict, InvalidRequest
from headwater.query import Appended, Condition, NewStoreEvent, NoMatchAfter, Query, StoreEvent
from headwater.store.sqlite import SqliteEventStore

State = TypeVar("State")
Command = TypeVar("Command")


@dataclass(frozen=True, slots=True)
class Decider(Generic[State, Command]):
    """How a command becomes events: what it must know, how that becomes a state, and what follows from it.

    All three are called again after a conflict, so none may do anything. `decide` refuses by raising.
    """

    query: Callable[[Command], Query]
    initial: Callable[[], State]
    evolve: Callable[[State, StoreEvent], State]
    decide: Callable[[State, Command], Sequence[NewStoreEvent]]


@dataclass(frozen=True, slots=True)
class Decision(Generic[State]):
    """What was decided: the state it was decided on, where the events are (None: there were none), and at which try."""

    state: State
    appended: Appended | None
    tries: int


class Snapshots(Generic[State]):
    """States that were reached, kept in memory: the next decision on the same query reads only what came since.

    States must not be changed in place: `evolve` returns a new one.
    """

    def __init__(self, *, max_states: int = 1000) -> None:
        if max_states < 1:
            raise InvalidRequest("snapshots keep 1 state or more")
        self._max_states = max_states
        self._states: OrderedDict[str, tuple[State, int]] = OrderedDict()
        self._lock = Lock()

    def load(self, query: Query) -> tuple[State, int] | None:
        with self._lock:
            found = self._states.get(query.as_json())
            if found is not None:
                self._states.move_to_end(query.as_json())
            return found

    def save(self, query: Query, state: State, position: int) -> None:
        key = query.as_json()
        with self._lock:
            known = self._states.get(key)
            if known is None or known[1] < position:
                self._states[key] = (state, position)
                self._states.move_to_end(key)
            while len(self._states) > self._max_states:
                self._states.popitem(last=False)


@dataclass(frozen=True, slots=True)
class ReadOn:
    """Read the events that match after a position; the outcome is a batch of them, empty at the end."""

    query: Query
    after: int


@dataclass(frozen=True, slots=True)
class Append:
    """Append these events; the outcome is an Appended, or an AppendConflict thrown in."""

    events: Sequence[NewStoreEvent]
    condition: Condition


def steps(
    decider: Decider[State, Command],
    command: Command,
    *,
    snapshots: Snapshots[State] | None = None,
    max_tries: int = 20,
) -> Generator[ReadOn | Append, Any, Decision[State]]:
    """What to do to carry out a command. After a conflict only what came since is read."""
    if max_tries < 1:
        raise InvalidRequest("a decision has 1 try or more")
    query = decider.query(command)
    state, position = (snapshots and snapshots.load(query)) or (decider.initial(), 0)
    tries = 0
    while True:
        tries += 1
        while batch := (yield ReadOn(query, position)):
            for event in batch:
                state = decider.evolve(state, event)
            position = batch[-1].position
        if snapshots is not None and position:
            snapshots.save(query, state, position)
        events = decider.decide(state, command)
        if not events:
            return Decision(state, None, tries)
        try:
            appended: Appended = yield Append(events, NoMatchAfter(query, position))
        except AppendConflict:
            if tries >= max_tries:
                raise
            continue
        return Decision(state, appended, tries)


def execute(
    store: EventStore | SqliteEventStore,
    decider: Decider[State, Command],
    command: Command,
    *,
    snapshots: Snapshots[State] | None = None,
    max_tries: int = 20,
    batch_size: int = 1000,
) -> Decision[State]:
    """Carry out a command: read, decide, append; after a conflict once more, at most `max_tries` times."""
    carried_out = steps(decider, command, snapshots=snapshots, max_tries=max_tries)
    outcome: Any = None
    conflict: AppendConflict | None = None
    while True:
        try:
            step = carried_out.send(outcome) if conflict is None else carried_out.throw(conflict)
        except StopIteration as end:
            decision: Decision[State] = end.value
            return decision
        outcome = conflict = None
        try:
            if isinstance(step, ReadOn):
                outcome = store.read(step.query, after=step.after, batch_size=batch_size)
            else:
                outcome = store.append(step.events, step.condition)
        except AppendConflict as error:
            conflict = error


async def execute_async(
    store: aio.store.EventStore,
    decider: Decider[State, Command],
    command: Command,
    *,
    snapshots: Snapshots[State] | None = None,
    max_tries: int = 20,
    batch_size: int = 1000,
) -> Decision[State]:
    """The same in an event loop."""
    carried_out = steps(decider, command, snapshots=snapshots, max_tries=max_tries)
    outcome: Any = None
    conflict: AppendConflict | None = None
    while True:
        try:
            step = carried_out.send(outcome) if conflict is None else carried_out.throw(conflict)
        except StopIteration as end:
            decision: Decision[State] = end.value
            return decision
        outcome = conflict = None
        try:
            if isinstance(step, ReadOn):
                outcome = await store.read(step.query, after=step.after, batch_size=batch_size)
            else:
                outcome = await store.append(step.events, step.condition)
        except AppendConflict as error:
            conflict = error
