"""Do decisions hold when others decide at the same time?"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headwater import aio
from headwater.errors import AppendConflict, InvalidRequest, LogUnavailable
from headwater.eventstore import (
    AsyncSqliteStores,
    Decider,
    NewStoreEvent,
    Query,
    SavedSnapshots,
    Snapshots,
    SqliteStores,
    StoreEvent,
    execute,
)
from headwater.eventstore.decider import SavedState
from patience import PATIENCE_SECONDS

_numbers = itertools.count()
SEATS = 5


class SoldOut(Exception):
    """No seat is left."""


def seats(taken: int, who: str) -> Sequence[NewStoreEvent]:
    if taken >= SEATS:
        raise SoldOut
    return [NewStoreEvent("SeatTaken", {"who": who}, ["show:1"])]


BOOKING: Decider[int, str] = Decider(
    query=lambda who: Query.of(types=["SeatTaken"], tags=["show:1"]),
    initial=lambda: 0,
    evolve=lambda taken, event: taken + 1,
    decide=seats,
)


@pytest.fixture(params=["postgres", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "postgres":
        yield request.getfixturevalue("log").create_store(f"deciding-{next(_numbers)}")
    else:
        with SqliteStores(tmp_path) as stores:
            yield stores.create_store("s")


@pytest.mark.parametrize("with_snapshots", [False, True])
def test_no_seat_is_sold_twice(store: Any, with_snapshots: bool) -> None:
    snapshots: Snapshots[int] | None = Snapshots() if with_snapshots else None

    def book(who: int) -> bool:
        try:
            execute(store, BOOKING, f"{who}", snapshots=snapshots, max_tries=100)
        except SoldOut:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(book, range(20))) == SEATS
    assert store.count() == SEATS


def test_after_a_conflict_only_what_came_since_is_read(store: Any) -> None:
    seen: list[int] = []
    store.append([NewStoreEvent("SeatTaken", tags=["show:1"]) for _ in range(2)])

    def decide(taken: int, who: str) -> Sequence[NewStoreEvent]:
        if taken == 2:
            store.append(NewStoreEvent("SeatTaken", tags=["show:1"]))
        return [NewStoreEvent("Decided", {"taken": taken})]

    def evolve(taken: int, event: StoreEvent) -> int:
        seen.append(event.position)
        return taken + 1

    decision = execute(store, Decider(BOOKING.query, BOOKING.initial, evolve, decide), "me")
    assert (decision.state, decision.tries) == (3, 2)
    assert seen == [event.position for event in store.read(Query.of(types=["SeatTaken"]))]
    assert decision.appended is not None
    assert store.read(Query.of(types=["Decided"]))[0].data == {"taken": 3}


def test_a_snapshot_is_where_the_next_decision_begins(store: Any) -> None:
    snapshots: Snapshots[int] = Snapshots(max_states=1)
    evolved: list[int] = []

    def evolve(taken: int, event: StoreEvent) -> int:
        evolved.append(event.position)
        return taken + 1

    decider = Decider(BOOKING.query, BOOKING.initial, evolve, BOOKING.decide)
    for who in "abc":
        execute(store, decider, who, snapshots=snapshots)
    assert evolved == [event.position for event in store.read()][:2]


def counting(evolved: list[int]) -> Decider[int, str]:
    """Notes every event that it must look at."""

    def evolve(taken: int, event: StoreEvent) -> int:
        evolved.append(event.position)
        return taken + 1

    return Decider(BOOKING.query, BOOKING.initial, evolve, lambda taken, who: [NewStoreEvent("Seen", {"taken": taken})])


def test_a_snapshot_in_the_store_is_where_whoever_decides_next_begins(store: Any) -> None:
    evolved: list[int] = []
    decider = counting(evolved)
    kept = SavedSnapshots[int]("seats", every=3)
    positions = store.append([NewStoreEvent("SeatTaken", tags=["show:1"]) for _ in range(5)]).positions
    assert execute(store, decider, "a", snapshots=kept).state == 5
    assert evolved == list(positions)
    # Too few to be worth a snapshot, so they are read again.
    more = store.append([NewStoreEvent("SeatTaken", tags=["show:1"]) for _ in range(2)]).positions
    evolved.clear()
    for _ in range(2):
        assert execute(store, decider, "b", snapshots=SavedSnapshots("seats", every=3)).state == 7
    assert evolved == [*more, *more]
    # Others of another name or version begin anew, and so do those who ask for something else.
    evolved.clear()
    for other in (SavedSnapshots[int]("others", every=100), SavedSnapshots[int]("seats", version=2, every=100)):
        assert execute(store, decider, "c", snapshots=other).state == 7
    assert evolved == [*positions, *more] * 2
    evolved.clear()
    elsewhere = Decider(lambda who: Query.of(tags=["show:2"]), decider.initial, decider.evolve, decider.decide)
    assert execute(store, elsewhere, "d", snapshots=kept).state == 0
    assert store.forget_snapshots("seats") == 1
    assert execute(store, decider, "e", snapshots=SavedSnapshots("seats", every=100)).state == 7
    assert evolved == [*positions, *more]


def test_of_two_snapshots_the_later_one_stays_and_a_new_version_replaces_the_old(store: Any) -> None:
    query = Query.of(tags=["a"])
    first, second = SavedSnapshots[int]("s").key(query), SavedSnapshots[int]("s", version=2).key(query)
    store.save_snapshot(first, SavedState(7, b"7"))
    store.save_snapshot(first, SavedState(5, b"5"))
    assert store.load_snapshot(first)[:2] == (7, b"7")
    assert store.load_snapshot(second) is None
    store.save_snapshot(second, SavedState(3, b"3"))
    assert store.load_snapshot(first) is None
    assert store.load_snapshot(second)[:2] == (3, b"3")


def test_a_snapshot_that_cannot_be_read_says_what_to_do(store: Any) -> None:
    kept = SavedSnapshots[int]("s")
    store.save_snapshot(kept.key(BOOKING.query("")), SavedState(1, b"{no json"))
    with pytest.raises(InvalidRequest, match="increment the version"):
        execute(store, BOOKING, "a", snapshots=kept)


def test_a_snapshot_that_is_too_large_fails_and_what_was_decided_stands(store: Any) -> None:
    kept = SavedSnapshots[int]("s", every=1, encode=lambda state: bytes(16_777_217))
    store.append(NewStoreEvent("SeatTaken", tags=["show:1"]))
    with pytest.raises(InvalidRequest, match="16"):
        execute(store, BOOKING, "a", snapshots=kept)
    assert store.count() == 2


def test_a_projection_and_its_cursor_are_one_transaction(store: Any) -> None:
    table = f"seat_{next(_numbers)}"
    store.append([NewStoreEvent("SeatTaken", {"n": n}, ["show:1"]) for n in range(6)])
    cursor, failing = f"seats-{next(_numbers)}", [True]

    def handle(connection: Any, events: Sequence[StoreEvent]) -> None:
        connection.execute(f"create table if not exists {table} (n integer primary key)")
        for event in events:
            connection.execute(f"insert into {table} values ({event.data['n']})")
        if failing and events[-1].data["n"] == 3:
            failing.clear()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.process(Query(), handle, cursor=cursor, batch_size=2, stop_when_caught_up=True)
    store.process(Query(), handle, cursor=cursor, batch_size=2, stop_when_caught_up=True)
    got: list[Any] = []

    def look(connection: Any, events: Sequence[StoreEvent]) -> None:
        got.extend(connection.execute(f"select n from {table} order by n").fetchall())

    store.process(Query(), look, cursor=f"look-{next(_numbers)}", batch_size=100, stop_when_caught_up=True)
    assert [n for (n,) in got] == list(range(6))


def test_tries_have_an_end(store: Any) -> None:
    def decide(taken: int, who: str) -> Sequence[NewStoreEvent]:
        store.append(NewStoreEvent("SeatTaken", tags=["show:1"]))
        return [NewStoreEvent("Decided")]

    with pytest.raises(AppendConflict):
        execute(store, Decider(BOOKING.query, BOOKING.initial, BOOKING.evolve, decide), "me", max_tries=3)
    assert store.count() == 3


def test_nothing_decided_is_nothing_appended(store: Any) -> None:
    decision = execute(store, Decider(BOOKING.query, BOOKING.initial, BOOKING.evolve, lambda state, who: []), "me")
    assert decision.appended is None
    assert store.count() == 0


@pytest.mark.parametrize("backend", ["postgres", "sqlite"])
def test_tasks_decide_as_threads_do(backend: str, dsn: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with await aio.connect(dsn) if backend == "postgres" else AsyncSqliteStores(tmp_path) as stores:
            store: Any = await stores.create_store(f"deciding-{next(_numbers)}")
            kept = SavedSnapshots[int]("seats", every=2)
            booked = await asyncio.gather(
                *(execute(store, BOOKING, f"{n}", max_tries=100, snapshots=kept) for n in range(12)),
                return_exceptions=True,
            )
            assert sum(not isinstance(answer, BaseException) for answer in booked) == SEATS
            assert sum(isinstance(answer, SoldOut) for answer in booked) == 12 - SEATS
            assert await store.load_snapshot(kept.key(BOOKING.query(""))) is not None
            seen: list[StoreEvent] = []

            async def handle(connection: Any, events: Sequence[StoreEvent]) -> None:
                await asyncio.sleep(0)
                seen.extend(events)

            await store.process(Query(), handle, cursor=f"all-{next(_numbers)}", stop_when_caught_up=True)
            assert seen == await store.read()

    asyncio.run(run())


def test_projections_that_wait_for_the_writer_leave_threads_to_read_with(tmp_path: Path) -> None:
    """Of a program with few threads: more projections than that, of two files, whose handlers read."""

    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        async with AsyncSqliteStores(tmp_path) as stores:
            opened = [await stores.create_store(name) for name in ("a", "b")]
            counted: list[int] = []
            both_write = asyncio.Barrier(2)

            async def handle(store: Any, connection: Any, events: Sequence[StoreEvent]) -> None:
                # In each file one has the writer, and the others wait for it.
                await both_write.wait()
                counted.append(await store.count())

            for store in opened:
                await store.append([NewStoreEvent("A") for _ in range(3)])
            async with asyncio.timeout(PATIENCE_SECONDS):
                await asyncio.gather(
                    *(
                        store.process(Query(), partial(handle, store), cursor=f"p{n}", stop_when_caught_up=True)
                        for n in range(4)
                        for store in opened
                    )
                )
            assert counted == [3] * 8

    asyncio.run(run())


def test_a_handler_that_appends_to_its_own_file_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.eventstore.sqlite_access.BUSY_SECONDS", 0.1)

    async def run() -> None:
        async with AsyncSqliteStores(tmp_path) as stores:
            store = await stores.create_store("a")
            await store.append(NewStoreEvent("A"))

            async def handle(connection: Any, events: Sequence[StoreEvent]) -> None:
                with pytest.raises(LogUnavailable, match="locked by another writer"):
                    await store.append(NewStoreEvent("B"))

            await store.process(Query(), handle, cursor="p", stop_when_caught_up=True)
            assert await store.count() == 1

    asyncio.run(run())
