"""Do cursors keep their promises on a real Postgres?"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import headwater
from headwater import Event, NewEvent, aio
from patience import PATIENCE_SECONDS

Until = Callable[[Callable[[], Any]], Any]
_numbers = itertools.count()


@pytest.fixture
def cursor() -> str:
    """A name that no other test uses."""
    return f"cursor-{next(_numbers)}"


@pytest.fixture
def filled(log: headwater.Headwater, topic: str) -> list[int]:
    """The positions of ten events, numbered."""
    positions = log.publish_batch(topic, [NewEvent(n) for n in range(10)])
    return [position for position in positions if position is not None]


@pytest.fixture
def effects(connection: psycopg.Connection) -> Iterator[Callable[[], list[int]]]:
    """A table that handlers write to, and what it holds."""
    connection.execute("create table effect (n integer, place serial)")
    yield lambda: [n for (n,) in connection.execute("select n from effect order by place")]
    connection.execute("drop table effect")


def position_of(log: headwater.Headwater, cursor: str) -> int:
    (found,) = [c for c in log.cursors() if c.name == cursor]
    return found.position


def caught_up(log: headwater.Headwater, topic: str | None, cursor: str, **options: Any) -> list[Any]:
    return [event.data for event in log.follow(topic, cursor=cursor, stop_when_caught_up=True, **options)]


def test_a_follower_goes_on_where_its_cursor_is(
    log: headwater.Headwater, topic: str, filled: list[int], cursor: str
) -> None:
    assert caught_up(log, topic, cursor) == list(range(10))
    assert caught_up(log, topic, cursor) == []
    log.publish(topic, 10)
    assert caught_up(log, topic, cursor, after=0) == [10]


def test_the_cursor_is_saved_when_the_next_batch_is_asked_for(
    log: headwater.Headwater, topic: str, filled: list[int], cursor: str
) -> None:
    follower = log.follow_batches(topic, cursor=cursor, batch_size=4)
    next(follower)
    assert position_of(log, cursor) == 0
    next(follower)
    assert position_of(log, cursor) == filled[3]
    follower.close()
    assert caught_up(log, topic, cursor) == list(range(4, 10))


def test_readers_have_cursors_of_their_own(
    log: headwater.Headwater, topic: str, filled: list[int], cursor: str
) -> None:
    assert caught_up(log, topic, f"{cursor}-a") == list(range(10))
    assert caught_up(log, topic, f"{cursor}-b", after=filled[4]) == list(range(5, 10))
    log.publish(topic, 10)
    assert caught_up(log, topic, f"{cursor}-a") == [10]
    assert caught_up(log, topic, f"{cursor}-b") == [10]


def test_a_cursor_is_rewound_to_a_position_and_to_a_time(
    log: headwater.Headwater, topic: str, filled: list[int], cursor: str
) -> None:
    events = log.read(topic)
    caught_up(log, topic, cursor)
    assert log.set_cursor(cursor, position=filled[6]) == filled[6]
    assert caught_up(log, topic, cursor) == [7, 8, 9]
    log.set_cursor(cursor, since=events[0].published_at)
    assert caught_up(log, topic, cursor) == list(range(10))
    log.set_cursor(cursor, since=events[-1].published_at + timedelta(seconds=1))
    assert caught_up(log, topic, cursor) == []
    with pytest.raises(headwater.InvalidRequest, match="exactly one"):
        log.set_cursor(cursor)


def test_history_is_replayed_into_a_new_cursor(
    log: headwater.Headwater, topic: str, filled: list[int], cursor: str
) -> None:
    caught_up(log, topic, cursor)
    log.set_cursor(f"{cursor}-replay", position=0, topics=topic)
    assert caught_up(log, topic, f"{cursor}-replay") == list(range(10))
    assert position_of(log, cursor) == position_of(log, f"{cursor}-replay")


def test_a_live_follower_notices_that_its_cursor_was_rewound(
    log: headwater.Headwater, topic: str, filled: list[int], cursor: str
) -> None:
    follower = log.follow(topic, cursor=cursor)
    assert [next(follower).data for _ in range(10)] == list(range(10))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, follower)
        assert not waiting.done()
        log.set_cursor(cursor, position=filled[7])
        assert waiting.result(timeout=PATIENCE_SECONDS).data in (8, 9)
    follower.close()


def test_a_follower_whose_cursor_was_deleted_ends(
    log: headwater.Headwater, topic: str, filled: list[int], cursor: str
) -> None:
    busy = log.follow(topic, cursor=cursor, batch_size=1)
    next(busy)
    assert log.delete_cursor(cursor)
    with pytest.raises(headwater.CursorMoved):
        next(busy)
    idle = log.follow(topic, cursor=cursor)
    for _ in range(10):
        next(idle)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, idle)
        assert log.delete_cursor(cursor)
        with pytest.raises(headwater.CursorMoved):
            waiting.result(timeout=PATIENCE_SECONDS)
    assert cursor not in [c.name for c in log.cursors()]
    assert not log.delete_cursor(cursor)


def test_advancing_is_part_of_the_callers_transaction(
    log: headwater.Headwater,
    topic: str,
    filled: list[int],
    cursor: str,
    connection: psycopg.Connection,
    effects: Callable[[], list[int]],
) -> None:
    start = log.open_cursor(cursor, topics=topic, start_after=filled[0])
    assert start == filled[0]
    with connection.transaction(force_rollback=True):
        connection.execute("insert into effect values (1)")
        log.advance_cursor(cursor, from_position=start, to_position=filled[1], connection=connection)
    assert (effects(), position_of(log, cursor)) == ([], filled[0])
    with connection.transaction():
        connection.execute("insert into effect values (1)")
        log.advance_cursor(cursor, from_position=start, to_position=filled[1], connection=connection)
    assert (effects(), position_of(log, cursor)) == ([1], filled[1])
    with pytest.raises(headwater.CursorMoved) as caught, connection.transaction():
        connection.execute("insert into effect values (1)")
        log.advance_cursor(cursor, from_position=start, to_position=filled[1], connection=connection)
    assert caught.value.actual_position == filled[1]
    assert effects() == [1]


def test_a_cursor_does_not_advance_backwards(
    log: headwater.Headwater, topic: str, filled: list[int], cursor: str
) -> None:
    log.open_cursor(cursor, start_after=filled[5])
    with pytest.raises(headwater.CursorMoved):
        log.advance_cursor(cursor, from_position=filled[5], to_position=filled[4])
    with pytest.raises(headwater.CursorMoved) as caught:
        log.advance_cursor("nobody", from_position=0, to_position=1)
    assert caught.value.actual_position is None


def test_what_a_handler_did_before_it_failed_is_undone_and_done_once(
    log: headwater.Headwater, topic: str, filled: list[int], cursor: str, effects: Callable[[], list[int]]
) -> None:
    failing = [5]

    def handle(connection: psycopg.Connection[Any], events: Sequence[Event]) -> None:
        for event in events:
            connection.execute("insert into effect values (%s)", (event.data,))
            if event.data in failing:
                failing.remove(event.data)
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        log.process(topic, handle, cursor=cursor, batch_size=4, stop_when_caught_up=True)
    assert effects() == [0, 1, 2, 3]
    log.process(topic, handle, cursor=cursor, batch_size=4, stop_when_caught_up=True)
    assert effects() == list(range(10))


def test_a_handler_whose_connection_is_lost_is_repeated_and_its_effect_is_there_once(
    log: headwater.Headwater,
    topic: str,
    filled: list[int],
    cursor: str,
    connection: psycopg.Connection,
    effects: Callable[[], list[int]],
) -> None:
    killed = []

    def handle(own: psycopg.Connection[Any], events: Sequence[Event]) -> None:
        for event in events:
            own.execute("insert into effect values (%s)", (event.data,))
        if len(killed) < 2:
            killed.append(own.info.backend_pid)
            connection.execute("select pg_terminate_backend(%s, 5000)", (killed[-1],))
            if len(killed) == 1:
                own.execute("select 1")
            # The second time the loss shows at the commit.

    log.process(topic, handle, cursor=cursor, batch_size=4, stop_when_caught_up=True)
    assert len(killed) == 2
    assert effects() == list(range(10))


def test_an_async_handler_has_its_effects_once(
    dsn: str, topic: str, filled: list[int], cursor: str, effects: Callable[[], list[int]]
) -> None:
    async def handle(connection: psycopg.AsyncConnection[Any], events: Sequence[Event]) -> None:
        for event in events:
            await connection.execute("insert into effect values (%s)", (event.data,))

    async def process() -> None:
        async with await aio.connect(dsn) as log:
            await log.process(topic, handle, cursor=cursor, batch_size=3, stop_when_caught_up=True)

    asyncio.run(process())
    assert effects() == list(range(10))


def test_processors_that_share_a_cursor_never_apply_an_event_twice(
    log: headwater.Headwater, topic: str, cursor: str, effects: Callable[[], list[int]]
) -> None:
    log.publish_batch(topic, [NewEvent(n) for n in range(300)])

    def handle(connection: psycopg.Connection[Any], events: Sequence[Event]) -> None:
        with connection.cursor() as writing:
            writing.executemany("insert into effect values (%s)", [(event.data,) for event in events])

    start = threading.Barrier(4)

    def process() -> None:
        start.wait(PATIENCE_SECONDS)
        log.process(topic, handle, cursor=cursor, batch_size=7, stop_when_caught_up=True)

    with ThreadPoolExecutor(4) as pool:
        for processor in [pool.submit(process) for _ in range(4)]:
            processor.result(timeout=PATIENCE_SECONDS)
    assert effects() == list(range(300))


def test_a_follower_that_stops_leaves_its_cursor_behind_the_whole_log(
    log: headwater.Headwater, topic: str, filled: list[int], cursor: str
) -> None:
    """Or a cursor that must not lose, on a quiet topic, would hold up the retention of busy ones."""
    other = log.create_topic(f"{topic}-busy").name
    last = log.publish(other, 0)
    caught_up(log, topic, cursor)
    assert position_of(log, cursor) == last


def test_a_cursor_says_what_it_has_yet_to_read(
    log: headwater.Headwater, topic: str, filled: list[int], cursor: str
) -> None:
    log.set_cursor(cursor, position=filled[3], topics=topic, holds_retention=True)
    (found,) = [c for c in log.cursors() if c.name == cursor]
    assert found.topics == (topic,)
    assert found.holds_retention
    assert (found.lag_events, found.lag_is_more) == (len(filled) - 4, False)
    assert found.oldest_unread_age is not None
    caught_up(log, topic, cursor)
    (found,) = [c for c in log.cursors() if c.name == cursor]
    assert (found.lag_events, found.oldest_unread_age, found.holds_retention) == (0, None, True)


@pytest.mark.parametrize("name", ["", "n" * 201, "a\x00b"])
def test_a_name_that_cannot_be_is_refused(log: headwater.Headwater, name: str) -> None:
    with pytest.raises(headwater.InvalidRequest):
        log.open_cursor(name)
    with pytest.raises(headwater.InvalidRequest):
        log.set_cursor(name, position=0)


def test_a_negative_position_is_refused(log: headwater.Headwater, cursor: str) -> None:
    with pytest.raises(headwater.InvalidRequest, match="not negative"):
        log.set_cursor(cursor, position=-1)
