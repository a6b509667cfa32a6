"""Connections, transactions, and the carrying out of calls: what every part of the blocking shell stands on."""
# Generated from database/connection.py by tools/unasync.py: write there.

from __future__ import annotations

import math
import random
import time
from collections.abc import (
    Callable,
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import psycopg
from psycopg import Connection
from psycopg_pool import ConnectionPool, PoolTimeout

from headwater import calls
from headwater.calls import Call
from headwater.database import schema
from headwater.errors import Deadlocked, HeadwaterError, InvalidRequest, LogUnavailable, StorageFull, translated
from headwater.log.steps import UpkeepTimes
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import ERROR, UNAVAILABLE, WAIT_SECONDS, logger

T = TypeVar("T")
Topics = str | Sequence[str] | None
"""One topic, several, or None for the whole log."""


# How often a program that runs looks whether an upgrade has left it behind.
LOOK_SECONDS = 30.0
# How long a connection outside the pool may take to be made.
CONNECT_SECONDS = 10
# How often a call is made that Postgres ends to untangle it from another, as an upgrade of the tables may be.
DEADLOCKED_TRIES = 5


class PooledConnection(Connection[Any]):
    """A connection of the pool, with a cursor for calls that have it to themselves.

    A new cursor finds out anew how each type is sent and read, which costs as much as half a round trip.
    """

    kept_cursor: psycopg.Cursor[Any] | None = None


def prepare_session(connection: PooledConnection) -> None:
    """Set what every session of ours needs, whatever the server, the database and the role have as defaults.

    READ COMMITTED, since the log is read and written at no other isolation level. And the server's process for this
    connection keeps its memory from one call to the next.

    The C library gives it back to the system as soon as 128 KiB are free, and a small transaction takes and frees as
    much: a sixth of its cost. A process that has let go of a large piece once keeps twice as much from then on.
    """
    connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
    connection.execute(
        "select set_config('default_transaction_isolation', 'read committed', false), "
        "octet_length(repeat(repeat('x', 1024), 4096))"
    )


class Shell:
    """A pool of connections to the log, and how calls go through it."""

    def __init__(self, pool: ConnectionPool[PooledConnection]) -> None:
        self._pool = pool
        self._upkeep = UpkeepTimes()
        # Set when a call found the disk full; readiness looks then whether it still is.
        self.is_storage_full = False
        self._look_at = time.monotonic() + LOOK_SECONDS

    def close(self) -> None:
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def connection(self) -> Iterator[Connection[Any]]:
        """A connection of the pool, in autocommit."""
        try:
            with self._pool.connection() as connection:
                yield connection
        except PoolTimeout as timeout:
            raise LogUnavailable("no free connection to Postgres in time") from timeout

    @contextmanager
    def own_connection(self) -> Iterator[Connection[Any]]:
        """A connection outside the pool, in autocommit, for a loop that keeps it. That it was lost tells that Postgres
        may have been, which a connection of the pool does not: another may have noticed it."""
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
            # The caller's own statements and the commit can lose the connection as calls can.
            ours = translated(error)
            if ours is error:
                raise
            raise ours from error

    def knock(self) -> None:
        """Raise LogUnavailable, with the reason, if Postgres takes no new connection."""
        try:
            with Connection.connect(str(self._pool.conninfo), application_name="headwater"):
                pass
        except psycopg.OperationalError as error:
            raise LogUnavailable(f"no connection to Postgres: {error}".strip()) from error

    def _run(self, call: Call[T], connection: Connection[Any] | None = None, *, tries: int = DEADLOCKED_TRIES) -> T:
        if time.monotonic() > self._look_at:
            self._refuse_newer(connection)
        if connection is not None:
            with connection.cursor(binary=True) as cursor:
                return call.decode(self._rows(cursor, call))
        # What self.connection() does, without its three context managers: they cost more than the call's packing.
        try:
            own = self._pool.getconn()
        except PoolTimeout as timeout:
            raise LogUnavailable("no free connection to Postgres in time") from timeout
        rows = None
        try:
            kept, own.kept_cursor = own.kept_cursor or own.cursor(binary=True), None
            rows = self._rows(kept, call)
            if len(rows) <= 1:
                # One that holds a large answer is let go with it.
                own.kept_cursor = kept
        except Deadlocked:
            # A call by itself is a transaction by itself: nothing of it was done.
            if tries <= 1:
                raise
        finally:
            self._pool.putconn(own)
        return self._run(call, tries=tries - 1) if rows is None else call.decode(rows)

    def _rows(self, cursor: psycopg.Cursor[Any], call: Call[Any]) -> list[Any]:
        try:
            return rows_of(cursor, call)
        except StorageFull:
            self.is_storage_full = True
            raise

    def _refuse_newer(self, connection: Connection[Any] | None) -> None:
        # Nobody else needs to look meanwhile, and this call must not.
        self._look_at, looked = math.inf, 0.0
        try:
            schema.refuse_newer(self._run(calls.installed(), connection))
            looked = time.monotonic() + LOOK_SECONDS
        finally:
            # Whoever catches the error and goes on hears it again.
            self._look_at = looked

    def run(
        self,
        call: Call[T],
        *,
        patience_seconds: float | None = 60.0,
        connection: Connection[Any] | None = None,
    ) -> T:
        """Carry out a call, waiting for a lost database up to `patience_seconds`; with `connection`, for nothing."""
        if connection is not None:
            return self._run(call, connection)
        return self._patiently(partial(self._run, call), patience_seconds)

    def _start(
        self, topics: Topics, after: int | None, since: datetime | None, from_end: bool, epoch: int | None = None
    ) -> tuple[int | None, int | None]:
        """Where to start, and of which epoch that position is, if that is known."""
        if (after is not None) + (since is not None) + from_end > 1:
            raise InvalidRequest("say where to start once: after, since or from_end")
        if since is not None:
            return self._run(calls.position_before(as_names(topics), since)), None
        if from_end:
            state = self._run(calls.log_state(as_names(topics)))
            return state.settled, state.epoch
        return after, epoch

    def _patiently(self, act: Callable[[], T], patience_seconds: float | None) -> T:
        """Do it, again and again while the database cannot be reached or untangles it, until patience ends."""
        started = time.monotonic()
        wait = 0.05
        while True:
            try:
                return act()
            except (LogUnavailable, Deadlocked) as error:
                COUNTERS.add(UNAVAILABLE)
                if isinstance(error, StorageFull) and patience_seconds is not None:
                    # It lasts until an operator makes room: the caller decides.
                    raise
                if patience_seconds is not None and time.monotonic() - started + wait > patience_seconds:
                    raise
                logger.warning("log unavailable", extra={ERROR: error.message, WAIT_SECONDS: wait})
                time.sleep(wait * random.uniform(0.5, 1.0))
                wait = min(wait * 2, 5.0)

    def do_upkeep(self) -> None:
        """This process's share of the log's upkeep, when it is time for it. Consumers do this by themselves."""
        call = self._upkeep.next_call(time.monotonic())
        if call is None:
            return
        due = [call]
        try:
            while due:
                answer = self._run(due.pop(0))
                due += self._upkeep.heard(answer, time.monotonic(), datetime.now(UTC))
        except (HeadwaterError, psycopg.Error) as error:
            # Upkeep is everybody's; whoever can do it next does it.
            logger.warning("upkeep failed", extra={ERROR: str(error)})


def as_names(topics: Topics) -> list[str] | None:
    if topics is None:
        return None
    return [topics] if isinstance(topics, str) else list(topics)


def rows_of(cursor: psycopg.Cursor[Any], call: Call[Any]) -> list[Any]:
    try:
        cursor.execute(call.sql, call.params)
        return cursor.fetchall()
    except psycopg.Error as error:
        raise translated(error) from error
