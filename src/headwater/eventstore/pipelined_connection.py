"""A wire to Postgres on which a call can go out before the one ahead of it is answered.

So the server has the next call at hand when it is done with one, while its client makes ready the call after that.
Postgres answers in order, each call is a transaction of its own, and one that fails leaves the others as they are.
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
from headwater.errors import LogUnavailable, translated

T = TypeVar("T")
Rows = list[tuple[Any, ...]]

# After so many calls a line goes back to the pool, where others may wait for a connection.
MOST_CALLS = 256
# What the server's end of each connection knows, and under which name.
_PREPARED: WeakKeyDictionary[psycopg.AsyncConnection[Any], dict[str, bytes]] = WeakKeyDictionary()


class Wire:
    """Among threads every call has a connection of the pool to itself: they would only wait for each other on one."""

    def __init__(self, run: Callable[..., Any], pool: object) -> None:
        self._run = run

    def run(self, call: Call[T], *, behind: bool) -> T:
        """Carry out a call."""
        answer: T = self._run(call)
        return answer


class AsyncWire:
    """The wire of those who work in an event loop. It takes a connection of the pool when it needs one."""

    def __init__(self, run: Callable[..., Awaitable[Any]], pool: AsyncConnectionPool[Any]) -> None:
        self._run = run
        self._pool = pool
        self._line: _Line | None = None
        self._opening = asyncio.Lock()
        self._given_back: set[asyncio.Task[None]] = set()

    async def run(self, call: Call[T], *, behind: bool) -> T:
        """Carry out a call: `behind` those that are under way here, or on a connection of the pool like any other."""
        if not behind:
            answer: T = await self._run(call)
            return answer
        line = self._line or await self._open()
        try:
            return call.decode(await line.send(call))
        except psycopg.Error as error:
            raise translated(error) from error

    async def _open(self) -> _Line:
        async with self._opening:
            if self._line is None:
                try:
                    connection = await self._pool.getconn()
                except PoolTimeout as timeout:
                    raise LogUnavailable("no free connection to Postgres in time") from timeout
                self._line = _Line(connection, self._let_go, self._give_back)
            return self._line

    def _let_go(self, line: _Line) -> None:
        """Send nothing more on this line."""
        if self._line is line:
            self._line = None

    def _give_back(self, connection: psycopg.AsyncConnection[Any]) -> None:
        task = asyncio.get_running_loop().create_task(self._pool.putconn(connection))
        self._given_back.add(task)
        task.add_done_callback(self._given_back.discard)


class _Sent:
    """A call that is not answered yet."""

    __slots__ = ("answer", "is_preparing", "result", "sql")

    def __init__(self, sql: str, answer: asyncio.Future[Rows]) -> None:
        self.sql = sql
        self.answer = answer
        # Whether the server is told of its statement with it, and has not said yet that it knows it.
        self.is_preparing = False
        # Rows, or the first error.
        self.result: PGresult | None = None

    def error(self) -> psycopg.Error:
        if self.result is None:
            return psycopg.OperationalError("Postgres gave no answer")
        return psycopg.errors.error_from_result(self.result)


class _Line:
    """One connection as long as calls are under way on it: then, or when it is lost, it goes back to the pool."""

    def __init__(
        self,
        connection: psycopg.AsyncConnection[Any],
        let_go: Callable[[_Line], None],
        give_back: Callable[[psycopg.AsyncConnection[Any]], None],
    ) -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._let_go = let_go
        self._give_back = give_back
        self._loop = asyncio.get_running_loop()
        self._transformer = Transformer(connection)
        self._prepared = _PREPARED.setdefault(connection, {})
        self._under_way: deque[_Sent] = deque()
        self._calls = 0
        self._is_full = False
        self._socket = self._pgconn.socket
        self._pgconn.enter_pipeline_mode()
        self._loop.add_reader(self._socket, self._read)

    def send(self, call: Call[Any]) -> asyncio.Future[Rows]:
        """Send a call now. Whoever stops waiting for its answer leaves the others theirs."""
        self._calls += 1
        if self._calls >= MOST_CALLS:
            self._let_go(self)
        sent = _Sent(call.sql, self._loop.create_future())
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
        """Hand what is left to send to the system, and go on when it can take more."""
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
        """Take in what came for the first that is under way."""
        sent = self._under_way[0]
        if result is None:
            # Between two answers; or there will be none for ever.
            if self._pgconn.status == ConnStatus.BAD:
                raise psycopg.OperationalError("the connection is closed")
        elif result.status == ExecStatus.PIPELINE_SYNC:
            self._under_way.popleft()
            self._answer(sent)
        elif result.status == ExecStatus.COMMAND_OK:
            sent.is_preparing = False
        elif sent.result is None:
            sent.result = result

    def _answer(self, sent: _Sent) -> None:
        result = sent.result
        if result is not None and result.status == ExecStatus.TUPLES_OK:
            if not sent.answer.done():
                self._transformer.set_pgresult(result)
                sent.answer.set_result(self._transformer.load_rows(0, result.ntuples, tuple))
            return
        error = sent.error()
        if sent.is_preparing or isinstance(error, psycopg.errors.InvalidSqlStatementName):
            # The server does not know it: it is told again.
            self._prepared.pop(sent.sql, None)
        if not sent.answer.done():
            sent.answer.set_exception(error)

    def _break(self, error: psycopg.Error) -> None:
        """The connection is of no more use, and the answers that did not come are lost."""
        self._stop_listening()
        self._pgconn.finish()
        lost, self._under_way = self._under_way, deque()
        for sent in lost:
            if not sent.answer.done():
                # Why it ended may have been said to the first of them.
                told = sent.result is not None and sent.result.status == ExecStatus.FATAL_ERROR
                sent.answer.set_exception(sent.error() if told else psycopg.OperationalError(str(error)))
        self._give_back(self._connection)

    def _end(self) -> None:
        """Nothing is under way."""
        self._stop_listening()
        self._pgconn.exit_pipeline_mode()
        self._give_back(self._connection)

    def _stop_listening(self) -> None:
        self._let_go(self)
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)


@lru_cache(maxsize=16)
def _numbered(sql: str) -> bytes:
    """A statement with its parameters as Postgres writes them."""
    before, *parts = re.split(r"%[sbt]", sql)
    return "".join([before, *(f"${number}{part}" for number, part in enumerate(parts, 1))]).encode()
