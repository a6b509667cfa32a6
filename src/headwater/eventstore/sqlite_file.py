"""The files of the event stores on SQLite: their connections, and the directory that holds them.

A file has one writer connection and a few for reading. A transaction is on the writer, under a lock; a read is in one
snapshot. The directory is locked for one process.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headwater.errors import InvalidRequest, LogUnavailable, StoreBusy, TopicExists, TopicNotFound
from headwater.eventstore import sqlite_rows as rows
from headwater.eventstore.sqlite_rows import BUSY_SECONDS
from headwater.log.model import TOPIC_NAME

READERS = 4


class SqliteFile:
    """The connections to the file of one event store."""

    def __init__(self, path: Path, topic: str) -> None:
        self.topic = topic
        self._path = path
        self._writer = rows.connected(path, create=False)
        self._writing = threading.Lock()
        self._readers: list[sqlite3.Connection] = []
        self._free = threading.Semaphore(READERS)
        self._closed = False

    def close(self) -> None:
        """Close the file. Later uses raise LogUnavailable."""
        with self._writing:
            self._closed = True
            for connection in (self._writer, *self._readers):
                connection.close()
            self._readers.clear()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
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
    def reading(self) -> Iterator[sqlite3.Connection]:
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


class SqliteDirectory:
    """The files in one directory, for one process at a time."""

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
        self._files: dict[str, SqliteFile] = {}
        self._opening = threading.Lock()

    def create(self, name: str, *, if_missing: bool) -> None:
        """Create the file of an event store. Raises TopicExists if it exists, unless `if_missing`."""
        with self._opening:
            path = self._path(name)
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

    def file(self, name: str) -> SqliteFile:
        """The file of an existing event store."""
        with self._opening:
            path = self._path(name)
            if not path.exists():
                raise TopicNotFound(
                    f'topic "{name}" does not exist', hint="Create it with create_store().", detail={"topic": name}
                )
            if name not in self._files:
                self._files[name] = SqliteFile(path, name)
            return self._files[name]

    def names(self) -> list[str]:
        """The names of the event stores."""
        return sorted(path.stem for path in self.directory.glob("*.sqlite"))

    def close(self) -> None:
        with self._opening:
            for file in self._files.values():
                file.close()
            self._files.clear()
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    def _path(self, name: str) -> Path:
        if self._lock < 0:
            raise LogUnavailable("the event stores are closed")
        if not TOPIC_NAME.fullmatch(name):
            raise InvalidRequest(f"invalid topic name {name!r:.60}: expected 1 to 249 of A-Z a-z 0-9 . _ -")
        return self.directory / f"{name}.sqlite"


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


def _sync_directory(directory: Path) -> None:
    """Make a new file name in the directory survive a power loss."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
