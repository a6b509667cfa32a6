"""Is the log found again soon, however long its Postgres was away?"""

from __future__ import annotations

import asyncio

import psycopg_pool.pool_async
import pytest
from psycopg import conninfo

from headwater import aio
from headwater.calls import log as log_calls
from headwater.servers import prometheus
from http_server import free_port
from patience import PATIENCE_SECONDS


async def lose(log: aio.AsyncHeadwater, monkeypatch: pytest.MonkeyPatch, dsn: str) -> None:
    """From now on nobody is where Postgres was."""
    monkeypatch.setattr(log._pool, "conninfo", conninfo.make_conninfo(dsn, host="127.0.0.1", port=free_port()))
    async with log.connection() as connection:
        await connection.close()


def test_a_server_that_is_not_there_is_told_from_one_that_does_not_answer(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look() -> list[prometheus.Check]:
        async with await aio.connect(dsn, pool_size=1) as log:
            await lose(log, monkeypatch, dsn)
            return await prometheus.readiness(log)

    # Whatever else is slow here, it is not waited for.
    monkeypatch.setattr(prometheus, "QUERY_SECONDS", 60)
    (check,) = asyncio.run(asyncio.wait_for(look(), PATIENCE_SECONDS))
    assert not check.ok
    assert "refused" in check.message


def test_after_a_long_outage_postgres_is_found_as_soon_as_after_a_short_one(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    waits: list[float] = []

    async def outage() -> None:
        async with await aio.connect(dsn, pool_size=3) as log:
            pool = log._pool
            passed = asyncio.Event()

            async def at_once(task: psycopg_pool.pool_async.MaintenanceTask, delay: float) -> None:
                nonlocal now
                waits.append(delay)
                now += delay
                if now > 600 or delay > 4:
                    passed.set()
                await asyncio.sleep(0)
                pool.run_task(task)

            monkeypatch.setattr(psycopg_pool.pool_async, "monotonic", lambda: now)
            monkeypatch.setattr(pool, "schedule_task", at_once)
            await lose(log, monkeypatch, dsn)
            # Ten minutes by the pool's clock.
            await passed.wait()
            monkeypatch.setattr(pool, "conninfo", dsn)
            await log.run(log_calls.log_state())

    asyncio.run(asyncio.wait_for(outage(), PATIENCE_SECONDS))
    assert max(waits) <= 4, "it waited for long between two tries"
