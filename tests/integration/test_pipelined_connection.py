"""Do calls that go out before those ahead of them are answered get the answers that are theirs, whatever happens?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus

import headwater
from headwater import aio
from headwater.calls import Call
from headwater.errors import InvalidEvent, LogUnavailable
from headwater.eventstore import pipelined_connection
from headwater.eventstore.pipelined_connection import AsyncPipelinedConnection, PipelinedConnection
from patience import PATIENCE_SECONDS

Run = Callable[[Callable[[AsyncPipelinedConnection, aio.AsyncHeadwater], Any]], Any]


def call(number: Any, sleep_seconds: float = 0.0) -> Call[Any]:
    """Comes back with the number that it was sent with, and the process of the server that it came from."""
    return Call(
        "select %s::text, pg_backend_pid() from pg_sleep(%s::float8)",
        (f"{number}", f"{sleep_seconds}"),
        lambda rows: rows,
    )


def failing(number: int) -> Call[Any]:
    return Call("select (%s::text)::jsonb", (f"{{{number}",), lambda rows: rows)


async def until(question: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not question():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def under_way(wire: AsyncPipelinedConnection) -> int:
    return 0 if wire._pipeline is None else len(wire._pipeline._under_way)


async def answers(wire: AsyncPipelinedConnection, asked: list[Call[Any]]) -> list[Any]:
    """What each comes to, in the order in which they were sent; errors as well."""
    running = [wire.run(one, behind=True) for one in asked]
    return await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), PATIENCE_SECONDS)


@pytest.fixture
def run(dsn: str) -> Run:
    """Runs a test in an event loop, with a wire; then no connection may be missing from the pool."""

    async def running(test: Callable[[AsyncPipelinedConnection, aio.AsyncHeadwater], Any]) -> Any:
        async with await aio.connect(dsn, pool_size=2, application_name="wired") as log:
            wire = AsyncPipelinedConnection(log._run, log._pool)
            try:
                return await test(wire, log)
            finally:
                assert wire._pipeline is None
                while wire._returning:
                    await asyncio.wait(wire._returning, timeout=PATIENCE_SECONDS)
                async with asyncio.timeout(PATIENCE_SECONDS):
                    held = [await log._pool.getconn() for _ in range(2)]
                for connection in held:
                    assert connection.info.transaction_status == TransactionStatus.IDLE
                    assert (await (await connection.execute("select 1")).fetchall()) == [(1,)]
                    await log._pool.putconn(connection)

    return lambda test: asyncio.run(running(test))


def test_each_call_has_its_own_answer_and_all_go_over_one_connection(run: Run) -> None:
    async def test(wire: AsyncPipelinedConnection, log: aio.AsyncHeadwater) -> None:
        got = await answers(wire, [call(n) for n in range(50)])
        assert [row[0] for ((*row,),) in got] == [f"{n}" for n in range(50)]
        assert len({row[1] for ((*row,),) in got}) == 1
        # Not behind: on a connection like any other call.
        assert (await wire.run(call("alone"), behind=False))[0][0] == "alone"

    run(test)


def test_a_call_goes_out_before_the_one_ahead_of_it_is_answered(run: Run, connection: psycopg.Connection[Any]) -> None:
    async def test(wire: AsyncPipelinedConnection, log: aio.AsyncHeadwater) -> None:
        waiting = Call("select pg_advisory_xact_lock(4711)::text", (), lambda rows: rows)
        connection.execute("select pg_advisory_lock(4711)")
        try:
            first = asyncio.create_task(wire.run(waiting, behind=True))
            second = asyncio.create_task(wire.run(call(2), behind=True))
            await until(lambda: under_way(wire) == 2)
            assert not first.done()
            assert not second.done()
        finally:
            connection.execute("select pg_advisory_unlock(4711)")
        assert (await asyncio.wait_for(second, PATIENCE_SECONDS))[0][0] == "2"
        assert first.done()

    run(test)


def test_one_that_fails_leaves_the_others_as_they_are(run: Run) -> None:
    async def test(wire: AsyncPipelinedConnection, log: aio.AsyncHeadwater) -> None:
        got = await answers(wire, [call(0), failing(1), call(2), failing(3), call(4)])
        assert [isinstance(answer, InvalidEvent) for answer in got] == [False, True, False, True, False]
        assert [got[n][0][0] for n in (0, 2, 4)] == ["0", "2", "4"]

    run(test)


def test_a_statement_that_the_server_does_not_know_is_told_to_it_again(run: Run) -> None:
    missing = Call("select public.not_there(%s)", ("x",), lambda rows: rows)

    async def test(wire: AsyncPipelinedConnection, log: aio.AsyncHeadwater) -> None:
        for _ in range(2):
            (refused,) = await answers(wire, [missing])
            assert refused.hint == "Run `headwater migrate` on this database."
        async with log.connection() as connection:
            await connection.execute("create function public.not_there(text) returns text return $1")
        assert await answers(wire, [missing]) == [[("x",)]]
        # Somebody between the two has forgotten what was said.
        kept = [
            connection
            for connection in pipelined_connection._PREPARED
            if missing.sql in pipelined_connection._PREPARED[connection]
        ]
        for connection in kept:
            await connection.execute("deallocate all")
        (forgotten,) = await answers(wire, [missing])
        assert isinstance(forgotten, psycopg.errors.InvalidSqlStatementName)
        assert await answers(wire, [missing]) == [[("x",)]]

    run(test)


@pytest.mark.parametrize("megabytes", [1, 24])
def test_what_is_larger_than_the_system_takes_at_once_goes_through(run: Run, megabytes: int) -> None:
    # There and back: neither side may wait for the other to read.
    echo = Call("select %b::bytea", (b"x" * (megabytes << 20),), lambda rows: len(rows[0][0]))

    async def test(wire: AsyncPipelinedConnection, log: aio.AsyncHeadwater) -> None:
        got = await answers(wire, [echo, call(1), echo, call(2)])
        assert (got[0], got[2]) == (megabytes << 20, megabytes << 20)
        assert (got[1][0][0], got[3][0][0]) == ("1", "2")

    run(test)


def test_a_lost_connection_is_told_to_all_who_wait_and_the_next_have_another(
    run: Run, connection: psycopg.Connection[Any]
) -> None:
    async def test(wire: AsyncPipelinedConnection, log: aio.AsyncHeadwater) -> None:
        running = asyncio.create_task(answers(wire, [call(0), call(1, 60), call(2), call(3)]))
        ended = (
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where wait_event = 'PgSleep' and datname = current_database()"
        )
        await until(lambda: connection.execute(ended).fetchall())
        first, *lost = await running
        assert first[0][0] == "0"
        assert [type(answer) for answer in lost] == [LogUnavailable] * 3
        assert "administrator" in str(lost[0])
        ((again,),) = await answers(wire, [call(4)])
        assert again[0] == "4"

    run(test)


def test_who_stops_waiting_leaves_the_others_their_answers(run: Run, connection: psycopg.Connection[Any]) -> None:
    async def test(wire: AsyncPipelinedConnection, log: aio.AsyncHeadwater) -> None:
        connection.execute("select pg_advisory_lock(4712)")
        waiting = Call("select pg_advisory_xact_lock(4712)::text", (), lambda rows: rows)
        tasks = [asyncio.create_task(wire.run(one, behind=True)) for one in (waiting, call(1), call(2))]
        await until(lambda: under_way(wire) == 3)
        tasks[0].cancel()
        tasks[1].cancel()
        connection.execute("select pg_advisory_unlock(4712)")
        assert (await asyncio.wait_for(tasks[2], PATIENCE_SECONDS))[0][0] == "2"

    run(test)


def test_the_last_who_stops_waiting_leaves_no_connection_behind(run: Run) -> None:
    async def test(wire: AsyncPipelinedConnection, log: aio.AsyncHeadwater) -> None:
        task = asyncio.create_task(wire.run(call(0, 0.05), behind=True))
        await until(lambda: under_way(wire))
        task.cancel()
        await until(lambda: wire._pipeline is None)

    run(test)


def test_others_get_a_connection_while_a_wire_is_always_busy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelined_connection, "MAX_CALLS", 10)

    async def test(wire: AsyncPipelinedConnection, log: aio.AsyncHeadwater) -> None:
        stop = asyncio.Event()
        uses = 0

        async def use() -> None:
            nonlocal uses
            while not stop.is_set():
                await wire.run(call(0, 0.001), behind=True)
                uses += 1

        users = [asyncio.create_task(use()) for _ in range(4)]
        async with asyncio.timeout(PATIENCE_SECONDS), log.connection():
            await until(lambda: uses)
            # The only other one is taken too: what the wire has must come back from it.
            await log._run(call("another"))
        stop.set()
        await asyncio.wait_for(asyncio.gather(*users), PATIENCE_SECONDS)

    run(test)


def test_among_threads_it_is_a_call_like_any_other(log: headwater.Headwater) -> None:
    wire = PipelinedConnection(log._run, log._pool)
    assert wire.run(call("x"), behind=True)[0][0] == "x"
    with pytest.raises(InvalidEvent):
        wire.run(failing(1), behind=True)


def test_calls_are_sent_as_psycopg_would_send_them() -> None:
    assert pipelined_connection._numbered("select f(%s, %b::text[], %t)") == b"select f($1, $2::text[], $3)"
