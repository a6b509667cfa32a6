"""The event store on SQLite: a directory with one file for each store, for one process, without a server."""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from headwater.calls.encoding import checked_text
from headwater.calls.store import EncodedAppend, encode_append
from headwater.client.eventstore.group_commit import AppendResults, new_event_ids
from headwater.client.eventstore.live_reader import StoreEvents
from headwater.client.eventstore.subscribe import StoreHandler, StoreSubscriptions
from headwater.errors import (
    EventTooLarge,
    InvalidRequest,
    LogUnavailable,
    StoreBusy,
    TopicExists,
    TopicNotFound,
)
from headwater.eventstore import sqlite_queues as queues
from headwater.eventstore import sqlite_rows as rows
from headwater.eventstore.decider import SavedState, SnapshotKey
from headwater.eventstore.field_index import Combine, FieldIndex, IndexCondition, Kind, define_index
from headwater.eventstore.limits import LEASE_SECONDS
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
    appended_or_raise,
)
from headwater.eventstore.recent_events import MAX_BYTES
from headwater.eventstore.sqlite_queues import NextEvents
from headwater.eventstore.sqlite_rows import BUSY_SECONDS
from headwater.queue.model import DeadLetter

T = TypeVar("T")

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,248}")
MAX_CURSOR_NAME = 200
MAX_PAYLOAD_BYTES = 1_048_576
MAX_METADATA_BYTES = 65_536
MAX_SNAPSHOT_BYTES = 16_777_216
MAX_READERS = 4
# A file has no failover and never reassigns a position.
ONLY_EPOCH = 0
CLEAR_INDEX_TERMS = 10_000


class SqliteEventStore(StoreSubscriptions):
    """An event store in a file. Its methods have the same meaning as those of the event store on Postgres."""

    def __init__(self, path: Path, topic: str, *, create: bool) -> None:
        super().__init__(topic)
        self._path = path
        self._writer = rows.connected(path, create=create)
        self._writing = threading.Lock()
        self._readers: list[sqlite3.Connection] = []
        self._free = threading.Semaphore(MAX_READERS)
        # One competing consumer searches at a time: all would find the same events.
        self._claiming = threading.Lock()
        self._closed = False

    def append(
        self,
        events: NewStoreEvent | Sequence[NewStoreEvent],
        condition: Condition | None = None,
        *,
        patience_seconds: float = 30.0,
    ) -> Appended:
        """Append events atomically if the condition holds; raises AppendConflict if it does not.

        Appending events with ids is idempotent: a repeated append returns the first result.
        """
        encoded = self.encoded(events, condition)
        return appended_or_raise(self._group_commit.append(encoded, timeout_seconds=patience_seconds), condition)

    def encoded(self, events: NewStoreEvent | Sequence[NewStoreEvent], condition: Condition | None) -> EncodedAppend:
        """Validate and encode an append. Raises EventTooLarge above the limits of a file."""
        batch = [events] if isinstance(events, NewStoreEvent) else list(events)
        encoded = encode_append(batch, condition, new_event_ids(len(batch)))
        for event in encoded.events:
            _refuse_too_large("a payload", len(event.payload or b""), MAX_PAYLOAD_BYTES)
            _refuse_too_large("metadata", len((event.metadata or "").encode()), MAX_METADATA_BYTES)
        return encoded

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
    ) -> list[StoreEvent]:
        """A batch of the matching events after one position and before another; backwards: newest first.

        `epoch` is ignored, since a file has one epoch; it exists for compatibility with stores on Postgres.
        """
        if batch_size < 1:
            raise InvalidRequest(f"invalid batch_size {batch_size}: expected at least 1")
        with self._reading() as connection:
            return rows.batch(rows.matching(connection, query, after, before, backwards), batch_size, max_bytes)

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
    ) -> StorePage:
        """Like read, with the epoch, which is always 0."""
        events = self.read(
            query, after=after, before=before, backwards=backwards, batch_size=batch_size, max_bytes=max_bytes
        )
        return StorePage(events, ONLY_EPOCH)

    def count(self, query: Query = EVERYTHING, *, after: int = 0, before: int | None = None) -> int:
        """The number of matching events."""
        with self._reading() as connection:
            return sum(1 for _ in rows.positions(connection, query, after, before, False))

    def latest(self, query: Query) -> Latest:
        """The latest event of each item of the query, and the position of the latest of all."""
        with self._reading() as connection:
            found = tuple(next(rows.matching(connection, Query((item,)), 0, None, True), None) for item in query.items)
        return Latest(found, max((event.position for event in found if event is not None), default=0))

    def head(self) -> int:
        """The position of the last event; 0 if the store is empty."""
        with self._reading() as connection:
            return rows.head(connection)

    def create_index(
        self,
        name: str,
        fields: Sequence[str] | Mapping[str, Kind],
        *,
        conditions: Sequence[IndexCondition] = (),
        combine: Combine = "and",
        batch_size: int = 1000,
    ) -> None:
        """Create an index for queries on all of these fields, and possibly more. Appends continue meanwhile.

        Returns when the index is filled. If it is interrupted, call it again: it continues where it stopped.
        """
        self._declare_index(define_index(name, fields, conditions, combine))
        while self._fill_index(name, batch_size):
            pass

    def drop_index(self, name: str) -> bool:
        """Drop an index and free its space. False if it does not exist."""
        number = self._forget_index(name)
        while number is not None and self._clear_index_terms(number):
            pass
        return number is not None

    def indexes(self) -> list[FieldIndex]:
        """The field indexes."""
        with self._reading() as connection:
            return [index for _, index in rows.field_indexes(connection)]

    def index(self, name: str) -> FieldIndex | None:
        """The index with this name; None if it does not exist."""
        return next((index for index in self.indexes() if index.name == name), None)

    def load_snapshot(self, key: SnapshotKey) -> SavedState | None:
        """The saved state of a decider; None if there is none of this version."""
        with self._reading() as connection:
            found = connection.execute(
                "select position, state from snapshot where name = ? and query_hash = ? and version = ?", key
            ).fetchone()
        return None if found is None else SavedState(*found)

    def save_snapshot(self, key: SnapshotKey, saved: SavedState) -> None:
        """Save a state for later decisions, unless a later one is saved. Deletes states of earlier versions."""
        _refuse_too_large("a snapshot", len(saved.state), MAX_SNAPSHOT_BYTES)
        with self._transaction() as connection:
            connection.execute(
                "insert into snapshot values (?, ?, ?, ?, ?) on conflict do update "
                "set position = excluded.position, state = excluded.state where position < excluded.position",
                (*key, saved.position, saved.state),
            )
            connection.execute("delete from snapshot where name = ? and query_hash = ? and version < ?", key)

    def forget_snapshots(self, name: str) -> int:
        """Delete all saved states of a name; returns their number."""
        with self._transaction() as connection:
            return connection.execute("delete from snapshot where name = ?", (name,)).rowcount

    def dead_letters(
        self, queue: str, *, positions: Sequence[int] | None = None, after: int = 0, batch_size: int = 100
    ) -> list[DeadLetter]:
        """The dead letters of a queue, in order; all, or those at `positions`."""
        with self._reading() as connection:
            return queues.dead_letters(connection, self.topic, queue, positions, after, batch_size)

    def redrive(self, queue: str, *, positions: Sequence[int] | None = None) -> int:
        """Retry dead letters with a new set of attempts, all or those at `positions`; returns their number."""
        with self._transaction() as connection:
            return queues.redrive(connection, queue, positions)

    def close(self) -> None:
        """Close the file. Later calls raise LogUnavailable."""
        with self._writing:
            self._closed = True
            for connection in (self._writer, *self._readers):
                connection.close()
            self._readers.clear()

    def _send(self, appends: Sequence[EncodedAppend]) -> AppendResults:
        with self._transaction() as connection:
            indexes = rows.field_indexes(connection)
            return [rows.append(connection, append, indexes) for append in appends]

    def _declare_index(self, index: FieldIndex) -> None:
        with self._transaction() as connection:
            rows.create_field_index(connection, index)

    def _fill_index(self, name: str, batch_size: int) -> bool:
        with self._transaction() as connection:
            return rows.fill_field_index(connection, name, batch_size)

    def _forget_index(self, name: str) -> int | None:
        with self._transaction() as connection:
            return rows.drop_field_index(connection, name)

    def _clear_index_terms(self, number: int) -> bool:
        with self._transaction() as connection:
            return rows.clear_index_terms(connection, number, CLEAR_INDEX_TERMS)

    def _read_after(self, position: int, batch_size: int, epoch: int) -> StoreEvents:
        return self.read(after=position, batch_size=batch_size)

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
            query, after=after, before=before, backwards=backwards, batch_size=batch_size, max_bytes=max_bytes
        )

    def _end(self) -> tuple[int, int]:
        return self.head(), ONLY_EPOCH

    def _resume(self, epoch: int | None, position: int) -> tuple[int, int]:
        return position, ONLY_EPOCH

    def _open_cursor(self, name: str, start_after: int) -> int:
        if not 1 <= len(checked_text(name, "cursor name")) <= MAX_CURSOR_NAME:
            raise InvalidRequest(f"invalid cursor name: expected 1 to {MAX_CURSOR_NAME} characters")
        if start_after < 0:
            raise InvalidRequest(f"invalid position {start_after}: expected at least 0")
        with self._transaction() as connection:
            connection.execute("insert into cursor values (?, ?) on conflict do nothing", (name, start_after))
            return int(rows.value(connection, "select position from cursor where name = ?", name))

    def _find_cursor(self, name: str) -> int | None:
        with self._reading() as connection:
            found: int | None = rows.value(connection, "select position from cursor where name = ?", name)
            return found

    def _move_cursor(self, name: str, from_position: int, to_position: int, epoch: int | None = None) -> None:
        with self._transaction() as connection:
            rows.move_cursor(connection, name, from_position, to_position)

    def _apply(
        self,
        handler: StoreHandler,
        events: Sequence[StoreEvent],
        cursor: str,
        from_position: int,
        to_position: int,
        epoch: int,
    ) -> None:
        with self._transaction() as connection:
            rows.move_cursor(connection, cursor, from_position, to_position)
            handler(connection, events)

    def _has_queue(self, queue: str) -> bool:
        with self._reading() as connection:
            return queues.has_queue(connection, queue)

    def _open_queue(self, queue: str) -> None:
        if not self._has_queue(queue):
            self._make_queue(queue)

    def _make_queue(self, queue: str) -> None:
        with self._transaction() as connection:
            queues.open_queue(connection, queue)

    def _reap(self, queue: str) -> None:
        if self._has_lapsed(queue):
            self._give_back(queue)

    def _has_lapsed(self, queue: str) -> bool:
        with self._reading() as connection:
            return queues.has_lapsed(connection, queue)

    def _give_back(self, queue: str) -> None:
        with self._transaction() as connection:
            queues.reap(connection, queue)

    def _claim(
        self, queue: str, query: Query, worker: str, batch_size: int, lease_seconds: float | None
    ) -> StoreLease | None:
        # A reader connection searches: finding nothing does not block the writer, and a long search delays no append.
        with self._claiming:
            while (found := self._look(queue, query, batch_size)) is not None:
                lease = self._take(found, worker, lease_seconds)
                if lease is not None:
                    return lease
        return None

    def _look(self, queue: str, query: Query, batch_size: int) -> NextEvents | None:
        with self._reading() as connection:
            return queues.find_next(connection, queue, query, batch_size)

    def _take(self, found: NextEvents, worker: str, lease_seconds: float | None) -> StoreLease | None:
        with self._transaction() as connection:
            return queues.take(connection, found, worker, LEASE_SECONDS if lease_seconds is None else lease_seconds)

    def _settle(self, lease: StoreLease) -> None:
        with self._transaction() as connection:
            queues.settle(connection, lease)

    def _run_maintenance(self) -> None:
        """A file needs no maintenance."""

    def _patiently(self, act: Callable[[], T], patience_seconds: float | None) -> T:
        # A file has no transient failures to retry.
        return act()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """The writer connection, in a transaction that commits at the end."""
        if not self._writing.acquire(timeout=BUSY_SECONDS):
            raise busy()
        try:
            with _translated():
                self._refuse_closed()
                self._writer.execute("begin immediate")
                try:
                    yield self._writer
                    self._writer.execute("commit")
                except BaseException:
                    with suppress(sqlite3.Error):
                        self._writer.execute("rollback")
                    raise
        finally:
            self._writing.release()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """One of a few reader connections, in one snapshot."""
        if not self._free.acquire(timeout=BUSY_SECONDS):
            raise LogUnavailable(f"no reader connection of the event store became free within {BUSY_SECONDS:g} s")
        try:
            self._refuse_closed()
            with _translated():
                connection = self._reader()
                try:
                    connection.execute("begin")
                    yield connection
                finally:
                    with suppress(sqlite3.Error):
                        connection.execute("rollback")
                    if self._closed:
                        connection.close()
                    else:
                        self._readers.append(connection)
        finally:
            self._free.release()

    def _reader(self) -> sqlite3.Connection:
        try:
            return self._readers.pop()
        except IndexError:
            return rows.connected(self._path, create=False)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise LogUnavailable(f'the event store "{self.topic}" is closed')


class SqliteStores:
    """The event stores in one directory, for one process at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        # The operating system releases the lock when the process ends, however it ends.
        self._lock = os.open(directory / ".headwater-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(self._lock, 100).decode(errors="replace").strip()
            os.close(self._lock)
            raise StoreBusy(
                f"{'process ' + holder if holder else 'another process'} has the event stores in {directory} open",
                hint="Use one process, or event stores in Postgres: headwater.open('postgresql://...').",
            ) from None
        os.ftruncate(self._lock, 0)
        os.write(self._lock, f"{os.getpid()}\n".encode())
        self._stores: dict[str, SqliteEventStore] = {}
        self._opening = threading.Lock()

    def create_store(self, name: str, *, if_missing: bool = False) -> SqliteEventStore:
        """Create an event store. Raises TopicExists if it exists, unless `if_missing`."""
        with self._opening:
            path = self._file(name)
            if path.exists():
                if not if_missing:
                    raise TopicExists(f'topic "{name}" already exists', detail={"topic": name})
            else:
                # Created under another name until it is complete: a crash leaves no partial store.
                made = path.with_suffix(".new")
                for rest in (made, *(made.with_name(made.name + end) for end in ("-wal", "-shm", "-journal"))):
                    rest.unlink(missing_ok=True)
                connection = rows.connected(made, create=True)
                connection.execute("pragma wal_checkpoint(truncate)")
                connection.close()
                made.rename(path)
                _sync_directory(self.directory)
            return self._open(name, path)

    def store(self, name: str) -> SqliteEventStore:
        """An existing event store."""
        with self._opening:
            path = self._file(name)
            if not path.exists():
                raise TopicNotFound(
                    f'topic "{name}" does not exist', hint="Create it with create_store().", detail={"topic": name}
                )
            return self._open(name, path)

    def stores(self) -> list[str]:
        """The names of the event stores."""
        return sorted(path.stem for path in self.directory.glob("*.sqlite"))

    def close(self) -> None:
        with self._opening:
            for store in self._stores.values():
                store.close()
            self._stores.clear()
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _file(self, name: str) -> Path:
        if self._lock < 0:
            raise LogUnavailable("the event stores are closed")
        if not NAME.fullmatch(name):
            raise InvalidRequest(f"invalid topic name {name!r:.60}: expected 1 to 249 of A-Z a-z 0-9 . _ -")
        return self.directory / f"{name}.sqlite"

    def _open(self, name: str, path: Path) -> SqliteEventStore:
        if name not in self._stores:
            self._stores[name] = SqliteEventStore(path, name, create=False)
        return self._stores[name]


def busy() -> LogUnavailable:
    """The error after waiting too long for the writer."""
    return LogUnavailable(
        f"the event store was locked by another writer for {BUSY_SECONDS:g} s",
        hint="A handler of `process` must not append to the store whose transaction it runs in: append after it.",
    )


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise LogUnavailable(f"the file of the event store is not available: {error}") from error


def _refuse_too_large(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise EventTooLarge(
            f"{what} of {size} bytes exceeds the limit of {limit} bytes of event stores on SQLite",
            hint="Store large data elsewhere, and a reference to it in the event.",
            detail={"bytes": size, "limit": limit},
        )


def _sync_directory(directory: Path) -> None:
    """Make a new file name in the directory survive a power loss."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
