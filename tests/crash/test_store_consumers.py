"""Do those who read an event store get every event once, and do its effects happen once, whoever is killed?"""

from __future__ import annotations

import asyncio
import itertools
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
from effort import effort
from headwater import aio
from headwater.eventstore import NewStoreEvent, Query, SqliteStores, StoreEvent
from patience import PATIENCE_SECONDS

pytestmark = pytest.mark.crash

_numbers = itertools.count()
Until = Callable[[Callable[[], Any]], Any]
ROUNDS = effort(1)
SUBSCRIBERS = effort(1000)

# Adds to a balance, which would show an event that is left out or taken twice.
PROJECTOR = """
import sys
import headwater
from headwater.eventstore import Query

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
    for held in [
        None,
        *["select from balance for update", "select from headwater_internal.cursor for update"] * ROUNDS,
        None,
    ]:
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
                process.wait(PATIENCE_SECONDS)
                # What its backend waits to do must not be done after its death.
                connection.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s", (store.topic,)
                )
                until(lambda: backends("true") == 0)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_SECONDS)
    assert projected() == (sum(paid), len(paid))


# One process has the files, so the one that is killed appends as well. It kills itself right after the effect, or right
# after the cursor was moved: neither is committed then.
ON_SQLITE = """
import os, signal, sys
from pathlib import Path
from headwater.eventstore import NewStoreEvent, Query, SqliteStores, sqlite_rows

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
        process = subprocess.run(
            [sys.executable, "-c", ON_SQLITE, str(tmp_path), point], timeout=PATIENCE_SECONDS, check=False
        )
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
    dsn: str, log: headwater.Headwater, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = log.create_store(f"store-{next(_numbers)}")
    monkeypatch.setattr(
        "headwater.eventstore.recent_events.RecentEvents.extended.__kwdefaults__",
        {"max_events": 16, "max_bytes": 1 << 20},
    )
    ends = Query.of(types=["Begin", "End"])
    wanted = [Query(), Query.of(tags=["a"]) | ends, Query.of(types=["A", "Begin", "End"])]
    reading = most = lost = looked = 0
    live: set[asyncio.Task[Any] | None] = set()
    begun: set[int] = set()

    async def follow(following: aio.store.EventStore, number: int) -> list[int]:
        got: list[StoreEvent] = []
        async for events in following.subscribe_batches(wanted[number % 3], batch_size=7):
            got += events
            begun.add(number)
            if number % 100 == 0:
                # Slow: by the time it comes back, what it needs is no longer kept in memory.
                await asyncio.sleep(0.05)
            if got[-1].type == "End":
                return [event.position for event in got]
        raise AssertionError("a live subscription does not end")

    async def run() -> list[list[int]]:
        nonlocal lost, looked
        async with await aio.connect(dsn, application_name="doomed") as opened:
            following = opened.store(store.topic)
            feed = following._live_reader
            read_after, after, end = feed._read_after, feed.after, following._end

            async def watched_read_after(*arguments: Any) -> list[StoreEvent]:
                nonlocal reading, most, lost
                reading += 1
                most = max(most, reading)
                try:
                    return await read_after(*arguments)
                except headwater.LogUnavailable:
                    lost += 1
                    raise
                finally:
                    reading -= 1

            async def watched_after(*arguments: Any, **settings: Any) -> Any:
                live.add(asyncio.current_task())
                return await after(*arguments, **settings)

            async def watched_end() -> tuple[int, int]:
                nonlocal looked
                looked += 1
                return await end()

            monkeypatch.setattr(feed, "_read_after", watched_read_after)
            monkeypatch.setattr(feed, "after", watched_after)
            monkeypatch.setattr(following, "_end", watched_end)
            tasks = [asyncio.create_task(follow(following, n)) for n in range(SUBSCRIBERS)]

            async def wait_for(happened: Callable[[], bool]) -> None:
                # A subscriber that fails fails the test below.
                await asyncio.to_thread(until, lambda: happened() or any(task.done() for task in tasks))

            with killing(dsn):
                # One that is not at the end of the log yet reads it by itself.
                await wait_for(lambda: len(live) == SUBSCRIBERS)
                lost = looked = 0
                await wait_for(lambda: lost >= 3)
                await asyncio.to_thread(store.append, NewStoreEvent("Begin"))
                await wait_for(lambda: len(begun) == SUBSCRIBERS)
                looked_while_live = looked
                for seed in range(3):
                    await asyncio.to_thread(random_appends, store, 10, seed)
                await asyncio.to_thread(store.append, NewStoreEvent("End"))
                received = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_SECONDS)
            assert looked_while_live == 0, "subscribers read the log, each by itself"
            assert feed._tail is not None
            assert len(feed._tail.events) <= 16
            return received

    received = asyncio.run(run())
    expected = [[event.position for event in store.read_all(query)] for query in wanted]
    assert all(got == expected[n % 3] for n, got in enumerate(received))
    assert most == 1


# Three compete, and with some chance the process is killed: within a transaction, right after it, or with a batch in
# hand. What is told of a lease is told after its commit, and of work before the batch is settled.
COMPETING = """
import os, random, signal, sys, threading, time
from pathlib import Path
from headwater.eventstore import NewStoreEvent, SqliteStores, sqlite_queues

folder, chance, appended = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
witness = os.open(folder / "witness", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def tell(what, token, events):
    os.write(witness, " ".join([what, str(token), *(str(event.position) for event in events)]).encode() + b"\\n")

def maybe_die():
    if random.random() < chance:
        os.kill(os.getpid(), signal.SIGKILL)

def deadly(act):
    def acting(*arguments):
        answer = act(*arguments)
        maybe_die()
        return answer
    return acting

for name in ("take", "settle", "reap"):
    setattr(sqlite_queues, name, deadly(getattr(sqlite_queues, name)))

with SqliteStores(folder) as stores:
    store = stores.create_store("s", if_missing=True)
    store.append([NewStoreEvent("A", event_id=f"e{n}") for n in range(appended - 30, appended)])
    store._open_queue("g")
    take, settle = store._take, store._settle

    def taking(*asked):
        lease = take(*asked)
        if lease is not None:
            tell("claimed", lease.token, lease.events)
        maybe_die()
        return lease

    def settling(lease):
        settle(lease)
        tell("settled", lease.token, lease.events)
        maybe_die()

    store._take, store._settle = taking, settling

    def anything_left():
        with store._access.file.reading() as connection:
            return connection.execute(
                "select exists (select 1 from claimed_event) or position < (select max(position) from event) "
                "from queue"
            ).fetchone()[0]

    def work(worker):
        while anything_left():
            for events in store.compete("g", worker=worker, batch_size=3, lease_seconds=0.2, stop_when_caught_up=True):
                tell("worked", 0, events)
                maybe_die()
            time.sleep(0.005)

    workers = [threading.Thread(target=work, args=(f"w{n}",)) for n in range(3)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
"""


def test_those_who_compete_on_sqlite_work_on_every_event_and_none_is_given_again_once_done(tmp_path: Path) -> None:
    deaths = 0
    for run in itertools.count(1):
        chance = 0.04 if deaths < 3 * ROUNDS else 0.0
        command = [sys.executable, "-c", COMPETING, str(tmp_path), str(chance), str(30 * run)]
        code = subprocess.run(command, timeout=PATIENCE_SECONDS, check=False).returncode
        assert code in ((0, -signal.SIGKILL) if chance else (0,))
        if not chance:
            break
        deaths += code != 0
    told = [line.split() for line in (tmp_path / "witness").read_text().splitlines()]
    held = [(what, int(token), int(position)) for what, token, *places in told for position in places]
    settled = [(position, token) for what, token, position in held if what == "settled"]
    done = dict(settled)
    assert len(done) == len(settled), "an event was done twice"
    # Tokens grow with every claim: whoever got it later got what was done.
    assert [one for one in held if one[0] == "claimed" and one[1] > done.get(one[2], one[1])] == []
    # Nothing is told by those who were killed between a commit and telling of it, but every event came to somebody.
    assert {position for what, _, position in held if what == "worked"} == set(range(1, 30 * run + 1))
    with SqliteStores(tmp_path) as stores:
        assert stores.store("s").head() == 30 * run
