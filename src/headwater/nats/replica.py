"""Keeps a replica of a table in sync: loads a snapshot, then applies each later change exactly once.

Steps of `run`: resume from the stored state if the stream CDC still has everything after it; otherwise load the last
snapshot in the stream INIT, or request a new one; then follow CDC. Changes that the snapshot already contains are
skipped by their transaction id, and repeated ones by LSN and sequence. If a change does not fit the rows (`Diverged`),
the replica is rebuilt from a new snapshot. Invariant: rows and stream sequence change in one SQLite transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError, NotFoundError

from headwater.database.pg_snapshot import VisibleTransactions, is_visible, lsn_number
from headwater.database.pg_snapshot import parse as parse_snapshot
from headwater.nats import codec, streams, subjects
from headwater.nats.errors import InvalidMessage, NatsUnavailable, ReplicaRefused
from headwater.nats.replica_store import Diverged, ReplicaState, ReplicaStore
from headwater.observability.metrics import logger

_ANSWER_SECONDS: Final = 2.0
_INACTIVE_SECONDS: Final = 300.0
_MAX_BOOTSTRAPS_IN_A_ROW: Final = 3
_META_FIELDS: Final = ("snapshot_id", "after_lsn", "snapshot", "stream_sequence", "batch_count", "row_count")


@dataclass(frozen=True, slots=True)
class ReplicaProgress:
    """Counters of a replica since it was started."""

    snapshots: int = 0
    rows_loaded: int = 0
    changes_applied: int = 0
    changes_skipped: int = 0
    stream_sequence: int = 0
    caught_up: bool = False


class Replica:
    """Keeps `store` equal to its table, from the streams of a NATS server.

    Crash-safe: the rows and the stream sequence change in one SQLite transaction. A gap in the stream, or a change
    that does not fit the rows, leads to a new snapshot.
    """

    def __init__(
        self,
        url: str,
        store: ReplicaStore,
        *,
        batch_size: int = 500,
        idle_seconds: float = 0.5,
        snapshot_seconds: float = 600.0,
        connect_seconds: float = 5.0,
        fresh_snapshot: bool = False,
        on_progress: Callable[[ReplicaProgress], None] | None = None,
    ) -> None:
        self._url: Final = url
        self._store: Final = store
        self._table: Final = store.table
        self._batch_size: Final = batch_size
        self._idle_seconds: Final = idle_seconds
        self._snapshot_seconds: Final = snapshot_seconds
        self._connect_seconds: Final = connect_seconds
        self._fresh_snapshot = fresh_snapshot
        self._on_progress: Final = on_progress
        self._dictionaries: dict[str, bytes] = {}
        self.progress = ReplicaProgress()

    async def run(self, *, stop: asyncio.Event | None = None, once: bool = False) -> ReplicaProgress:
        """Keep in sync until `stop` is set; with `once`, until everything in the stream is applied."""
        stop = stop or asyncio.Event()
        async with streams.connect(self._url, name="headwater replica", connect_seconds=self._connect_seconds) as nc:
            js = nc.jetstream()
            diverged = applied = 0
            while not stop.is_set():
                try:
                    state = await self._resume(js)
                    if state is None:
                        state = await self._bootstrap(nc, js, stop)
                        if state is None:
                            break
                    applied = self.progress.changes_applied
                    await self._follow(js, state, stop, once=once)
                    if once and self.progress.caught_up:
                        break
                except Diverged as error:
                    diverged = 1 if self.progress.changes_applied > applied else diverged + 1
                    if diverged >= _MAX_BOOTSTRAPS_IN_A_ROW:
                        raise ReplicaRefused(
                            f"the replica of {self._table.full_name} diverged after {diverged} snapshots: {error}",
                            hint="Check that only one slot publishes the table.",
                        ) from error
                    logger.warning("the replica diverged; rebuilding it", extra={"error": str(error)})
                    self._fresh_snapshot = True
                    self._store.forget()
                except NotFoundError as error:
                    raise ReplicaRefused(
                        "the streams CDC and INIT do not exist", hint="Start the bridge that publishes the table first."
                    ) from error
                except (nats.errors.Error, APIError, TimeoutError) as error:
                    # The client reconnects by itself; the next round creates a new consumer at the stored sequence.
                    logger.warning("NATS did not answer; retrying", extra={"error": str(error)})
                    if nc.is_closed:
                        raise NatsUnavailable(f"the connection to NATS ended: {error}") from error
                    await _pause(stop, self._idle_seconds)
        return self.progress

    # -- resuming

    async def _resume(self, js: JetStreamContext) -> ReplicaState | None:
        """The stored state, if everything after it is still in the stream; else None."""
        info = await js.stream_info(subjects.CDC_STREAM)
        state = self._store.state()
        if state is None or self._fresh_snapshot:
            return None
        if state.stream_created != str(info.created):
            logger.warning("the stream CDC was recreated; rebuilding the replica")
            return None
        if state.stream_sequence + 1 < info.state.first_seq:
            logger.warning("the stream CDC no longer has changes that are needed; rebuilding the replica")
            return None
        return state

    # -- snapshots

    async def _bootstrap(self, nc: Client, js: JetStreamContext, stop: asyncio.Event) -> ReplicaState | None:
        schema = await streams.get_schema(js, self._table)
        if schema is None or schema.get("dropped"):
            raise ReplicaRefused(
                f"table {self._table.token} is not in the bucket schemas",
                hint="Check that the table is in the publication and that the bridge is running.",
            )
        info = await js.stream_info(subjects.CDC_STREAM)
        found = await self._last_meta(js)
        last_id = None if found is None else found["snapshot_id"]
        if found is None or self._fresh_snapshot or found["stream_sequence"] + 1 < info.state.first_seq:
            found = await self._request(nc, js, last_id, stop)
            if found is None:
                return None
        state = ReplicaState(
            snapshot_id=found["snapshot_id"],
            visible=found["snapshot"],
            after_lsn=lsn_number(found["after_lsn"]),
            stream_created=str(info.created),
            stream_sequence=found["stream_sequence"],
            last_lsn=-1,
            last_sequence=-1,
            consistent_lsn=lsn_number(found["consistent_lsn"]) if found.get("consistent_lsn") else 0,
        )
        parse_snapshot(state.visible)
        try:
            await self._load(js, found, schema, state)
        except _IncompleteSnapshot as error:
            # Chunks are missing: they expired, or another publisher's snapshot is incomplete. Request a new one.
            if self._fresh_snapshot:
                raise Diverged(f"the requested snapshot is incomplete: {error}") from error
            self._fresh_snapshot = True
            logger.warning("the last snapshot is incomplete; requesting a new one", extra={"error": str(error)})
            return await self._bootstrap(nc, js, stop)
        self._fresh_snapshot = False
        # While the snapshot was taken and loaded, the stream may have dropped changes after it.
        if await self._resume(js) is None:
            raise Diverged("the stream CDC no longer has all changes since the snapshot")
        return state

    async def _last_meta(self, js: JetStreamContext) -> dict[str, Any] | None:
        try:
            message = await js.get_last_msg(subjects.INIT_STREAM, subjects.meta_subject(self._table))
        except NotFoundError:
            await js.stream_info(subjects.INIT_STREAM)  # raises if the stream itself is missing
            return None
        document = codec.decode(message.data or b"")
        if not isinstance(document, dict) or any(document.get(name) is None for name in _META_FIELDS):
            return None
        return document

    async def _last_error(self, js: JetStreamContext) -> tuple[int, str] | None:
        """The sequence and text of the last snapshot error of the table."""
        try:
            message = await js.get_last_msg(subjects.INIT_STREAM, subjects.error_subject(self._table))
        except NotFoundError:
            return None
        document = codec.decode(message.data or b"")
        return int(message.seq or 0), str(document.get("error")) if isinstance(document, dict) else ""

    async def _request(
        self, nc: Client, js: JetStreamContext, last_id: str | None, stop: asyncio.Event
    ) -> dict[str, Any] | None:
        """Request a snapshot and wait until it is complete."""
        failed_before = await self._last_error(js)
        try:
            answer = await nc.request(subjects.request_subject(self._table), b"", timeout=_ANSWER_SECONDS)
            _check_accepted(answer.data)
        except nats.errors.NoRespondersError as error:
            raise ReplicaRefused(
                f"no bridge serves snapshots of {self._table.full_name}",
                hint="Start the bridge that publishes the table first.",
            ) from error
        except TimeoutError:
            pass  # ZeBridge does not answer requests
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._snapshot_seconds
        while not stop.is_set():
            found = await self._last_meta(js)
            if found is not None and found["snapshot_id"] != last_id:
                return found
            failure = await self._last_error(js)
            if failure is not None and failure != failed_before:
                raise ReplicaRefused(f"the snapshot of {self._table.full_name} failed: {failure[1]}")
            if loop.time() > deadline:
                raise ReplicaRefused(
                    f"the snapshot of {self._table.full_name} was not complete after {self._snapshot_seconds:g} seconds"
                )
            await _pause(stop, 0.05)
        return None

    async def _load(
        self, js: JetStreamContext, found: Mapping[str, Any], schema: Mapping[str, Any], state: ReplicaState
    ) -> None:
        """Replace the rows of the replica by those of a snapshot."""
        wanted = int(found["batch_count"])
        # A resumed snapshot may have left chunks in the stream that are not part of it.
        chunk_runs = found.get("chunks")
        seen: set[int] = set()
        rows = 0
        with self._store.transaction():
            self._store.rebuild(schema["columns"])
            if wanted:
                reader = await _StreamConsumer.open(
                    js, subjects.INIT_STREAM, subjects.chunks_filter(self._table, str(found["snapshot_id"])), 1
                )
                try:
                    while len(seen) < wanted:
                        messages = await reader.fetch(min(self._batch_size, 16), self._idle_seconds)
                        if not messages and await reader.pending() == 0:
                            raise _IncompleteSnapshot(f"{len(seen)} of {wanted} chunks")
                        for message in messages:
                            document = await self._decode(js, message)
                            number = int(document["chunk"])
                            if number in seen or not _is_listed(number, chunk_runs):
                                continue
                            seen.add(number)
                            rows += self._store.load(document["data"], leniently=state.consistent_lsn > 0)
                finally:
                    await reader.close()
            if rows != int(found["row_count"]):
                raise _IncompleteSnapshot(f"{rows} of {found['row_count']} rows")
            self._store.save(state)
        self._report(snapshots=self.progress.snapshots + 1, rows_loaded=self.progress.rows_loaded + rows)

    async def _decode(self, js: JetStreamContext, message: Msg) -> Any:
        key = (message.headers or {}).get(codec.DICTIONARY)
        if key is not None and key not in self._dictionaries:
            dictionary = await streams.get_dictionary(js, key)
            if dictionary is None:
                raise InvalidMessage(f"the dictionary {key} is not in the bucket {subjects.DICTIONARIES_BUCKET}")
            self._dictionaries[key] = dictionary
        return codec.decode_message(message.data, message.headers, self._dictionaries)

    # -- changes

    async def _follow(self, js: JetStreamContext, state: ReplicaState, stop: asyncio.Event, *, once: bool) -> None:
        visible = parse_snapshot(state.visible)
        reader = await _StreamConsumer.open(
            js, subjects.CDC_STREAM, subjects.changes_filter(self._table), state.stream_sequence + 1
        )
        try:
            while not stop.is_set():
                # Read the last sequence before the fetch: if the fetch returns nothing, everything up to it is applied.
                # None means not read; an empty stream has the last sequence 0.
                last = None if reader.busy else (await js.stream_info(subjects.CDC_STREAM)).state.last_seq
                messages = await reader.fetch(self._batch_size, self._idle_seconds)
                if messages:
                    state = await self._apply(js, messages, state, visible)
                    continue
                if last is not None and await reader.pending() == 0:
                    if last > state.stream_sequence:
                        state = replace(state, stream_sequence=last)
                        with self._store.transaction():
                            self._store.save(state)
                    self._report(stream_sequence=state.stream_sequence, caught_up=True)
                    if once:
                        return
        finally:
            await reader.close()

    async def _apply(
        self, js: JetStreamContext, messages: list[Msg], state: ReplicaState, visible: VisibleTransactions
    ) -> ReplicaState:
        applied = skipped = 0
        with self._store.transaction():
            for message in messages:
                body = await self._decode(js, message)
                for event in body if isinstance(body, list) else [body]:
                    if _is_new(event, state, visible):
                        data = event.get("data") or {}
                        if self._store.unknown_columns(data):
                            await self._learn(js)
                        self._store.apply(event, leniently=int(event["lsn"]) < state.consistent_lsn)
                        applied += 1
                    else:
                        skipped += 1
                    offset = (int(event["lsn"]), int(event["sequence"]))
                    if offset > (state.last_lsn, state.last_sequence):
                        state = replace(state, last_lsn=offset[0], last_sequence=offset[1])
                state = replace(state, stream_sequence=message.metadata.sequence.stream)
            self._store.save(state)
        self._report(
            changes_applied=self.progress.changes_applied + applied,
            changes_skipped=self.progress.changes_skipped + skipped,
            stream_sequence=state.stream_sequence,
            caught_up=False,
        )
        return state

    async def _learn(self, js: JetStreamContext) -> None:
        """Add columns that the table got since."""
        schema = await streams.get_schema(js, self._table)
        if schema is not None:
            self._store.add_columns(schema["columns"])

    def _report(self, **changes: Any) -> None:
        self.progress = replace(self.progress, **changes)
        if self._on_progress is not None:
            self._on_progress(self.progress)


def _is_new(event: Mapping[str, Any], state: ReplicaState, visible: VisibleTransactions) -> bool:
    """Whether a change is neither applied nor in the snapshot."""
    try:
        lsn, sequence, xid = int(event["lsn"]), int(event["sequence"]), int(event["xid"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidMessage(f"a change has no valid lsn, sequence or xid: {str(event)[:200]}") from error
    if (lsn, sequence) <= (state.last_lsn, state.last_sequence):
        return False
    # Everything in the snapshot committed before `after_lsn`. Later changes are not compared with the snapshot, because
    # transaction ids wrap around.
    return lsn >= state.after_lsn or not is_visible(xid, visible)


def _check_accepted(answer: bytes) -> None:
    """Raise ReplicaRefused if the bridge rejected the request. ZeBridge sends an empty answer."""
    document = codec.decode(answer) if answer else None
    if isinstance(document, dict) and document.get("accepted") is False:
        raise ReplicaRefused(str(document.get("error") or "the snapshot was refused"), hint=document.get("hint"))


def _is_listed(number: int, chunk_runs: Any) -> bool:
    return chunk_runs is None or any(first <= number <= last for first, last in chunk_runs)


class _IncompleteSnapshot(Exception):
    """The snapshot is incomplete."""


class _StreamConsumer:
    """A stream consumer that starts at a sequence and detects lost messages."""

    def __init__(self, js: JetStreamContext, subscription: JetStreamContext.PullSubscription) -> None:
        self._js = js
        self._subscription = subscription
        self._delivered = 0
        self.busy = False

    @staticmethod
    async def open(js: JetStreamContext, stream: str, subject: str, start_sequence: int) -> _StreamConsumer:
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=max(1, start_sequence),
            ack_policy=AckPolicy.NONE,
            inactive_threshold=_INACTIVE_SECONDS,
        )
        return _StreamConsumer(js, await js.pull_subscribe(subject, stream=stream, config=config))

    async def fetch(self, count: int, seconds: float) -> list[Msg]:
        """The messages that arrive within the time; possibly none."""
        try:
            messages = await self._subscription.fetch(count, timeout=seconds)
        except TimeoutError:
            messages = []
        for message in messages:
            self._delivered += 1
            if message.metadata.sequence.consumer != self._delivered:
                raise nats.errors.Error("messages were lost in transit")
        self.busy = bool(messages)
        return messages

    async def pending(self) -> int:
        """How many messages were not delivered to the consumer yet."""
        info = await self._subscription.consumer_info()
        if info.delivered is not None and info.delivered.consumer_seq != self._delivered:
            raise nats.errors.Error("messages were lost in transit")
        return info.num_pending or 0

    async def close(self) -> None:
        try:
            info = await self._subscription.consumer_info()
            await self._subscription.unsubscribe()
            await self._js.delete_consumer(info.stream_name, info.name)
        except (nats.errors.Error, APIError, TimeoutError):
            return  # the server removes an inactive consumer after _INACTIVE_SECONDS


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return
