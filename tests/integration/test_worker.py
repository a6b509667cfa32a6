"""Do workers run handlers as they promise, on a real Postgres?"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import headwater
from headwater import App, Dead, NewEvent, Retry, Snooze
from patience import PATIENCE_SECONDS


def run_until(
    app: App, dsn: str, finished: Callable[[], bool] | None = None, *, seconds: float = PATIENCE_SECONDS
) -> None:
    """Run an app until `finished` says so, asked after each handler and now and then; fails if it never does."""

    async def main() -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(app.run(dsn, stop=stop))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while finished is not None and not running.done() and not finished():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            stop.set()
            await running

    asyncio.run(main())


def counts(log: headwater.Headwater, queue: str) -> tuple[int, int, int, int]:
    """Ready, processing, done, dead."""
    for one in log.queues():
        if one.name == queue:
            return one.ready, one.processing, one.done, one.dead
    return 0, 0, 0, 0


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_every_event_is_handled_once(log: headwater.Headwater, dsn: str, topic: str, kind: str) -> None:
    log.publish_batch(topic, [NewEvent(n) for n in range(300)])
    app = App()
    seen: list[int] = []
    if kind == "async":

        @app.worker(topic, queue=topic, concurrency=5)
        async def handle(event: headwater.ClaimedEvent) -> None:
            seen.append(event.data)

    else:

        @app.worker(topic, queue=topic, concurrency=5)
        def handle_blocking(event: headwater.ClaimedEvent) -> None:
            seen.append(event.data)

    run_until(app, dsn, lambda: len(seen) == 300)
    assert sorted(seen) == list(range(300))
    assert counts(log, topic) == (0, 0, 300, 0)


def test_events_published_while_it_runs_arrive(log: headwater.Headwater, dsn: str, topic: str) -> None:
    app = App()
    seen: list[int] = []

    @app.worker(topic, queue=topic)
    async def handle(event: headwater.ClaimedEvent) -> None:
        seen.append(event.data)
        if event.data < 20:
            await asyncio.to_thread(log.publish, topic, event.data + 1)

    log.publish(topic, 0)
    run_until(app, dsn, lambda: len(seen) == 21)
    assert seen == list(range(21))


def test_results_and_exceptions_decide_what_becomes_of_an_event(log: headwater.Headwater, dsn: str, topic: str) -> None:
    tries: dict[str, int] = {}
    app = App()

    @app.worker(topic, queue=topic, max_attempts=3, backoff_seconds=0.01, concurrency=3)
    async def handle(event: headwater.ClaimedEvent) -> Any:
        name = event.data
        tries[name] = tries.get(name, 0) + 1
        if name == "raises":
            raise ValueError("no good")
        if name == "retries" and event.attempt < 3:
            return Retry(timedelta(milliseconds=5))
        if name == "dies":
            return Dead("hopeless")
        if name == "snoozes" and tries[name] < 6:
            return Snooze(timedelta(milliseconds=5))
        if name == "nonsense":
            return "what?"
        return None

    log.publish_batch(topic, [NewEvent(name) for name in ("fine", "raises", "retries", "dies", "snoozes", "nonsense")])
    run_until(app, dsn, lambda: counts(log, topic) == (0, 0, 3, 3))
    assert tries == {"fine": 1, "raises": 3, "retries": 3, "dies": 1, "snoozes": 6, "nonsense": 3}
    errors = {letter.last_error for letter in log.dead_letters(topic)}
    assert "ValueError: no good" in errors
    assert "hopeless" in errors
    raised = next(letter for letter in log.dead_letters(topic) if letter.last_error == "ValueError: no good")
    assert [one["attempt"] for one in raised.history] == [1, 2, 3]


def test_a_handler_that_takes_too_long_is_tried_again(log: headwater.Headwater, dsn: str, topic: str) -> None:
    app = App()
    attempts: list[int] = []

    @app.worker(topic, queue=topic, timeout_seconds=0.05, backoff_seconds=0, concurrency=2)
    async def handle(event: headwater.ClaimedEvent) -> None:
        attempts.append(event.attempt)
        if event.attempt == 1:
            await asyncio.Event().wait()

    log.publish(topic, 1)
    run_until(app, dsn, lambda: counts(log, topic)[2] == 1)
    assert attempts == [1, 2]


def test_no_more_handlers_run_at_once_than_allowed(log: headwater.Headwater, dsn: str, topic: str) -> None:
    app = App()
    running = most = finished = 0

    @app.worker(topic, queue=topic, concurrency=4, prefetch=3)
    async def handle(event: headwater.ClaimedEvent) -> None:
        nonlocal running, most, finished
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        finished += 1

    log.publish_batch(topic, [NewEvent(n) for n in range(60)])
    run_until(app, dsn, lambda: finished == 60)
    assert most == 4


def test_a_batch_handler_gets_batches_and_may_fail_events_of_them(
    log: headwater.Headwater, dsn: str, topic: str
) -> None:
    app = App()
    sizes: list[int] = []

    @app.worker(topic, queue=topic, batch=True, prefetch=50, max_attempts=1)
    async def handle(events: list[headwater.ClaimedEvent]) -> Any:
        sizes.append(len(events))
        return {event.position: Dead("odd") for event in events if event.data % 2}

    log.publish_batch(topic, [NewEvent(n) for n in range(200)])
    run_until(app, dsn, lambda: counts(log, topic) == (0, 0, 100, 100))
    assert sizes == [50, 50, 50, 50]


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_a_transactional_handler_has_its_effect_exactly_once(
    log: headwater.Headwater, dsn: str, topic: str, connection: psycopg.Connection, kind: str
) -> None:
    connection.execute(f'create table "effect-{topic}" (n integer)')
    insert = f'insert into "effect-{topic}" values (%s)'
    app = App()
    if kind == "async":

        @app.worker(topic, queue=topic, transactional=True, concurrency=4, backoff_seconds=0)
        async def handle(event: headwater.ClaimedEvent, connection: psycopg.AsyncConnection[Any]) -> Any:
            await connection.execute(insert, (event.data,))
            if event.attempt == 1 and event.data % 3 == 0:
                raise RuntimeError("after the effect")
            return Retry(timedelta(0)) if event.attempt == 1 and event.data % 3 == 1 else None

    else:

        @app.worker(topic, queue=topic, transactional=True, concurrency=4, backoff_seconds=0)
        def handle_blocking(event: headwater.ClaimedEvent, connection: psycopg.Connection[Any]) -> Any:
            connection.execute(insert, (event.data,))
            if event.attempt == 1 and event.data % 3 == 0:
                raise RuntimeError("after the effect")
            return Retry(timedelta(0)) if event.attempt == 1 and event.data % 3 == 1 else None

    log.publish_batch(topic, [NewEvent(n) for n in range(90)])
    run_until(app, dsn, lambda: counts(log, topic) == (0, 0, 90, 0))
    rows = connection.execute(f'select n from "effect-{topic}" order by n').fetchall()
    assert [n for (n,) in rows] == list(range(90))


def test_ordered_keys_are_handled_in_order_through_failures(log: headwater.Headwater, dsn: str, topic: str) -> None:
    app = App()
    done: dict[str | None, list[int]] = {}

    @app.worker(topic, queue=topic, ordered_keys=True, concurrency=8, prefetch=5, backoff_seconds=0.005)
    async def handle(event: headwater.ClaimedEvent) -> None:
        await asyncio.sleep(0)
        if event.attempt == 1 and event.data % 7 == 0:
            raise RuntimeError("first try of a seventh")
        done.setdefault(event.key_text, []).append(event.data)

    log.publish_batch(topic, [NewEvent(n, key=f"k{n % 5}") for n in range(150)])
    run_until(app, dsn, lambda: sum(map(len, done.values())) == 150)
    assert done == {f"k{k}": list(range(k, 150, 5)) for k in range(5)}


def test_middleware_goes_around_every_handler_outermost_first(log: headwater.Headwater, dsn: str, topic: str) -> None:
    app = App()
    trace: list[str] = []

    @app.middleware
    async def outer(event: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
        trace.append("outer")
        return await call_next(event)

    @app.middleware
    async def inner(event: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
        trace.append("inner")
        return await call_next(event)

    @app.worker(topic, queue=topic)
    async def handle(event: headwater.ClaimedEvent) -> None:
        trace.append("handler")

    log.publish(topic, 1)
    run_until(app, dsn, lambda: len(trace) == 3)
    assert trace == ["outer", "inner", "handler"]


def test_a_stop_lets_running_handlers_finish_and_gives_the_rest_back(
    log: headwater.Headwater, dsn: str, topic: str
) -> None:
    log.publish_batch(topic, [NewEvent(n) for n in range(50)])
    app = App()
    started = threading.Event()
    finished: list[int] = []

    @app.worker(topic, queue=topic, prefetch=20)
    async def handle(event: headwater.ClaimedEvent) -> None:
        started.set()
        await asyncio.sleep(0.05)
        finished.append(event.data)

    run_until(app, dsn, started.is_set)
    ready, processing, done, dead = counts(log, topic)
    assert done == len(finished) >= 1
    assert (ready + done, processing, dead) == (50, 0, 0)
    # Given back, not counted as a try.
    assert all(one.attempts == 0 for one in log.deliveries(topic, status="ready"))


def test_a_handler_that_outlives_the_grace_is_cancelled_and_its_event_given_back(
    log: headwater.Headwater, dsn: str, topic: str
) -> None:
    log.publish(topic, 1)
    app = App()
    started = asyncio.Event()

    @app.worker(topic, queue=topic)
    async def handle(event: headwater.ClaimedEvent) -> None:
        started.set()
        await asyncio.Event().wait()

    async def main() -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(app.run(dsn, stop=stop, grace_seconds=0.05))
        await asyncio.wait_for(started.wait(), PATIENCE_SECONDS)
        stop.set()
        await asyncio.wait_for(running, PATIENCE_SECONDS)

    asyncio.run(main())
    assert counts(log, topic) == (1, 0, 0, 0)


def test_a_long_handler_keeps_its_lease(log: headwater.Headwater, dsn: str, topic: str) -> None:
    log.publish(topic, 1)
    app = App()
    attempts: list[int] = []

    @app.worker(topic, queue=topic, lease_seconds=0.3, concurrency=2)
    async def handle(event: headwater.ClaimedEvent) -> None:
        attempts.append(event.attempt)
        await asyncio.sleep(1.2)

    run_until(app, dsn, lambda: counts(log, topic)[2] == 1)
    assert attempts == [1]


def test_a_cron_event_is_published_once_by_several_processes(
    log: headwater.Headwater, dsn: str, topic: str, connection: psycopg.Connection
) -> None:
    app = App()
    app.cron_schedule(topic, "0 3 * * *", topic, NewEvent({"report": "nightly"}, type="Tick"))

    @app.worker(topic, queue=topic)
    async def handle(event: headwater.ClaimedEvent) -> None: ...

    run_until(app, dsn)
    (declared,) = [one for one in log.cron_schedules() if one.name == topic]
    assert declared.next_at > datetime.now(UTC)
    due = datetime(2026, 1, 1, 3, tzinfo=UTC)
    connection.execute("update headwater_internal.cron_schedule set next_at = %s where name = %s", (due, topic))
    others = [headwater.connect(dsn) for _ in range(4)]
    threads = [threading.Thread(target=lambda o=other: [o.run_maintenance() for _ in range(3)]) for other in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    for other in others:
        other.close()
    (event,) = log.read(topic)
    assert (event.data, event.type) == ({"report": "nightly"}, "Tick")
    assert event.headers == {"cron": topic, "due_at": "2026-01-01T03:00:00+00:00"}
    (declared,) = [one for one in log.cron_schedules() if one.name == topic]
    assert declared.next_at > datetime.now(UTC)
    assert declared.last_at == due
    assert log.pause_cron_schedule(topic)
    assert log.delete_cron_schedule(topic)
    assert not log.delete_cron_schedule(topic)


def test_an_app_without_workers_says_so(dsn: str) -> None:
    with pytest.raises(headwater.InvalidRequest, match="no workers"):
        asyncio.run(App().run(dsn))


def test_a_worker_with_a_pattern_gets_the_events_of_its_routing_keys(
    log: headwater.Headwater, dsn: str, topic: str
) -> None:
    log.publish_batch(topic, [NewEvent(key, routing_key=key) for key in ("eu.de", "us.ny", "eu.fr")])
    log.publish(topic, "none")
    app = App()
    seen: list[str] = []

    @app.worker(topic, queue=topic, pattern="eu.*")
    async def handle(event: headwater.ClaimedEvent) -> None:
        seen.append(event.data)

    asyncio.run(app.drain(dsn))
    assert seen == ["eu.de", "eu.fr"]
    with pytest.raises(headwater.InvalidRequest, match="needs the topics"):
        app.worker(queue=topic, pattern="eu.*")


def test_bad_cron_expressions_and_zones_are_refused(log: headwater.Headwater, topic: str) -> None:
    with pytest.raises(headwater.InvalidRequest, match="cron"):
        log.set_cron_schedule("p", "every day", topic, 1)
    with pytest.raises(headwater.InvalidRequest, match="time zone"):
        log.set_cron_schedule("p", "* * * * *", topic, 1, time_zone="Mars/Olympus")
