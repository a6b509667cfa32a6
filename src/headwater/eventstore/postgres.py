"""The event store on Postgres: append under a condition, read by query, subscribe, compete."""

from __future__ import annotations

from collections.abc import (
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from functools import partial
from typing import TypeVar

import psycopg

from headwater.calls import log as log_calls
from headwater.calls import queues as queue_calls
from headwater.calls import reading as reading_calls
from headwater.calls import store as store_calls
from headwater.database.caller_connection import AsyncCallerConnection
from headwater.database.connection import CallRunner
from headwater.errors import InvalidRequest, QueueNotFound
from headwater.eventstore.conflict_cache import AppendedEvent, ConflictCache, Precheck
from headwater.eventstore.decider import SavedState, SnapshotKey
from headwater.eventstore.field_index import Combine, FieldIndex, IndexCondition, Kind, define_index
from headwater.eventstore.group_commit import AppendResults, new_event_ids
from headwater.eventstore.live_reader import StoreEvents, WaitForGrowth
from headwater.eventstore.pipelined_connection import AsyncPipelinedConnection
from headwater.eventstore.query import (
    EVERYTHING,
    Appended,
    AppendResult,
    Condition,
    Latest,
    NewStoreEvent,
    Query,
    StoreEvent,
    StoreLease,
    StorePage,
    appended_or_raise,
)
from headwater.eventstore.subscribe import StoreHandler, StoreSubscriptions
from headwater.log.payload_hooks import dumped
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import APPENDS
from headwater.queue.model import Binding, DeadLetter

T = TypeVar("T")


class EventStore(StoreSubscriptions):
    """An event store of the log. All its users in this process share one group commit and one live reader."""

    def __init__(self, log: CallRunner, topic: str) -> None:
        self._log = log
        super().__init__(topic, overlaps=True)
        self._pipelined = AsyncPipelinedConnection(log._run, log._pool)
        # Used only by the leader of the group commit.
        self._conflicts = ConflictCache()

    async def append(
        self,
        events: NewStoreEvent | Sequence[NewStoreEvent],
        condition: Condition | None = None,
        *,
        connection: AsyncCallerConnection | None = None,
        patience_seconds: float = 30.0,
    ) -> Appended:
        """Append events atomically if the condition holds; raises AppendConflict if it does not.

        Appending events with ids is idempotent: a repeated append returns the first result. A lost database connection
        is retried for up to `patience_seconds`. With `connection`, the events are appended when that transaction
        commits, and other appends wait until then; a conflict does not abort the transaction.
        """
        batch = [events] if isinstance(events, NewStoreEvent) else list(events)
        if (dumps := self._log._dumps) is not None:
            batch = [
                event._replace(data=data, content_type=content_type)
                for event in batch
                for data, content_type in [dumped(dumps, event.data, event.content_type)]
            ]
        encoded = store_calls.encode_append(batch, condition, new_event_ids(len(batch)))
        if connection is not None:
            (result,) = await self._log._run(store_calls.append_group(self.topic, [encoded]), connection)
        else:
            result = await self._patiently(
                partial(self._group_commit.append, encoded, timeout_seconds=patience_seconds), patience_seconds
            )
        COUNTERS.add(APPENDS, self.topic, "conflict" if result.positions is None else "appended")
        return appended_or_raise(result, condition)

    async def read(
        self,
        query: Query = EVERYTHING,
        *,
        after: int = 0,
        before: int | None = None,
        backwards: bool = False,
        batch_size: int = 100,
        max_bytes: int = 16_777_216,
        epoch: int | None = None,
        connection: AsyncCallerConnection | None = None,
    ) -> list[StoreEvent]:
        """A batch of the matching events after one position and before another; backwards: newest first.

        With `epoch`, the epoch of the positions, raises EpochChanged if the log is in another epoch now.
        """
        page = await self.read_page(
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

    async def read_page(
        self,
        query: Query = EVERYTHING,
        *,
        after: int = 0,
        before: int | None = None,
        backwards: bool = False,
        batch_size: int = 100,
        max_bytes: int = 16_777_216,
        epoch: int | None = None,
        connection: AsyncCallerConnection | None = None,
    ) -> StorePage:
        """Like read, with the epoch of the positions, for an append condition or for reading on."""
        call = store_calls.read_matching(
            self.topic,
            query,
            after=after,
            before=before,
            batch_size=batch_size,
            max_bytes=max_bytes,
            backwards=backwards,
            epoch=epoch,
        )
        return await self._log._run(call, connection)

    async def count(
        self,
        query: Query = EVERYTHING,
        *,
        after: int = 0,
        before: int | None = None,
        connection: AsyncCallerConnection | None = None,
    ) -> int:
        """The number of matching events."""
        return await self._log._run(
            store_calls.count_matching(self.topic, query, after=after, before=before), connection
        )

    async def latest(self, query: Query, *, connection: AsyncCallerConnection | None = None) -> Latest:
        """The latest event of each item of the query, and the position of the latest of all."""
        return await self._log._run(store_calls.latest_matching(self.topic, query), connection)

    async def head(self, *, connection: AsyncCallerConnection | None = None) -> int:
        """The position of the last event; 0 if the store is empty."""
        return await self._log._run(store_calls.event_store_head(self.topic), connection)

    async def create_index(
        self,
        name: str,
        fields: Sequence[str] | Mapping[str, Kind],
        *,
        conditions: Sequence[IndexCondition] = (),
        combine: Combine = "and",
        batch_size: int = 1000,
    ) -> None:
        """Create an index for queries on all of these fields, and possibly more. Appends continue meanwhile.

        `fields` are names, or names and kinds: {"amount": "numeric"} indexes only events whose amount is a number. With
        `conditions` the index contains only the events for which all conditions hold, or one of them with combine="or",
        and is used by queries that imply them. Returns when the index is filled. If it is interrupted, call it again:
        it continues where it stopped.
        """
        await self._log._run(
            store_calls.create_field_index(self.topic, define_index(name, fields, conditions, combine))
        )
        while await self._log.run(store_calls.fill_field_index(self.topic, name, batch_size=batch_size)):
            pass

    async def drop_index(self, name: str) -> bool:
        """Drop an index; maintenance frees its space. False if it does not exist."""
        return await self._log._run(store_calls.drop_field_index(self.topic, name))

    async def indexes(self) -> list[FieldIndex]:
        """The field indexes."""
        return await self._log._run(store_calls.field_indexes(self.topic))

    async def index(self, name: str) -> FieldIndex | None:
        """The index with this name; None if it does not exist."""
        found = await self._log._run(store_calls.field_indexes(self.topic, name))
        return found[0] if found else None

    async def load_snapshot(self, key: SnapshotKey) -> SavedState | None:
        """The saved state of a decider; None if there is none of this version."""
        return await self._log._run(store_calls.load_snapshot(self.topic, key))

    async def save_snapshot(self, key: SnapshotKey, saved: SavedState) -> None:
        """Save a state for later decisions, unless a later one is saved."""
        await self._log._run(store_calls.save_snapshot(self.topic, key, saved))

    async def forget_snapshots(self, name: str) -> int:
        """Delete all saved states of a name; returns their number."""
        return await self._log._run(store_calls.forget_snapshots(self.topic, name))

    async def dead_letters(
        self, queue: str, *, positions: Sequence[int] | None = None, after: int = 0, batch_size: int = 100
    ) -> list[DeadLetter]:
        """The dead letters of a queue, in order; all, or those at `positions`."""
        call = queue_calls.dead_letters(
            queue, positions=positions, topic=self.topic, after=after, batch_size=batch_size
        )
        return await self._log._run(call)

    async def redrive(
        self, queue: str, *, positions: Sequence[int] | None = None, connection: AsyncCallerConnection | None = None
    ) -> int:
        """Retry dead letters with a new set of attempts, all or those at `positions`; returns their number."""
        return await self._log._run(queue_calls.redrive(queue, positions=positions, topic=self.topic), connection)

    def _bound_elsewhere(self, queue: str) -> InvalidRequest:
        return InvalidRequest(
            f'queue "{queue}" is not bound to exactly the whole topic "{self.topic}"',
            hint="Use another queue name, which creates a new queue, or change the bindings.",
            detail={"queue": queue, "topic": self.topic},
        )

    async def _send(self, appends: Sequence[store_calls.EncodedAppend]) -> AppendResults:
        """Append a group. Appends that the pre-check accepts go first and together; the others are checked in full, in
        order."""
        results: dict[int, AppendResult] = {}
        pending = list(range(len(appends)))
        # Of the appends with an epoch, those of the latest one may use the fast path. Earlier epochs need a full check.
        epoch = max((append.epoch for append in appends if append.epoch is not None), default=None)
        prechecks = [append.precheck if append.epoch in (None, epoch) else None for append in appends]
        while pending:
            asked = self._conflicts.accept(
                (prechecks[number], appends[number].index_terms, appends[number].ids) for number in pending
            )
            chosen = [pending[index] for index, _ in asked]
            accepted = await self._append_ahead(
                [appends[number] for number in chosen], [remaining for _, remaining in asked], epoch
            )
            results.update(zip(chosen, accepted, strict=False))
            rejected = chosen[len(accepted)] if len(accepted) < len(chosen) else None
            pending = [number for number in pending if number not in results]
            to_check = 0
            while to_check < len(pending) and (
                pending[to_check] == rejected or self._conflicts.needs_full_check(prechecks[pending[to_check]])
            ):
                to_check += 1
            if to_check:
                checking = [appends[number] for number in pending[:to_check]]
                checked = await self._log._run(store_calls.append_group(self.topic, checking))
                results.update(zip(pending[:to_check], checked, strict=True))
                pending = pending[to_check:]
        return [results[number] for number in range(len(appends))]

    async def _append_ahead(
        self, appends: Sequence[store_calls.EncodedAppend], prechecks: Sequence[Precheck], epoch: int | None
    ) -> AppendResults:
        """Append the first of these, up to the first one that the database rejects without a full check."""
        if not appends:
            return []
        try:
            call = store_calls.append_ahead(self.topic, appends, prechecks, self._conflicts.known, epoch)
            tail, positions = await self._pipelined.run(call, behind=self._group_commit.overlaps)
        except psycopg.errors.UniqueViolation:
            # Some were appended by an earlier attempt. The full check returns their positions, and appends the others.
            checked: AppendResults = await self._log._run(store_calls.append_group(self.topic, appends))
            return checked
        recorded = (
            AppendedEvent(position, event.event_id, event.index_terms)
            for append, positions_of in zip(appends, positions, strict=False)
            for position, event in zip(positions_of, append.events, strict=True)
        )
        self._conflicts.record(tail, recorded)
        return [AppendResult(positions_of, False, None, None) for positions_of in positions]

    async def _read_after(self, position: int, batch_size: int, epoch: int) -> StoreEvents:
        # The epoch is checked by the read.
        call = store_calls.read_matching(self.topic, after=position, batch_size=batch_size, epoch=epoch)
        return list((await self._log._run(call)).events)

    def _growth(self, queue: str | None) -> WaitForGrowth:
        return self._log.watcher.waiter(queue=queue, topics=[self.topic]).wait

    async def _end(self) -> tuple[int, int]:
        return await self._log._run(store_calls.event_store_end(self.topic))

    async def resumed_position(self, epoch: int | None, position: int) -> tuple[int, int]:
        return await self._log._run(log_calls.resume(epoch, position))

    async def open_cursor(self, name: str, start_after: int) -> int:
        call = reading_calls.open_cursor(name, topics=[self.topic], start_after=start_after)
        opened = await self._log._run(call)
        if opened.topics != (self.topic,):
            raise InvalidRequest(
                f'cursor "{name}" belongs to {", ".join(opened.topics or ("all topics",))}, not to "{self.topic}"',
                hint="Choose another cursor name.",
                detail={"cursor": name, "topic": self.topic},
            )
        return opened.position

    async def _find_cursor(self, name: str) -> int | None:
        found = await self._log._run(reading_calls.find_cursor(name))
        return None if found is None else found.position

    async def move_cursor(self, name: str, from_position: int, to_position: int, epoch: int | None = None) -> None:
        move = reading_calls.advance_cursor(name, from_position=from_position, to_position=to_position, epoch=epoch)
        await self._log._run(move)

    async def has_queue(self, queue: str) -> bool:
        try:
            await self._log._run(queue_calls.find_queue(queue))
        except QueueNotFound:
            return False
        return True

    async def _open_queue(self, queue: str) -> None:
        await self._log._run(queue_calls.create_queue(queue, topics=[self.topic], start_position=None, if_missing=True))
        bindings: list[Binding] = await self._log._run(queue_calls.bindings(queue))
        bound = [binding for binding in bindings if binding.to_position is None]
        whole = [b for b in bound if (b.type, b.pattern, b.headers) == (None, None, None)]
        if not whole or any(binding.topic != self.topic for binding in bound):
            raise self._bound_elsewhere(queue)

    async def _reap(self, queue: str) -> None:
        await self._log.run(queue_calls.reap(queue))

    async def _claim(
        self, queue: str, query: Query, worker: str, batch_size: int, lease_seconds: float | None
    ) -> StoreLease | None:
        """A queue does not know the query: the lease may contain any events of the store."""
        claim = queue_calls.claim(
            queue, worker=worker, batch_size=batch_size, lease_seconds=lease_seconds, relaxed=True
        )
        lease = await self._log.run(claim)
        if lease is None:
            return None
        if any(event.topic != self.topic for event in lease.events):
            # The queue was bound to more topics meanwhile. The lease expires, and the workers of those topics get the
            # events.
            raise self._bound_elsewhere(queue)
        events = await self._log.run(store_calls.read_at(self.topic, [event.position for event in lease.events]))
        return StoreLease(queue, lease.token, events)

    async def _settle(self, lease: StoreLease) -> None:
        await self._log.run(queue_calls.settle(lease, {}, rest_done=True, relaxed=True))

    async def _run_maintenance(self) -> None:
        await self._log.run_maintenance()

    async def _patiently(self, act: Callable[[], Awaitable[T]], patience_seconds: float | None) -> T:
        return await self._log._patiently(act, patience_seconds)

    async def _apply(
        self,
        handler: StoreHandler,
        events: Sequence[StoreEvent],
        cursor: str,
        from_position: int,
        to_position: int,
        epoch: int,
    ) -> None:
        async with self._log.transaction() as connection:
            move = reading_calls.advance_cursor(
                cursor, from_position=from_position, to_position=to_position, epoch=epoch
            )
            await self._log._run(move, connection)
            await handler(connection, events)
