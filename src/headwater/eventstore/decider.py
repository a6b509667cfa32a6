"""Deciders: read events, decide, and append the result; repeat after a conflict. The decision itself is pure.

`steps` yields the next step and is sent its result; `execute` in `decision_loop` carries the steps out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

from headwater.bounded_dict import BoundedDict
from headwater.errors import AppendConflict, EpochChanged, InvalidRequest
from headwater.eventstore.query import Appended, Condition, NewStoreEvent, NoMatchAfter, Query, StoreEvent, StorePage

State = TypeVar("State")
Command = TypeVar("Command")


@dataclass(frozen=True)
class Decider(Generic[State, Command]):
    """How a command becomes events: the query for the events it depends on, the state they form, and the decision.

    The functions are called again after a conflict, so they must have no side effects. `decide` rejects a command by
    raising.
    """

    query: Callable[[Command], Query]
    initial: Callable[[], State]
    evolve: Callable[[State, StoreEvent], State]
    decide: Callable[[State, Command], Sequence[NewStoreEvent]]


@dataclass(frozen=True)
class Decision(Generic[State]):
    """The result of a command: the state it was decided on, the appended events (None: there were none), and the number
    of tries."""

    state: State
    appended: Appended | None
    tries: int


class Snapshots(Generic[State]):
    """States in memory: the next decision on the same query reads only newer events.

    States must not be changed in place: `evolve` returns a new one.
    """

    def __init__(self, *, max_states: int = 1000) -> None:
        if max_states < 1:
            raise InvalidRequest(f"invalid max_states {max_states}: expected at least 1")
        self._states: BoundedDict[str, tuple[State, int, int]] = BoundedDict(max_states)
        self._lock = Lock()

    def load(self, query: Query) -> tuple[State, int, int] | None:
        """A state, the position of its last event, and the epoch of that position."""
        with self._lock:
            found = self._states.get(query.as_json())
            if found is not None:
                self._states.move_to_end(query.as_json())
            return found

    def save(self, query: Query, state: State, position: int, epoch: int = 0) -> None:
        """Save a state, unless a later one of this epoch is saved."""
        key = query.as_json()
        with self._lock:
            known = self._states.get(key)
            if known is None or known[2] != epoch or known[1] < position:
                self._states[key] = (state, position, epoch)


def _as_json(state: Any) -> bytes:
    return json.dumps(state, ensure_ascii=False).encode()


@dataclass(frozen=True)
class SavedSnapshots(Generic[State]):
    """States that are saved in the event store, so that the next decision, in any process, reads only newer events.

    A state is saved when `every` or more events had to be read for it. Increment `version` when `evolve`, `initial` or
    the form of the state changes: states of other versions are not used.
    """

    name: str
    version: int = 1
    every: int = 100
    encode: Callable[[State], bytes] = _as_json
    decode: Callable[[bytes], State] = json.loads

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= 200:
            raise InvalidRequest("invalid snapshot name: expected 1 to 200 characters")
        if self.version < 1 or self.every < 1:
            raise InvalidRequest("version and every of snapshots must be at least 1")

    def key(self, query: Query) -> SnapshotKey:
        """The key of the state of a query."""
        return SnapshotKey(self.name, hashlib.sha256(query.as_json().encode()).hexdigest(), self.version)

    def state(self, saved: SavedState) -> State:
        """Decode a saved state."""
        try:
            return self.decode(saved.state)
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(
                f'cannot decode a snapshot "{self.name}" of version {self.version}: {error}',
                hint="If the form of the state has changed, increment the version of the snapshots.",
            ) from error


class SnapshotKey(NamedTuple):
    """The key of a saved state."""

    name: str
    query_hash: str
    version: int


class SavedState(NamedTuple):
    """A saved state, the position of its last event, and the epoch of that position."""

    position: int
    state: bytes
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class ReadNext:
    """Read matching events after a position; the result is a StorePage, without events at the end.

    EpochChanged is thrown in if the position belongs to another epoch than the log.
    """

    query: Query
    after: int
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class AppendStep:
    """Append these events; the result is an Appended, or an AppendConflict or EpochChanged is thrown in."""

    events: Sequence[NewStoreEvent]
    condition: Condition


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """Load a saved state; the result is a SavedState or None."""

    key: SnapshotKey


@dataclass(frozen=True, slots=True)
class SaveSnapshot:
    """Save a state. A failure is ignored."""

    key: SnapshotKey
    saved: SavedState


Step = ReadNext | AppendStep | LoadSnapshot | SaveSnapshot


def steps(
    decider: Decider[State, Command],
    command: Command,
    *,
    snapshots: Snapshots[State] | SavedSnapshots[State] | None = None,
    max_tries: int = 20,
) -> Generator[Step, Any, Decision[State]]:
    """The steps that execute a command. After a conflict, only newer events are read.

    All events of a state are read in one epoch, and the append names it. In another epoch, events of the state may be
    lost, so the state is built again from the first event, without snapshots.
    """
    if max_tries < 1:
        raise InvalidRequest(f"invalid max_tries {max_tries}: expected at least 1")
    query = decider.query(command)
    known: tuple[State, int, int | None] | None = None
    if isinstance(snapshots, Snapshots):
        known = snapshots.load(query)
    elif snapshots is not None:
        saved: SavedState | None = yield LoadSnapshot(snapshots.key(query))
        known = None if saved is None else (snapshots.state(saved), saved.position, saved.epoch)
    state, position, epoch = known or (decider.initial(), 0, None)
    tries = events_read = 0
    appended: Appended | None = None
    while True:
        tries += 1
        try:
            while True:
                page: StorePage = yield ReadNext(query, position, epoch)
                epoch = page.epoch
                if not page.events:
                    break
                for event in page.events:
                    state = decider.evolve(state, event)
                position = page.events[-1].position
                events_read += len(page.events)
        except EpochChanged:
            if tries >= max_tries:
                raise
            state, position, epoch, events_read = decider.initial(), 0, None, 0
            continue
        if isinstance(snapshots, Snapshots) and position:
            snapshots.save(query, state, position, epoch)
        events = decider.decide(state, command)
        try:
            if events:
                appended = yield AppendStep(events, NoMatchAfter(query, position, epoch))
        except AppendConflict:
            if tries >= max_tries:
                raise
            continue
        except EpochChanged:
            if tries >= max_tries:
                raise
            state, position, epoch, events_read = decider.initial(), 0, None, 0
            continue
        if isinstance(snapshots, SavedSnapshots) and events_read >= snapshots.every:
            yield SaveSnapshot(snapshots.key(query), SavedState(position, snapshots.encode(state), epoch))
        return Decision(state, appended, tries)
