"""Do our sessions work at READ COMMITTED, whatever the database has as its default?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import conninfo, sql

import headwater
from headwater import aio


@pytest.fixture(params=["repeatable read", "serializable"])
def strict(dsn: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A log in a database whose transactions are of another level by default."""
    name = sql.Identifier(str(conninfo.conninfo_to_dict(dsn)["dbname"]))
    change = sql.SQL("alter database {} set default_transaction_isolation = {}")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(change.format(name, request.param))
        yield dsn
        connection.execute(sql.SQL("alter database {} reset default_transaction_isolation").format(name))


def test_the_log_is_read_claimed_and_appended_to_whatever_the_default_isolation_is(strict: str) -> None:
    with psycopg.connect(strict) as plain:
        assert plain.execute("show transaction_isolation").fetchone() != ("read committed",)
    with headwater.connect(strict) as log:
        topic = log.create_topic(f"t-{time.monotonic_ns()}").name
        log.create_queue(f"g-{topic}")
        log.bind(f"g-{topic}", topic=topic)
        position = log.publish(topic, {"a": 1})
        assert [event.position for event in log.read(topic)] == [position]
        with log.transaction() as connection:
            log.publish(topic, {"a": 2}, connection=connection)
            assert connection.execute("show transaction_isolation").fetchone() == ("read committed",)
        assert log.claim(f"g-{topic}", worker="w") is not None

    async def act() -> None:
        async with await aio.connect(strict) as log:
            await log.publish(topic, {"a": 3})
            assert len(await log.read(topic)) == 3

    asyncio.run(act())
