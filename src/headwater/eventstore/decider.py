"""Decide on events and append what was decided, again if others were faster. The decision itself is pure.

`steps` says what to do next and is sent the outcome; `execute` in `aio` and `client` does it.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

from headwater.errors import AppendConflict, EpochChanged, InvalidRequest
from headwater.eventstore.query import Appended, Condition, NewStoreEvent, NoMatchAfter, Query, StoreEvent, StorePage

State = TypeVar("State")
Command = TypeVar("Command")


@dataclass(frozen=True)
class Decider(Generic[State, Command]):
    """How a command becomes events: what it must know, how that becomes a state, and what follows from it.

    All three are called again after a conflict, so none may do anything. `decide` refuses by raising.
    """

    query: Callable[[Command], Query]
    initial: Callable[[], State]
    evolve: Callable[[State, StoreEvent], State]
    decide: Callable[[State, Command], Sequence[NewStoreEvent]]


@dataclass(frozen=True)
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
        self._states: OrderedDict[str, tuple[State, int, int]] = OrderedDict()
        self._lock = Lock()

    def load(self, query: Query) -> tuple[State, int, int] | None:
        """A state, the position of the last event in it, and the epoch that this is of."""
        with self._lock:
            found = self._states.get(query.as_json())
            if found is not None:
                self._states.move_to_end(query.as_json())
            return found

    def save(self, query: Query, state: State, position: int, epoch: int = 0) -> None:
        """Keep a state, unless a later one of this epoch is kept."""
        key = query.as_json()
        with self._lock:
            known = self._states.get(key)
            if known is None or known[2] != epoch or known[1] < position:
                self._states[key] = (state, position, epoch)
                self._states.move_to_end(key)
            while len(self._states) > self._max_states:
                self._states.popitem(last=False)


def _as_json(state: Any) -> bytes:
    return json.dumps(state, ensure_ascii=False).encode()


@dataclass(frozen=True)
class SavedSnapshots(Generic[State]):
    """States that are kept in the event store, so that whoever decides next, anywhere, reads only what came since.

    A state is saved when `every` or more events had to be read for it. Raise the `version` whenever `evolve`, `initial`
    or the form of the state change: states of another version are not used.
    """

    name: str
    version: int = 1
    every: int = 100
    encode: Callable[[State], bytes] = _as_json
    decode: Callable[[bytes], State] = json.loads

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= 200:
            raise InvalidRequest("the name of snapshots is 1 to 200 characters")
        if self.version < 1 or self.every < 1:
            raise InvalidRequest("snapshots have a version from 1 on, and are saved every 1 event or more")

    def key(self, query: Query) -> SnapshotKey:
        """Under which the state of a query is kept."""
        return SnapshotKey(self.name, hashlib.sha256(query.as_json().encode()).hexdigest(), self.version)

    def state(self, saved: SavedState) -> State:
        """The state that was saved."""
        try:
            return self.decode(saved.state)
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(
                f'a snapshot "{self.name}" of version {self.version} cannot be read: {error}',
                hint="Has the form of the state changed? Then raise the version of the snapshots.",
            ) from error


class SnapshotKey(NamedTuple):
    """Which state of whose."""

    name: str
    query_hash: str
    version: int


class SavedState(NamedTuple):
    """A state as it is kept, the last event that is in it, and the epoch that its position is of."""

    position: int
    state: bytes
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class ReadOn:
    """Read the events that match after a position; the outcome is a StorePage, without events at the end.

    An EpochChanged is thrown in if the position is of another epoch than the log.
    """

    query: Query
    after: int
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class Append:
    """Append these events; the outcome is an Appended, or an AppendConflict or EpochChanged thrown in."""

    events: Sequence[NewStoreEvent]
    condition: Condition


@dataclass(frozen=True, slots=True)
class Load:
    """Look for a saved state; the outcome is a SavedState or None."""

    key: SnapshotKey


@dataclass(frozen=True, slots=True)
class Save:
    """Save a state. It is no loss if that fails."""

    key: SnapshotKey
    saved: SavedState


Step = ReadOn | Append | Load | Save


def steps(
    decider: Decider[State, Command],
    command: Command,
    *,
    snapshots: Snapshots[State] | SavedSnapshots[State] | None = None,
    max_tries: int = 20,
) -> Generator[Step, Any, Decision[State]]:
    """What to do to carry out a command. After a conflict only what came since is read.

    All that a state is made of is read in one epoch, and the append names it. In another epoch, events that the state
    has may be lost, so it begins again with the first event, and with no state that was kept.
    """
    if max_tries < 1:
        raise InvalidRequest("a decision has 1 try or more")
    query = decider.query(command)
    known: tuple[State, int, int | None] | None = None
    if isinstance(snapshots, Snapshots):
        known = snapshots.load(query)
    elif snapshots is not None:
        saved: SavedState | None = yield Load(snapshots.key(query))
        known = None if saved is None else (snapshots.state(saved), saved.position, saved.epoch)
    state, position, epoch = known or (decider.initial(), 0, None)
    tries = events_read = 0
    appended: Appended | None = None
    while True:
        tries += 1
        try:
            while True:
                page: StorePage = yield ReadOn(query, position, epoch)
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
                appended = yield Append(events, NoMatchAfter(query, position, epoch))
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
            yield Save(snapshots.key(query), SavedState(position, snapshots.encode(state), epoch))
        return Decision(state, appended, tries)
