"""A pipelined connection to Postgres: a call can be sent before the result of the previous one arrives.

So the server has the next call at hand when it finishes one, while the client prepares the call after that. Postgres
answers in order, each call is its own transaction, and a failed call does not affect the others.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import psycopg
from psycopg.adapt import PyFormat, Transformer
from psycopg.pq import ConnStatus, ExecStatus, Format
from psycopg.pq.abc import PGresult
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from headwater.calls import Call
from headwater.database.driver_errors import translate_error
from headwater.errors import LogUnavailable

T = TypeVar("T")
Rows = list[tuple[Any, ...]]

# After this many calls a pipeline returns its connection to the pool, where others may wait for one.
MAX_CALLS = 256
# The names of the prepared statements of each connection.
_PREPARED: WeakKeyDictionary[psycopg.AsyncConnection[Any], dict[str, bytes]] = WeakKeyDictionary()


class PipelinedConnection:
    """The blocking variant: each call uses a pooled connection, since threads on one connection would only wait for
    each other."""

    def __init__(self, run: Callable[..., Any], pool: object) -> None:
        self._run = run

    def run(self, call: Call[T], *, behind: bool) -> T:
        """Run a call."""
        answer: T = self._run(call)
        return answer


class AsyncPipelinedConnection:
    """The asyncio variant. It takes a connection from the pool when it needs one."""

    def __init__(self, run: Callable[..., Awaitable[Any]], pool: AsyncConnectionPool[Any]) -> None:
        self._run = run
        self._pool = pool
        self._pipeline: _Pipeline | None = None
        self._opening = asyncio.Lock()
        self._returning: set[asyncio.Task[None]] = set()

    async def run(self, call: Call[T], *, behind: bool) -> T:
        """Run a call: with `behind`, pipelined after the calls in flight; otherwise on a pooled connection."""
        if not behind:
            answer: T = await self._run(call)
            return answer
        line = self._pipeline or await self._open()
        try:
            return call.decode(await line.send(call))
        except psycopg.Error as error:
            raise translate_error(error) from error

    async def _open(self) -> _Pipeline:
        async with self._opening:
            if self._pipeline is None:
                try:
                    connection = await self._pool.getconn()
                except PoolTimeout as timeout:
                    raise LogUnavailable("no pooled connection to Postgres became free in time") from timeout
                self._pipeline = _Pipeline(connection, self._detach, self._give_back)
            return self._pipeline

    def _detach(self, line: _Pipeline) -> None:
        """Send no further calls on this pipeline."""
        if self._pipeline is line:
            self._pipeline = None

    def _give_back(self, connection: psycopg.AsyncConnection[Any]) -> None:
        task = asyncio.get_running_loop().create_task(self._pool.putconn(connection))
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)


class _PendingCall:
    """A call in flight."""

    __slots__ = ("answer", "is_preparing", "result", "sql")

    def __init__(self, sql: str, answer: asyncio.Future[Rows]) -> None:
        self.sql = sql
        self.answer = answer
        # True while the statement is being prepared and the server has not confirmed it.
        self.is_preparing = False
        # Rows, or the first error.
        self.result: PGresult | None = None

    def error(self) -> psycopg.Error:
        if self.result is None:
            return psycopg.OperationalError("Postgres sent no response")
        return psycopg.errors.error_from_result(self.result)


class _Pipeline:
    """A connection while calls are in flight on it. After the last one, or when it is lost, it returns to the pool."""

    def __init__(
        self,
        connection: psycopg.AsyncConnection[Any],
        detach: Callable[[_Pipeline], None],
        give_back: Callable[[psycopg.AsyncConnection[Any]], None],
    ) -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._detach = detach
        self._give_back = give_back
        self._loop = asyncio.get_running_loop()
        self._transformer = Transformer(connection)
        self._prepared = _PREPARED.setdefault(connection, {})
        self._under_way: deque[_PendingCall] = deque()
        self._calls = 0
        self._is_full = False
        self._socket = self._pgconn.socket
        self._pgconn.enter_pipeline_mode()
        self._loop.add_reader(self._socket, self._read)

    def send(self, call: Call[Any]) -> asyncio.Future[Rows]:
        """Send a call. Cancelling one caller does not affect the other pending calls."""
        self._calls += 1
        if self._calls >= MAX_CALLS:
            self._detach(self)
        sent = _PendingCall(call.sql, self._loop.create_future())
        try:
            parameters = self._transformer.dump_sequence(call.params, [PyFormat.AUTO] * len(call.params))
            if call.sql not in self._prepared:
                self._prepared[call.sql] = f"headwater_{len(self._prepared)}".encode()
                self._pgconn.send_prepare(self._prepared[call.sql], _numbered(call.sql))
                sent.is_preparing = True
            name = self._prepared[call.sql]
            self._pgconn.send_query_prepared(name, parameters, self._transformer.formats, Format.BINARY)
            self._pgconn.pipeline_sync()
            self._under_way.append(sent)
            self._flush()
        except psycopg.Error as error:
            self._break(error)
            raise
        return sent.answer

    def _flush(self) -> None:
        """Write the remaining data to the socket, and continue when it accepts more."""
        was_full, self._is_full = self._is_full, bool(self._pgconn.flush())
        if self._is_full and not was_full:
            self._loop.add_writer(self._socket, self._write)
        elif was_full and not self._is_full:
            self._loop.remove_writer(self._socket)

    def _write(self) -> None:
        try:
            self._flush()
        except psycopg.OperationalError as error:
            self._break(error)

    def _read(self) -> None:
        try:
            self._pgconn.consume_input()
            while self._under_way and not self._pgconn.is_busy():
                self._take(self._pgconn.get_result())
        except psycopg.OperationalError as error:
            self._break(error)
            return
        if not self._under_way:
            self._end()

    def _take(self, result: PGresult | None) -> None:
        """Process a result for the first call in flight."""
        sent = self._under_way[0]
        if result is None:
            # Between two results; or the connection is closed, and no result will arrive.
            if self._pgconn.status == ConnStatus.BAD:
                raise psycopg.OperationalError("the connection is closed")
        elif result.status == ExecStatus.PIPELINE_SYNC:
            self._under_way.popleft()
            self._answer(sent)
        elif result.status == ExecStatus.COMMAND_OK:
            sent.is_preparing = False
        elif sent.result is None:
            sent.result = result

    def _answer(self, sent: _PendingCall) -> None:
        result = sent.result
        if result is not None and result.status == ExecStatus.TUPLES_OK:
            if not sent.answer.done():
                self._transformer.set_pgresult(result)
                sent.answer.set_result(self._transformer.load_rows(0, result.ntuples, tuple))
            return
        error = sent.error()
        if sent.is_preparing or isinstance(error, psycopg.errors.InvalidSqlStatementName):
            # The server does not have the statement: prepare it again.
            self._prepared.pop(sent.sql, None)
        if not sent.answer.done():
            sent.answer.set_exception(error)

    def _break(self, error: psycopg.Error) -> None:
        """Close the connection and fail the calls in flight."""
        self._stop_listening()
        self._pgconn.finish()
        lost, self._under_way = self._under_way, deque()
        for sent in lost:
            if not sent.answer.done():
                # The first call may have received the reason why the connection ended.
                has_reason = sent.result is not None and sent.result.status == ExecStatus.FATAL_ERROR
                sent.answer.set_exception(sent.error() if has_reason else psycopg.OperationalError(str(error)))
        self._give_back(self._connection)

    def _end(self) -> None:
        """End the pipeline: no call is in flight."""
        self._stop_listening()
        self._pgconn.exit_pipeline_mode()
        self._give_back(self._connection)

    def _stop_listening(self) -> None:
        self._detach(self)
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)


@lru_cache(maxsize=16)
def _numbered(sql: str) -> bytes:
    """A statement with numbered parameters, as Postgres expects them."""
    before, *parts = re.split(r"%[sbt]", sql)
    return "".join([before, *(f"${number}{part}" for number, part in enumerate(parts, 1))]).encode()
