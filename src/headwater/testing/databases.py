"""Databases for tests: one embedded Postgres for a test run, a new database with an empty log for each test.

Copying the template takes some 100 milliseconds, so a thread copies ahead and drops what is no longer used: a test gets
its database at once, unless tests are shorter than a copy.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Final, Self

import psycopg
from psycopg import conninfo, sql

from headwater.database import schema
from headwater.errors import LogUnavailable

SPARE_DATABASES: Final = 2
START_SECONDS: Final = 120.0
# Postgres needs no disk in tests: the data ends with them.
_SETTINGS: Final = {"synchronous_commit": "off", "fsync": "off", "full_page_writes": "off"}


class DatabasePool:
    """New databases with an empty log on a server: `dsn`, or an embedded one that ends with this process."""

    def __init__(self, dsn: str | None = None, *, name: str = "headwater_test") -> None:
        self._dsn = dsn
        self._name = name
        self._stack = ExitStack()
        self._ready: queue.Queue[str | BaseException] = queue.Queue(maxsize=SPARE_DATABASES)
        self._unused: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._prepare, name="headwater test databases", daemon=True)
        self._numbers = 0

    def __enter__(self) -> Self:
        if self._dsn is None:
            from headwater.embedded import Postgres
            from headwater.embedded.temporary import temporary_directory

            server = Postgres(self._stack.enter_context(temporary_directory()) / "postgres", settings=_SETTINGS)
            self._stack.callback(server.stop, mode="immediate")
            server.start()
            self._dsn = server.dsn("postgres")
        self._prefix = f"{self._name}_{threading.get_native_id()}"
        self._template = f"{self._prefix}_template"
        self._create(self._template, "template0")
        with psycopg.connect(self._dsn_of(self._template), autocommit=True) as connection:
            schema.upgrade(connection)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        while self._thread.is_alive():
            self._take()
            self._thread.join(0.05)
        self._take()
        self._drop_unused()
        self._drop(self._template)
        self._stack.close()

    @contextmanager
    def database(self) -> Iterator[str]:
        """A new database with an empty log; yields its DSN. It is dropped later."""
        try:
            found = self._ready.get(timeout=START_SECONDS)
        except queue.Empty:
            raise LogUnavailable(f"no test database was ready within {START_SECONDS:g} seconds") from None
        if isinstance(found, BaseException):
            raise found
        try:
            yield self._dsn_of(found)
        finally:
            self._unused.put(found)

    def _prepare(self) -> None:
        while not self._stopping.is_set():
            try:
                self._numbers += 1
                name = f"{self._prefix}_{self._numbers}"
                self._create(name, self._template)
                self._ready.put(name)
                self._drop_unused()
            except psycopg.Error as error:
                # The test that waits for a database reports it, and the next one tries again.
                self._ready.put(error)

    def _take(self) -> None:
        """Take the databases that no test has used, so that the thread does not wait for room."""
        while not self._ready.empty():
            found = self._ready.get()
            if isinstance(found, str):
                self._unused.put(found)

    def _drop_unused(self) -> None:
        while not self._unused.empty():
            self._drop(self._unused.get())

    def _create(self, name: str, template: str) -> None:
        with self._admin() as admin:
            admin.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))
            admin.execute(sql.SQL("create database {} template {}").format(*map(sql.Identifier, (name, template))))

    def _drop(self, name: str) -> None:
        with self._admin() as admin:
            admin.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))

    def _admin(self) -> psycopg.Connection[tuple[object, ...]]:
        assert self._dsn is not None
        return psycopg.connect(self._dsn, autocommit=True, connect_timeout=30)

    def _dsn_of(self, name: str) -> str:
        assert self._dsn is not None
        return conninfo.make_conninfo(self._dsn, dbname=name)
