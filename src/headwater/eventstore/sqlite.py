"""The event store on SQLite: a directory with a file for each store, in one process, with no server."""

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

from headwater.calls import EncodedAppend, encode_append
from headwater.calls.encoding import checked_text
from headwater.client.eventstore.group_commit import Verdicts, new_event_ids
from headwater.client.eventstore.live_reader import StoreEvents
from headwater.client.eventstore.subscribe import StoreHandler, Subscribing
from headwater.errors import (
    EventTooLarge,
    InvalidRequest,
    LogUnavailable,
    StoreBusy,
    TopicExists,
    TopicNotFound,
)
from headwater.eventstore import sqlite_groups as groups
from headwater.eventstore import sqlite_rows as rows
from headwater.eventstore.decider import SavedState, SnapshotKey
from headwater.eventstore.field_index import Combine, FieldIndex, IndexCondition, Kind, defined
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
    outcome,
)
from headwater.eventstore.recent_events import MAX_BYTES
from headwater.eventstore.sqlite_groups import Found
from headwater.eventstore.sqlite_rows import BUSY_SECONDS
from headwater.model import DeadLetter

T = TypeVar("T")

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,248}")
MAX_CURSOR_NAME = 200
MAX_PAYLOAD_BYTES = 1_048_576
MAX_METADATA_BYTES = 65_536
MAX_SNAPSHOT_BYTES = 16_777_216
READERS = 4
# A file neither fails over nor issues a position twice.
ONLY_EPOCH = 0
CLEAR_MARKS = 10_000


class SqliteEventStore(Subscribing):
    """One event store in a file. Its methods mean what those of an event store on Postgres mean."""

    def __init__(self, path: Path, topic: str, *, create: bool) -> None:
        super().__init__(topic)
        self._path = path
        self._writer = rows.connected(path, create=create)
        self._writing = threading.Lock()
        self._readers: list[sqlite3.Connection] = []
        self._free = threading.Semaphore(READERS)
        # One competitor looks at a time: all would find the same.
        self._claiming = threading.Lock()
        self._closed = False

    def append(
        self,
        events: NewStoreEvent | Sequence[NewStoreEvent],
        condition: Condition | None = None,
        *,
        patience_seconds: float = 30.0,
    ) -> Appended:
        """Append events, all of them or none, if the condition holds; AppendConflict says that it does not.

        Events that have ids may be appended again without harm: an append that was done is not done twice.
        """
        encoded = self.encoded(events, condition)
        return outcome(self._lane.append(encoded, timeout_seconds=patience_seconds), condition)

    def encoded(self, events: NewStoreEvent | Sequence[NewStoreEvent], condition: Condition | None) -> EncodedAppend:
        """An append, checked and as bytes; refuses what is too large for a file."""
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
        """A batch of the events that match, after one position and before another; backwards: the newest first.

        A file has one epoch: `epoch` is there for programs that use stores on Postgres, too.
        """
        if batch_size < 1:
            raise InvalidRequest("a batch is 1 event or more")
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
        """The same with the epoch, which is always 0."""
        events = self.read(
            query, after=after, before=before, backwards=backwards, batch_size=batch_size, max_bytes=max_bytes
        )
        return StorePage(events, ONLY_EPOCH)

    def count(self, query: Query = EVERYTHING, *, after: int = 0, before: int | None = None) -> int:
        """How many events match."""
        with self._reading() as connection:
            return sum(1 for _ in rows.positions(connection, query, after, before, False))

    def latest(self, query: Query) -> Latest:
        """The latest event of each item of the query, and the position of the latest of all."""
        with self._reading() as connection:
            found = tuple(next(rows.matching(connection, Query((item,)), 0, None, True), None) for item in query.items)
        return Latest(found, max((event.position for event in found if event is not None), default=0))

    def head(self) -> int:
        """The position of the last event; 0 if there is none."""
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
        """Let queries on all of these fields, and maybe more, find their events as by a tag. Appends go on meanwhile.

        Returns when it is filled. If that is interrupted, call it again: it goes on where it was.
        """
        self._declare_index(defined(name, fields, conditions, combine))
        while self._fill_index(name, batch_size):
            pass

    def drop_index(self, name: str) -> bool:
        """Do without an index from now on, and give its room back. False if there was none."""
        number = self._forget_index(name)
        while number is not None and self._clear_marks(number):
            pass
        return number is not None

    def indexes(self) -> list[FieldIndex]:
        """The indexes on fields."""
        with self._reading() as connection:
            return [index for _, index in rows.field_indexes(connection)]

    def index(self, name: str) -> FieldIndex | None:
        """The index of a name; None: there is none."""
        return next((index for index in self.indexes() if index.name == name), None)

    def load_snapshot(self, key: SnapshotKey) -> SavedState | None:
        """The state that a decider saved; None: there is none of this version."""
        with self._reading() as connection:
            found = connection.execute(
                "select position, state from snapshot where name = ? and query_hash = ? and version = ?", key
            ).fetchone()
        return None if found is None else SavedState(*found)

    def save_snapshot(self, key: SnapshotKey, saved: SavedState) -> None:
        """Keep a state for the next decision, unless a later one is kept. Those of earlier versions go."""
        _refuse_too_large("a snapshot", len(saved.state), MAX_SNAPSHOT_BYTES)
        with self._transaction() as connection:
            connection.execute(
                "insert into snapshot values (?, ?, ?, ?, ?) on conflict do update "
                "set position = excluded.position, state = excluded.state where position < excluded.position",
                (*key, saved.position, saved.state),
            )
            connection.execute("delete from snapshot where name = ? and query_hash = ? and version < ?", key)

    def forget_snapshots(self, name: str) -> int:
        """Forget all states of a name, and say how many there were."""
        with self._transaction() as connection:
            return connection.execute("delete from snapshot where name = ?", (name,)).rowcount

    def dead_letters(
        self, group: str, *, positions: Sequence[int] | None = None, after: int = 0, batch_size: int = 100
    ) -> list[DeadLetter]:
        """The events that a group has given up on, in order; all, or those named."""
        with self._reading() as connection:
            return groups.dead_letters(connection, self.topic, group, positions, after, batch_size)

    def redrive(self, group: str, *, positions: Sequence[int] | None = None) -> int:
        """Give dead letters a fresh set of tries, all or those named; returns how many."""
        with self._transaction() as connection:
            return groups.redrive(connection, group, positions)

    def close(self) -> None:
        """Close the file. Whoever still uses the store gets an error."""
        with self._writing:
            self._closed = True
            for connection in (self._writer, *self._readers):
                connection.close()
            self._readers.clear()

    def _send(self, appends: Sequence[EncodedAppend]) -> Verdicts:
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

    def _clear_marks(self, number: int) -> bool:
        with self._transaction() as connection:
            return rows.clear_marks(connection, number, CLEAR_MARKS)

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
            raise InvalidRequest(f"a cursor name is 1 to {MAX_CURSOR_NAME} characters")
        if start_after < 0:
            raise InvalidRequest("a position is not negative")
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

    def _has_group(self, group: str) -> bool:
        with self._reading() as connection:
            return groups.has_group(connection, group)

    def _open_group(self, group: str) -> None:
        if not self._has_group(group):
            self._make_group(group)

    def _make_group(self, group: str) -> None:
        with self._transaction() as connection:
            groups.open_group(connection, group)

    def _reap(self, group: str) -> None:
        if self._has_lapsed(group):
            self._give_back(group)

    def _has_lapsed(self, group: str) -> bool:
        with self._reading() as connection:
            return groups.has_lapsed(connection, group)

    def _give_back(self, group: str) -> None:
        with self._transaction() as connection:
            groups.reap(connection, group)

    def _claim(
        self, group: str, query: Query, worker: str, batch_size: int, lease_seconds: float | None
    ) -> StoreLease | None:
        # Looked for by a reader: whoever finds nothing leaves the one writer alone, and nobody waits for a long look.
        with self._claiming:
            while (found := self._look(group, query, batch_size)) is not None:
                lease = self._take(found, worker, lease_seconds)
                if lease is not None:
                    return lease
        return None

    def _look(self, group: str, query: Query, batch_size: int) -> Found | None:
        with self._reading() as connection:
            return groups.look(connection, group, query, batch_size)

    def _take(self, found: Found, worker: str, lease_seconds: float | None) -> StoreLease | None:
        with self._transaction() as connection:
            return groups.take(connection, found, worker, LEASE_SECONDS if lease_seconds is None else lease_seconds)

    def _settle(self, lease: StoreLease) -> None:
        with self._transaction() as connection:
            groups.settle(connection, lease)

    def _do_upkeep(self) -> None:
        """A file needs none."""

    def _patiently(self, act: Callable[[], T], patience_seconds: float | None) -> T:
        # Nothing is far away here: what fails now fails later.
        return act()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """The one writer, in a transaction that commits at the end."""
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
        """One of a few readers, in one snapshot."""
        if not self._free.acquire(timeout=BUSY_SECONDS):
            raise LogUnavailable(f"no free reader of the event store within {BUSY_SECONDS:g} s")
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
    """The event stores in one directory. One process at a time has them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        # The lock ends with the process, however it ends.
        self._lock = os.open(directory / ".headwater-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(self._lock, 100).decode(errors="replace").strip()
            os.close(self._lock)
            raise StoreBusy(
                f"{'process ' + holder if holder else 'another process'} has the event stores in {directory} open",
                hint="Use them from one process, or keep them in Postgres: headwater.open('postgresql://...').",
            ) from None
        os.ftruncate(self._lock, 0)
        os.write(self._lock, f"{os.getpid()}\n".encode())
        self._stores: dict[str, SqliteEventStore] = {}
        self._opening = threading.Lock()

    def create_store(self, name: str, *, if_missing: bool = False) -> SqliteEventStore:
        """Create an event store. An existing one is TopicExists, unless `if_missing`."""
        with self._opening:
            path = self._file(name)
            if path.exists():
                if not if_missing:
                    raise TopicExists(f'topic "{name}" exists already', detail={"topic": name})
            else:
                # Under another name until it is whole: a crash leaves no half of a store.
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
        """An event store that exists."""
        with self._opening:
            path = self._file(name)
            if not path.exists():
                raise TopicNotFound(
                    f'there is no topic "{name}"', hint="Create it: create_store().", detail={"topic": name}
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
            raise InvalidRequest("a topic name is 1 to 249 of A-Z a-z 0-9 . _ -")
        return self.directory / f"{name}.sqlite"

    def _open(self, name: str, path: Path) -> SqliteEventStore:
        if name not in self._stores:
            self._stores[name] = SqliteEventStore(path, name, create=False)
        return self._stores[name]


def busy() -> LogUnavailable:
    """What is told to whoever has waited for the one writer."""
    return LogUnavailable(
        f"somebody has written to the event store for {BUSY_SECONDS:g} s",
        hint="Does a handler of `process` append to the store whose transaction it is in? Do that after it.",
    )


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise LogUnavailable(f"the event store's file cannot be used now: {error}") from error


def _refuse_too_large(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise EventTooLarge(
            f"{what} of {size} bytes is above the {limit} that an event store on SQLite takes",
            hint="Keep what is large elsewhere, and its place in the event.",
            detail={"bytes": size, "limit": limit},
        )


def _sync_directory(directory: Path) -> None:
    """Make a new name in the directory survive the loss of power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
