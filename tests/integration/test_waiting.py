"""Does a process wait for all of its queues and followers at the cost of one, on a real Postgres?"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

import headwater
from headwater import App, aio
from headwater.calls import Call
from headwater.database import connection as database_connection
from headwater.log import steps as log_steps

# Far longer than any of these tests takes.
LONG = 10_000.0
WAIT_SECONDS = 60.0


@pytest.fixture(autouse=True)
def woken_only_by_the_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiter looks again by itself, so that only the watcher can wake it."""
    monkeypatch.setattr(log_steps, "MIN_RECLAIM_SECONDS", LONG)
    monkeypatch.setattr(log_steps, "MAX_RECLAIM_SECONDS", LONG)
    monkeypatch.setattr(log_steps, "IDLE_SAVE_SECONDS", LONG)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each SQL statement was run."""
    counted: Counter[str] = Counter()
    rows_of = database_connection.rows_of

    async def counting(cursor: Any, call: Call[Any]) -> list[Any]:
        counted[call.sql] += 1
        return await rows_of(cursor, call)

    monkeypatch.setattr(database_connection, "rows_of", counting)
    return counted


async def reached(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, WAIT_SECONDS)

    asyncio.run(bounded())


def polls(calls: Counter[str]) -> int:
    return sum(count for sql, count in calls.items() if "growth(" in sql)


def test_a_hundred_idle_queues_and_followers_are_polled_for_as_one(
    log: headwater.Headwater, dsn: str, topic: str, calls: Counter[str]
) -> None:
    handled: Counter[str] = Counter()
    followed: Counter[str] = Counter()
    app = App()
    for number in range(100):

        @app.worker(topic, queue=f"{topic}-{number}")
        async def handle(event: headwater.ClaimedEvent, name: str = f"{topic}-{number}") -> None:
            handled[name] += 1

    async def follow(other: aio.AsyncHeadwater, cursor: str) -> None:
        async for _ in other.follow(topic, cursor=cursor):
            followed[cursor] += 1

    async def test() -> None:
        stop = asyncio.Event()
        async with await aio.connect(dsn, pool_size=4) as other:
            running = asyncio.create_task(app.run(other, stop=stop))
            followers = [asyncio.create_task(follow(other, f"{topic}-{number}")) for number in range(100)]

            async def idle() -> int:
                """Wait until nothing but the watcher runs, and return how many calls others have made in the time
                of 20 of their polls."""
                while True:
                    before, start = calls.copy(), polls(calls)
                    await reached(lambda start=start: polls(calls) >= start + 20)  # type: ignore[misc]
                    made = calls - before
                    per_waiter = [sql for sql in made if "claim" in sql or "log_state(" in sql or "cursor(" in sql]
                    if not per_waiter:
                        return sum(made.values())

            # Twenty polls of the head. The others are the looks at all queues and cursors, reads of the epoch, and the
            # maintenance.
            assert await idle() < 60
            await other.publish(topic, {"n": 1})
            await reached(lambda: len(handled) == 100 and len(followed) == 100)
            assert await idle() < 60
            for follower in followers:
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)
            stop.set()
            await running

    run(test())
    assert set(handled.values()) == set(followed.values()) == {1}


ACTIONS = ["resume", "rewind", "bind", "retry", "redrive", "room", "held back"]


@pytest.mark.parametrize("action", ACTIONS)
def test_an_idle_worker_is_woken_by(log: headwater.Headwater, dsn: str, topic: str, action: str) -> None:
    """Whatever lets a queue hand out an event, without that the log grows at that moment."""
    seen: list[Any] = []
    failures = 1 if action in ("retry", "redrive") else 0
    app = App()
    earlier = f"{topic}-earlier"
    log.create_topic(earlier)
    log.publish(earlier, "earlier")

    @app.worker(
        topic,
        queue=topic,
        max_attempts=1 if action == "redrive" else 5,
        backoff_seconds=0.5,
        max_in_flight=1 if action == "room" else None,
    )
    async def handle(event: headwater.ClaimedEvent) -> None:
        seen.append(event.data)
        if len(seen) <= failures:
            raise RuntimeError("once")

    async def idle(process: aio.AsyncHeadwater) -> None:
        """Wait until all of its workers wait."""
        await reached(lambda: process.watcher.looks > 2 and len(process.watcher._waiters) == 2)
        looks = process.watcher.looks
        await reached(lambda: process.watcher.looks > looks + 1 and len(process.watcher._waiters) == 2)

    async def test(monkeypatch: pytest.MonkeyPatch) -> None:
        handles: list[aio.AsyncHeadwater] = []
        connect = aio.connect

        async def connected(*given: Any, **options: Any) -> aio.AsyncHeadwater:
            handles.append(await connect(*given, **options))
            return handles[-1]

        monkeypatch.setattr(aio, "connect", connected)
        stop = asyncio.Event()
        running = asyncio.create_task(app.run(dsn, stop=stop))
        await reached(lambda: bool(handles))
        await idle(handles[0])
        if action == "resume":
            log.pause_queue(topic)
            log.publish(topic, "x")
            await idle(handles[0])
            assert seen == []
            log.resume_queue(topic)
            await reached(lambda: seen == ["x"])
        elif action == "rewind":
            log.publish(topic, "x")
            await reached(lambda: seen == ["x"])
            await idle(handles[0])
            log.rewind_queue(topic, position=0)
            await reached(lambda: seen == ["x", "x"])
        elif action == "bind":
            log.bind(topic, topic=earlier, from_position=0)
            log.rewind_queue(topic, position=0)
            await reached(lambda: seen == ["earlier"])
        elif action == "retry":
            log.publish(topic, "x")
            await reached(lambda: seen == ["x", "x"])
        elif action == "redrive":
            log.publish(topic, "x")
            await reached(lambda: log.queues([topic])[0].dead == 1)
            await idle(handles[0])
            log.redrive(topic)
            await reached(lambda: seen == ["x", "x"])
        elif action == "room":
            log.pause_queue(topic)
            log.publish_batch(topic, [headwater.NewEvent("x"), headwater.NewEvent("y")])
            with psycopg.connect(dsn) as another:
                # In one transaction: the queue is resumed with its only room taken.
                another.execute("select headwater.resume_queue(%s)", (topic,))
                claimed = another.execute("select token from headwater.claim(%s, 'another')", (topic,)).fetchall()
            ((token,),) = claimed
            await idle(handles[0])
            assert seen == []
            log.settle(headwater.Lease(topic, token, datetime.now(UTC), ()), {}, rest_done=True)
            await reached(lambda: seen == ["y"])
        else:
            with psycopg.connect(dsn) as slow:
                # Its positions are below those of the event that follows.
                slow.execute("select headwater.publish(%s, '\"slow\"')", (topic,))
                log.publish(topic, "x")
                await idle(handles[0])
                assert seen == []
                slow.rollback()
            await reached(lambda: seen == ["x"])
        stop.set()
        await running

    with pytest.MonkeyPatch.context() as patch:
        run(test(patch))


def test_a_follower_is_woken_when_its_cursor_is_set(log: headwater.Headwater, dsn: str, topic: str) -> None:
    log.publish(topic, "x")
    seen: list[Any] = []

    async def test() -> None:
        async with await aio.connect(dsn) as other:

            async def follow() -> None:
                async for event in other.follow(topic, cursor=topic):
                    seen.append(event.data)  # noqa: PERF401

            follower = asyncio.create_task(follow())
            await reached(lambda: seen == ["x"])
            await reached(lambda: other.watcher.looks > 3)
            log.set_cursor(topic, position=0)
            await reached(lambda: seen == ["x", "x"])
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)

    run(test())


def test_waiters_survive_the_end_of_their_connections(log: headwater.Headwater, dsn: str, topic: str) -> None:
    seen: list[Any] = []

    async def test() -> None:
        async with await aio.connect(dsn, application_name=topic) as other:

            async def follow() -> None:
                async for event in other.follow(topic, from_end=True):
                    seen.append(event.data)  # noqa: PERF401

            followers = [asyncio.create_task(follow()) for _ in range(3)]
            await reached(lambda: len(other.watcher._waiters) == 3)
            for number in range(5):
                with psycopg.connect(dsn, autocommit=True) as admin:
                    ended = admin.execute(
                        "select count(pg_terminate_backend(pid)) from pg_stat_activity where application_name = %s",
                        (topic,),
                    ).fetchone()
                assert ended is not None
                log.publish(topic, number)
                await reached(lambda: seen.count(number) == 3)  # noqa: B023
            for follower in followers:
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)

    run(test())
    assert len(seen) == 15


def test_a_closed_handle_leaves_no_task(dsn: str, topic: str) -> None:
    async def test() -> None:
        other = await aio.connect(dsn)
        waiting = asyncio.create_task(other.watcher.waiter(queue=topic).wait(LONG))
        await reached(lambda: other.watcher.version > 0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await other.close()
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("log ")]

    run(test())
