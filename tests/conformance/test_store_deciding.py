"""Do decisions hold when others decide at the same time?"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headwater import aio
from headwater.errors import AppendConflict
from headwater.store import Decider, NewStoreEvent, Query, Snapshots, SqliteStores, StoreEvent, execute, execute_async

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


def test_tasks_decide_as_threads_do(dsn: str) -> None:
    async def run() -> None:
        async with await aio.connect(dsn) as log:
            store = await log.create_store(f"deciding-{next(_numbers)}")
            booked = await asyncio.gather(
                *(execute_async(store, BOOKING, f"{n}", max_tries=100) for n in range(12)), return_exceptions=True
            )
            assert sum(not isinstance(answer, BaseException) for answer in booked) == SEATS
            assert sum(isinstance(answer, SoldOut) for answer in booked) == 12 - SEATS

    asyncio.run(run())
