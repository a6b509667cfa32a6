"""The event store on Postgres: append under a condition, read by query, subscribe, compete."""
# Generated from eventstore/postgres.py by tools/unasync.py: write there.

from __future__ import annotations

import time
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from functools import partial
from typing import Any, TypeVar

import psycopg
from psycopg import Connection
from psycopg_pool import ConnectionPool

from headwater import calls
from headwater.client.database.connection import PooledConnection, Shell
from headwater.client.eventstore.group_commit import Verdicts, new_event_ids
from headwater.client.eventstore.live_reader import StoreEvents
from headwater.client.eventstore.subscribe import StoreHandler, Subscribing
from headwater.errors import GroupNotFound, InvalidRequest
from headwater.eventstore.conflict_cache import Noted, Question, Window
from headwater.eventstore.decider import SavedState, SnapshotKey
from headwater.eventstore.field_index import Combine, FieldIndex, IndexCondition, Kind, defined
from headwater.eventstore.pipelined_connection import Wire
from headwater.eventstore.query import (
    EVERYTHING,
    Appended,
    Condition,
    Latest,
    NewStoreEvent,
    Query,
    StoreEvent,
    StoreLease,
    StorePage,
    Verdict,
    outcome,
)
from headwater.eventstore.recent_events import MAX_BYTES
from headwater.model import Binding, DeadLetter
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import APPENDS

T = TypeVar("T")
# How long a reader that found nothing goes by the head of the log alone.
QUIET_SECONDS = 0.5


class EventStore(Subscribing):
    """One event store of the log. All who use it in this process share one group commit and one live reader."""

    def __init__(self, log: Shell, topic: str) -> None:
        super().__init__(topic, overlaps=True)
        self._log = log
        self._wire = Wire(log._run, log._pool)
        # What was empty and settled when last looked at: the position read after, its epoch, the head of the log, and
        # until when that needs no second look. After a crash the head may be the same, in another epoch.
        self._quiet: tuple[int, int, int, float] | None = None
        # Only who has the turn of the lane appends, and so uses it.
        self._window = Window()

    def append(
        self,
        events: NewStoreEvent | Sequence[NewStoreEvent],
        condition: Condition | None = None,
        *,
        connection: Connection[Any] | None = None,
        patience_seconds: float = 30.0,
    ) -> Appended:
        """Append events, all of them or none, if the condition holds; AppendConflict says that it does not.

        Events that have ids may be appended again without harm: an append that was done is not done twice.
        A lost database is waited for. With `connection`, they are appended when that transaction commits, and until
        then nobody else can append; a conflict leaves the transaction as it was.
        """
        batch = [events] if isinstance(events, NewStoreEvent) else list(events)
        encoded = calls.encode_append(batch, condition, new_event_ids(len(batch)))
        if connection is not None:
            (verdict,) = self._log._run(calls.append_group(self.topic, [encoded]), connection)
        else:
            verdict = self._patiently(
                partial(self._lane.append, encoded, timeout_seconds=patience_seconds), patience_seconds
            )
        COUNTERS.add(APPENDS, self.topic, "conflict" if verdict.positions is None else "appended")
        return outcome(verdict, condition)

    def read(
        self,
        query: Query = EVERYTHING,
        *,
        after: int = 0,
        before: int | None = None,
        backwards: bool = False,
        batch_size: int = 100,
        max_bytes: int = 16_777_216,
        epoch: int | None = None,
        connection: Connection[Any] | None = None,
    ) -> list[StoreEvent]:
        """A batch of the events that match, after one position and before another; backwards: the newest first.

        With `epoch`, the one that the positions are of, EpochChanged if the log is in another by now.
        """
        page = self.read_page(
            query,
            after=after,
            before=before,
            backwards=backwards,
            batch_size=batch_size,
            max_bytes=max_bytes,
            epoch=epoch,
            connection=connection,
        )
        return list(page.events)

    def read_page(
        self,
        query: Query = EVERYTHING,
        *,
        after: int = 0,
        before: int | None = None,
        backwards: bool = False,
        batch_size: int = 100,
        max_bytes: int = 16_777_216,
        epoch: int | None = None,
        connection: Connection[Any] | None = None,
    ) -> StorePage:
        """The same with the epoch that the positions are of, for the condition of an append and for reading on."""
        call = calls.read_matching(
            self.topic,
            query,
            after=after,
            before=before,
            batch_size=batch_size,
            max_bytes=max_bytes,
            backwards=backwards,
            epoch=epoch,
        )
        return self._log._run(call, connection)

    def count(
        self,
        query: Query = EVERYTHING,
        *,
        after: int = 0,
        before: int | None = None,
        connection: Connection[Any] | None = None,
    ) -> int:
        """How many events match."""
        return self._log._run(calls.count_matching(self.topic, query, after=after, before=before), connection)

    def latest(self, query: Query, *, connection: Connection[Any] | None = None) -> Latest:
        """The latest event of each item of the query, and the position of the latest of all."""
        return self._log._run(calls.latest_matching(self.topic, query), connection)

    def head(self, *, connection: Connection[Any] | None = None) -> int:
        """The position of the last event; 0 if there is none."""
        return self._log._run(calls.event_store_head(self.topic), connection)

    def create_index(
        self,
        name: str,
        fields: Sequence[str] | Mapping[str, Kind],
        *,
        conditions: Sequence[IndexCondition] = (),
        combine: Combine = "and",
        batch_size: int = 1000,
    ) -> None:
        """Let queries on all of these fields, and maybe more, find their events as by a tag. Appends go on meanwhile.

        `fields` are names, or names and kinds: {"amount": "numeric"} has only events whose amount is a number. With
        `conditions` it has only the events of which all hold, or one with combine="or", and is used by queries that
        imply that. Returns when it is filled. If that is interrupted, call it again: it goes on where it was.
        """
        self._log._run(calls.create_field_index(self.topic, defined(name, fields, conditions, combine)))
        while self._log.run(calls.fill_field_index(self.topic, name, batch_size=batch_size)):
            pass

    def drop_index(self, name: str) -> bool:
        """Do without an index from now on; upkeep gives its room back. False if there was none."""
        return self._log._run(calls.drop_field_index(self.topic, name))

    def indexes(self) -> list[FieldIndex]:
        """The indexes on fields."""
        return self._log._run(calls.field_indexes(self.topic))

    def index(self, name: str) -> FieldIndex | None:
        """The index of a name; None: there is none."""
        found = self._log._run(calls.field_indexes(self.topic, name))
        return found[0] if found else None

    def load_snapshot(self, key: SnapshotKey) -> SavedState | None:
        """The state that a decider saved; None: there is none of this version."""
        return self._log._run(calls.load_snapshot(self.topic, key))

    def save_snapshot(self, key: SnapshotKey, saved: SavedState) -> None:
        """Keep a state for the next decision, unless a later one is kept."""
        self._log._run(calls.save_snapshot(self.topic, key, saved))

    def forget_snapshots(self, name: str) -> int:
        """Forget all states of a name, and say how many there were."""
        return self._log._run(calls.forget_snapshots(self.topic, name))

    def dead_letters(
        self, group: str, *, positions: Sequence[int] | None = None, after: int = 0, batch_size: int = 100
    ) -> list[DeadLetter]:
        """The events that a group has given up on, in order; all, or those named."""
        call = calls.dead_letters(group, positions=positions, topic=self.topic, after=after, batch_size=batch_size)
        return self._log._run(call)

    def redrive(
        self, group: str, *, positions: Sequence[int] | None = None, connection: Connection[Any] | None = None
    ) -> int:
        """Give dead letters a fresh set of tries, all or those named; returns how many."""
        return self._log._run(calls.redrive(group, positions=positions, topic=self.topic), connection)

    def _bound_elsewhere(self, group: str) -> InvalidRequest:
        return InvalidRequest(
            f'group "{group}" is not bound to all of "{self.topic}" and to nothing else',
            hint="Compete in a group of another name, which is made then, or change its bindings.",
            detail={"group": group, "topic": self.topic},
        )

    def _send(self, appends: Sequence[calls.EncodedAppend]) -> Verdicts:
        """Those against which nothing can speak go first and together; those in doubt are checked in full, in order."""
        verdicts: dict[int, Verdict] = {}
        pending = list(range(len(appends)))
        # Of the appends that name an epoch, those of the latest go ahead. One of an earlier epoch is in doubt.
        epoch = max((append.epoch for append in appends if append.epoch is not None), default=None)
        questions = [append.question if append.epoch in (None, epoch) else None for append in appends]
        while pending:
            asked = self._window.accept(
                (questions[place], appends[place].marks, appends[place].ids) for place in pending
            )
            chosen = [pending[number] for number, _ in asked]
            accepted = self._append_ahead([appends[place] for place in chosen], [left for _, left in asked], epoch)
            verdicts.update(zip(chosen, accepted, strict=False))
            in_doubt = chosen[len(accepted)] if len(accepted) < len(chosen) else None
            pending = [place for place in pending if place not in verdicts]
            doubtful = 0
            while doubtful < len(pending) and (
                pending[doubtful] == in_doubt or self._window.is_in_doubt(questions[pending[doubtful]])
            ):
                doubtful += 1
            if doubtful:
                checking = [appends[place] for place in pending[:doubtful]]
                checked = self._log._run(calls.append_group(self.topic, checking))
                verdicts.update(zip(pending[:doubtful], checked, strict=True))
                pending = pending[doubtful:]
        return [verdicts[place] for place in range(len(appends))]

    def _append_ahead(
        self, appends: Sequence[calls.EncodedAppend], questions: Sequence[Question], epoch: int | None
    ) -> Verdicts:
        """Append the first of these, up to the one that is in doubt."""
        if not appends:
            return []
        try:
            call = calls.append_ahead(self.topic, appends, questions, self._window.known, epoch)
            tail, positions = self._wire.run(call, behind=self._lane.overlaps)
        except psycopg.errors.UniqueViolation:
            # Some were appended before. Who sends them again is told where they are, and the others go with them.
            checked: Verdicts = self._log._run(calls.append_group(self.topic, appends))
            return checked
        noted = (
            Noted(position, event.event_id, event.marks)
            for append, places in zip(appends, positions, strict=False)
            for position, event in zip(places, append.events, strict=True)
        )
        self._window.note(tail, noted)
        return [Verdict(places, False, None, None) for places in positions]

    def _read_after(self, position: int, batch_size: int, epoch: int) -> StoreEvents:
        quiet, self._quiet = self._quiet, None
        is_known = quiet is not None and quiet[:2] == (position, epoch) and time.monotonic() < quiet[3]
        if quiet is not None and is_known and quiet[2] == self._log._run(calls.head()):
            self._quiet = quiet
            return []
        # While somebody publishes, events may appear without the head moving.
        state = self._log._run(calls.log_state([self.topic]))
        call = calls.read_matching(self.topic, after=position, batch_size=batch_size, epoch=epoch)
        events = list((self._log._run(call)).events)
        if not events and state.settled >= state.drawn and state.epoch == epoch:
            self._quiet = (position, epoch, state.drawn, time.monotonic() + QUIET_SECONDS)
        return events

    def _read_batch(
        self,
        query: Query,
        after: int,
        before: int | None,
        backwards: bool,
        batch_size: int,
        max_bytes: int = MAX_BYTES,
        epoch: int | None = None,
    ) -> StoreEvents:
        return self.read(
            query,
            after=after,
            before=before,
            backwards=backwards,
            batch_size=batch_size,
            max_bytes=max_bytes,
            epoch=epoch,
        )

    def _end(self) -> tuple[int, int]:
        return self._log._run(calls.event_store_end(self.topic))

    def _resume(self, epoch: int | None, position: int) -> tuple[int, int]:
        return self._log._run(calls.resume(epoch, position))

    def _open_cursor(self, name: str, start_after: int) -> int:
        call = calls.open_cursor(name, topics=[self.topic], start_after=start_after)
        opened = self._log._run(call)
        if opened.topics != (self.topic,):
            raise InvalidRequest(
                f'cursor "{name}" is of {", ".join(opened.topics or ("all topics",))}, not of "{self.topic}"',
                hint="Choose another name: its place says nothing of what was read here.",
                detail={"cursor": name, "topic": self.topic},
            )
        return opened.position

    def _find_cursor(self, name: str) -> int | None:
        found = self._log._run(calls.find_cursor(name))
        return None if found is None else found.position

    def _move_cursor(self, name: str, from_position: int, to_position: int, epoch: int | None = None) -> None:
        move = calls.advance_cursor(name, from_position=from_position, to_position=to_position, epoch=epoch)
        self._log._run(move)

    def _has_group(self, group: str) -> bool:
        try:
            self._log._run(calls.find_group(group))
        except GroupNotFound:
            return False
        return True

    def _open_group(self, group: str) -> None:
        self._log._run(calls.create_group(group, topics=[self.topic], start_position=None, if_missing=True))
        bindings: list[Binding] = self._log._run(calls.bindings(group))
        bound = [binding for binding in bindings if binding.to_position is None]
        whole = [b for b in bound if (b.type, b.pattern, b.headers) == (None, None, None)]
        if not whole or any(binding.topic != self.topic for binding in bound):
            raise self._bound_elsewhere(group)

    def _reap(self, group: str) -> None:
        self._log.run(calls.reap(group))

    def _claim(
        self, group: str, query: Query, worker: str, batch_size: int, lease_seconds: float | None
    ) -> StoreLease | None:
        """What a query asks for is not known to a group: the events of the lease are whatever comes."""
        claim = calls.claim(group, worker=worker, batch_size=batch_size, lease_seconds=lease_seconds, relaxed=True)
        lease = self._log.run(claim)
        if lease is None:
            return None
        if any(event.topic != self.topic for event in lease.events):
            # Bound to more since then. The lease runs out, and who the events are for can have them.
            raise self._bound_elsewhere(group)
        events = self._log.run(calls.read_at(self.topic, [event.position for event in lease.events]))
        return StoreLease(group, lease.token, events)

    def _settle(self, lease: StoreLease) -> None:
        self._log.run(calls.settle(lease, {}, rest_done=True, relaxed=True))

    def _do_upkeep(self) -> None:
        self._log.do_upkeep()

    def _patiently(self, act: Callable[[], T], patience_seconds: float | None) -> T:
        return self._log._patiently(act, patience_seconds)

    def _apply(
        self,
        handler: StoreHandler,
        events: Sequence[StoreEvent],
        cursor: str,
        from_position: int,
        to_position: int,
        epoch: int,
    ) -> None:
        with self._log.transaction() as connection:
            move = calls.advance_cursor(cursor, from_position=from_position, to_position=to_position, epoch=epoch)
            self._log._run(move, connection)
            handler(connection, events)


class Stores(Shell):
    """The event stores of the log."""

    def __init__(self, pool: ConnectionPool[PooledConnection]) -> None:
        super().__init__(pool)
        self._stores: dict[str, EventStore] = {}

    def create_store(
        self,
        name: str,
        *,
        max_payload_bytes: int | None = None,
        max_header_bytes: int | None = None,
        if_missing: bool = False,
    ) -> EventStore:
        """Create an event store: a topic whose events are found by query and appended under conditions."""
        call = calls.create_event_store(
            name, max_payload_bytes=max_payload_bytes, max_header_bytes=max_header_bytes, if_missing=if_missing
        )
        self._run(call)
        return self.store(name)

    def store(self, name: str) -> EventStore:
        """An event store that exists. Asks nothing of the database: a wrong name shows at its first use."""
        return self._stores.setdefault(name, EventStore(self, name))
