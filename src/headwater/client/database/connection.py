"""Connections, transactions and calls: the base of every part of the blocking API."""
# Generated from database/connection.py by tools/unasync.py: write there.

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import (
    Callable,
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import psycopg
from psycopg import Connection
from psycopg_pool import ConnectionPool, PoolTimeout

from headwater.calls import Call
from headwater.calls import log as log_calls
from headwater.calls import reading as reading_calls
from headwater.database import schema
from headwater.database.caller_connection import CallCursor, CallerConnection, driver_connection
from headwater.database.driver_errors import translate_error
from headwater.database.log_watcher import LogWatcher
from headwater.errors import Deadlocked, HeadwaterError, InvalidRequest, LogUnavailable, StorageFull
from headwater.log.payload_hooks import Dumps
from headwater.log.steps import MaintenanceSchedule
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import ERROR, UNAVAILABLE, WAIT_SECONDS, logger

T = TypeVar("T")
Topics = str | Sequence[str] | None
"""One topic, several, or None for the whole log."""


# How often a running program checks that the schema is not newer than itself.
LOOK_SECONDS = 30.0
# How long a handle retries a lost connection, unless it is made with another patience.
DEFAULT_PATIENCE_SECONDS = 60.0
# Connect timeout of connections outside the pool.
CONNECT_SECONDS = 10
# How often a call is attempted that Postgres aborts because of a deadlock, for example with an upgrade of the tables.
MAX_DEADLOCK_TRIES = 5


class PooledConnection(Connection[Any]):
    """A pooled connection with a reusable cursor for calls outside a transaction.

    A new cursor looks up the adapters of every type again, which costs as much as half a round trip.
    """

    reusable_cursor: CallCursor | None = None


def prepare_session(connection: PooledConnection) -> None:
    """Set what every session needs, whatever the defaults of the server, the database and the role are.

    READ COMMITTED, since the log must be read and written at this isolation level. Also make the server process of this
    connection keep its memory between calls: the C library returns memory to the system as soon as 128 KiB are free,
    and a small transaction allocates and frees as much, which is a sixth of its cost. A process that has freed one
    large block keeps twice as much from then on.
    """
    connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
    connection.execute(
        "select set_config('default_transaction_isolation', 'read committed', false), "
        "octet_length(repeat(repeat('x', 1024), 4096))"
    )


@dataclass(slots=True)
class SharedState:
    """What all handles of a pool share."""

    maintenance: MaintenanceSchedule = field(default_factory=MaintenanceSchedule)
    # Set when a call found the disk full. The readiness check then tests whether it still is.
    is_storage_full: bool = False
    # When to check again that the schema is not newer than this program.
    look_at: float = field(default_factory=lambda: time.monotonic() + LOOK_SECONDS)


class CallRunner:
    """Connections, transactions and calls.

    Runs calls on a pool of connections. The base class of all parts of the API.

    `run` repeats a call while the database is unavailable, for the handle's `patience_seconds`. Methods such as
    publish() attempt their call once, since a repeated call may have been carried out before.
    """

    # Encodes payloads instead of the default encoding.
    _dumps: Dumps | None = None

    def __init__(self, pool: ConnectionPool[PooledConnection]) -> None:
        self._pool = pool
        self.patience_seconds: float | None = DEFAULT_PATIENCE_SECONDS
        self.shared = SharedState()
        # One for all handles of the pool.
        self.watcher = LogWatcher(self._run, self.run_maintenance, self.shared.maintenance)

    def with_patience(self, seconds: float | None) -> Self:
        """A handle of the same connections whose `run` retries a lost connection for this long; None: without end."""
        handle = copy.copy(self)
        handle.patience_seconds = seconds
        return handle

    def close(self) -> None:
        self.watcher.stop()
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def connection(self) -> Iterator[Connection[Any]]:
        """A pooled connection, in autocommit."""
        try:
            with self._pool.connection() as connection:
                yield connection
        except PoolTimeout as timeout:
            raise LogUnavailable("no pooled connection to Postgres became free in time") from timeout

    @contextmanager
    def own_connection(self) -> Iterator[Connection[Any]]:
        """A connection outside the pool, in autocommit, for a loop that keeps it. Losing it means that Postgres may
        have restarted; with a pooled connection, another user may have noticed the loss first."""
        kwargs = self._pool.kwargs
        given: dict[str, Any] = {"connect_timeout": CONNECT_SECONDS, **(kwargs if isinstance(kwargs, dict) else {})}
        try:
            connection = PooledConnection.connect(str(self._pool.conninfo), **given)
        except psycopg.OperationalError as error:
            raise LogUnavailable(f"no connection to Postgres: {error}".strip()) from error
        try:
            yield connection
        finally:
            connection.close()

    @contextmanager
    def transaction(self) -> Iterator[Connection[Any]]:
        """A connection with an open transaction: commits at the end, rolls back on an error."""
        try:
            with self.connection() as connection, connection.transaction():
                yield connection
        except psycopg.OperationalError as error:
            # The caller's statements and the commit can lose the connection, like calls.
            ours = translate_error(error)
            if ours is error:
                raise
            raise ours from error

    def ping(self) -> None:
        """Raise LogUnavailable, with the reason, if Postgres does not accept a new connection."""
        try:
            with Connection.connect(str(self._pool.conninfo), application_name="headwater"):
                pass
        except psycopg.OperationalError as error:
            raise LogUnavailable(f"no connection to Postgres: {error}".strip()) from error

    def _run(self, call: Call[T], connection: CallerConnection | None = None, *, tries: int = MAX_DEADLOCK_TRIES) -> T:
        if time.monotonic() > self.shared.look_at:
            self._refuse_newer(connection)
        if connection is not None:
            with CallCursor(driver_connection(connection)) as cursor:
                return call.decode(self._rows(cursor, call))
        # Inlines self.connection(): its three context managers cost more than encoding the call.
        try:
            own = self._pool.getconn()
        except PoolTimeout as timeout:
            raise LogUnavailable("no pooled connection to Postgres became free in time") from timeout
        rows = None
        try:
            kept, own.reusable_cursor = own.reusable_cursor or CallCursor(own), None
            rows = self._rows(kept, call)
            if len(rows) <= 1:
                # A cursor with a large result is dropped together with it.
                own.reusable_cursor = kept
        except Deadlocked:
            # Outside a transaction, an aborted call has done nothing and can be repeated.
            if tries <= 1:
                raise
        finally:
            self._pool.putconn(own)
        return self._run(call, tries=tries - 1) if rows is None else call.decode(rows)

    def _rows(self, cursor: psycopg.Cursor[Any], call: Call[Any]) -> list[Any]:
        try:
            return rows_of(cursor, call)
        except StorageFull:
            self.shared.is_storage_full = True
            raise

    def _refuse_newer(self, connection: CallerConnection | None) -> None:
        # Other calls need not check meanwhile, and this call must not.
        self.shared.look_at, looked = math.inf, 0.0
        try:
            schema.refuse_newer(self._run(log_calls.installed(), connection))
            looked = time.monotonic() + LOOK_SECONDS
        finally:
            # After an error, the next call checks again.
            self.shared.look_at = looked

    def run(self, call: Call[T], *, connection: CallerConnection | None = None) -> T:
        """Run a call. A lost database connection is retried for up to the handle's `patience_seconds`; with
        `connection`, it is not."""
        if connection is not None:
            return self._run(call, connection)
        return self._patiently(partial(self._run, call), self.patience_seconds)

    def _start(
        self, topics: Topics, after: int | None, since: datetime | None, from_end: bool, epoch: int | None = None
    ) -> tuple[int | None, int | None]:
        """The start position and its epoch, if known."""
        if (after is not None) + (since is not None) + from_end > 1:
            raise InvalidRequest("give only one of after, since and from_end")
        if since is not None:
            return self._run(reading_calls.position_before(as_names(topics), since)), None
        if from_end:
            state = self._run(log_calls.log_state(as_names(topics)))
            return state.stable, state.epoch
        return after, epoch

    def _patiently(self, act: Callable[[], T], patience_seconds: float | None) -> T:
        """Retry `act` while the database is unavailable or reports a deadlock, for up to `patience_seconds`."""
        started = time.monotonic()
        wait = 0.05
        while True:
            try:
                return act()
            except (LogUnavailable, Deadlocked) as error:
                COUNTERS.add(UNAVAILABLE)
                if isinstance(error, StorageFull) and patience_seconds is not None:
                    # The disk stays full until an operator frees space: the caller decides what to do.
                    raise
                if patience_seconds is not None and time.monotonic() - started + wait > patience_seconds:
                    raise
                logger.warning("log unavailable", extra={ERROR: error.message, WAIT_SECONDS: wait})
                time.sleep(wait * random.uniform(0.5, 1.0))
                wait = min(wait * 2, 5.0)

    def run_maintenance(self) -> None:
        """Run this process's share of the log's maintenance when it is due. Consumers do this automatically."""
        call = self.shared.maintenance.next_call(time.monotonic())
        if call is None:
            return
        due = [call]
        try:
            while due:
                answer = self._run(due.pop(0))
                due += self.shared.maintenance.handle_result(answer, time.monotonic(), datetime.now(UTC))
        except (HeadwaterError, psycopg.Error) as error:
            # Any other process can run the maintenance.
            logger.warning("maintenance failed", extra={ERROR: str(error)})


def as_names(topics: Topics) -> list[str] | None:
    if topics is None:
        return None
    return [topics] if isinstance(topics, str) else list(topics)


def rows_of(cursor: psycopg.Cursor[Any], call: Call[Any]) -> list[Any]:
    try:
        cursor.execute(call.sql, call.params)
        return cursor.fetchall()
    except psycopg.Error as error:
        raise translate_error(error) from error
