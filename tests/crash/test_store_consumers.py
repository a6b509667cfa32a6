"""Do those who read an event store get every event once, and do its effects happen once, whoever is killed?"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from test_store_history import killing, random_appends

import headwater
from headwater import aio
from headwater.store import NewStoreEvent, Query, SqliteStores, StoreEvent

pytestmark = pytest.mark.crash

_numbers = itertools.count()
Until = Callable[[Callable[[], Any]], Any]
ROUNDS = int(os.environ.get("CRASH_ROUNDS", "1"))
SUBSCRIBERS = int(os.environ.get("STORE_SUBSCRIBERS", "1000"))

# Adds to a balance, which would show an event that is left out or taken twice.
PROJECTOR = """
import sys
import headwater
from headwater.store import Query

def handle(connection, events):
    for event in events:
        connection.execute("update balance set amount = amount + %s, events = events + 1" % event.data["amount"])

store = headwater.connect(sys.argv[1], application_name=sys.argv[2]).store(sys.argv[2])
store.process(Query.of(types=["Paid"]), handle, cursor=sys.argv[2], batch_size=3)
"""


def test_a_projector_that_is_killed_counts_every_event_once(
    dsn: str, log: headwater.Headwater, connection: psycopg.Connection[Any], until: Until
) -> None:
    store = log.create_store(f"store-{next(_numbers)}")
    connection.execute("create table balance (amount bigint not null, events bigint not null)")
    connection.execute("insert into balance values (0, 0)")
    amounts = itertools.count(1)
    paid: list[int] = []

    def pay() -> None:
        for _ in range(4):
            paid.append(next(amounts))
            store.append([NewStoreEvent("Paid", {"amount": paid[-1]}), NewStoreEvent("Noted")])

    def projected() -> tuple[int, int]:
        row = connection.execute("select amount, events from balance").fetchone()
        assert row is not None
        return row

    def backends(where: str) -> int:
        row = connection.execute(
            f"select count(*) from pg_stat_activity where application_name = %s and {where}", (store.topic,)
        ).fetchone()
        assert row is not None
        return int(row[0])

    pay()
    # Killed while it waits to write the effect, and while it waits to move the cursor.
    for held in [None, *["select from balance for update", "select from headwater.cursor for update"] * ROUNDS, None]:
        process = subprocess.Popen([sys.executable, "-c", PROJECTOR, dsn, store.topic])
        try:
            until(lambda: projected()[1] >= len(paid))
            if held is None:
                continue
            with log.transaction() as holder:
                holder.execute(held)
                pay()
                until(lambda: backends("wait_event_type = 'Lock'"))
                process.send_signal(signal.SIGKILL)
                process.wait(60)
                # What its backend waits to do must not be done after its death.
                connection.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s", (store.topic,)
                )
                until(lambda: backends("true") == 0)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(60)
    assert projected() == (sum(paid), len(paid))


# One process has the files, so the one that is killed appends as well. It kills itself right after the effect, or right
# after the cursor was moved: neither is committed then.
ON_SQLITE = """
import os, signal, sys
from pathlib import Path
from headwater.store import NewStoreEvent, Query, SqliteStores, sqlite_rows

move_cursor = sqlite_rows.move_cursor

def die_at(point):
    if sys.argv[2] == point:
        os.kill(os.getpid(), signal.SIGKILL)

def moving(*arguments):
    move_cursor(*arguments)
    die_at("moved")

def handle(connection, events):
    connection.execute("create table if not exists balance (amount integer not null, events integer not null)")
    if connection.execute("select count(*) from balance").fetchone() == (0,):
        connection.execute("insert into balance values (0, 0)")
    for event in events:
        connection.execute("update balance set amount = amount + ?, events = events + 1", (event.data["amount"],))
    die_at("handled")

sqlite_rows.move_cursor = moving
with SqliteStores(Path(sys.argv[1])) as stores:
    store = stores.create_store("s", if_missing=True)
    store.append([NewStoreEvent("Paid", {"amount": store.count() + n}) for n in range(5)])
    store.process(Query(), handle, cursor="balance", batch_size=2, stop_when_caught_up=True)
"""


def test_a_projector_on_sqlite_that_is_killed_counts_every_event_once(tmp_path: Path) -> None:
    for point in ["never", *["handled", "moved"] * ROUNDS, "never"]:
        process = subprocess.run([sys.executable, "-c", ON_SQLITE, str(tmp_path), point], timeout=60, check=False)
        assert process.returncode == (0 if point == "never" else -signal.SIGKILL)
    with SqliteStores(tmp_path) as stores:
        store = stores.store("s")
        counted: list[tuple[int, int]] = []
        store.process(
            Query(),
            lambda connection, events: counted.extend(connection.execute("select amount, events from balance")),
            cursor="look",
            after=store.head() - 1,
            stop_when_caught_up=True,
        )
        amounts = [event.data["amount"] for event in store.read_all()]
        assert counted == [(sum(amounts), len(amounts))]
        assert len(amounts) == 5 * (2 * ROUNDS + 2)


def test_thousands_of_subscribers_share_one_reader_while_backends_are_killed(
    dsn: str, log: headwater.Headwater, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = log.create_store(f"store-{next(_numbers)}")
    monkeypatch.setattr("headwater.tail.Tail.extended.__kwdefaults__", {"max_events": 16, "max_bytes": 1 << 20})
    end = Query.of(types=["End"])
    wanted = [Query(), Query.of(tags=["a"]) | end, Query.of(types=["A", "End"])]
    reading = most = 0

    async def follow(following: aio.store.EventStore, number: int) -> list[int]:
        got: list[StoreEvent] = []
        async for events in following.subscribe_batches(wanted[number % 3], batch_size=7):
            got += events
            if number % 100 == 0:
                # Slow: by the time it comes back, what it needs is no longer kept in memory.
                await asyncio.sleep(0.05)
            if got[-1].type == "End":
                return [event.position for event in got]
        raise AssertionError("a live subscription does not end")

    async def run() -> list[list[int]]:
        nonlocal reading, most
        async with await aio.connect(dsn, application_name="doomed") as opened:
            following = opened.store(store.topic)
            read_after = following._feed._read_after

            async def watched(position: int, batch_size: int) -> list[StoreEvent]:
                nonlocal reading, most
                reading += 1
                most = max(most, reading)
                try:
                    return await read_after(position, batch_size)
                finally:
                    reading -= 1

            following._feed._read_after = watched
            tasks = [asyncio.create_task(follow(following, n)) for n in range(SUBSCRIBERS)]
            with killing(dsn):
                for seed in range(3):
                    await asyncio.to_thread(random_appends, store, 10, seed)
                await asyncio.to_thread(store.append, NewStoreEvent("End"))
                received = await asyncio.wait_for(asyncio.gather(*tasks), 120)
            assert following._feed._tail is not None
            assert len(following._feed._tail.events) <= 16
            return received

    received = asyncio.run(run())
    expected = [[event.position for event in store.read_all(query)] for query in wanted]
    assert all(got == expected[n % 3] for n, got in enumerate(received))
    assert most == 1
