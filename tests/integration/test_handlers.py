"""Do handlers of SQL subscriptions get batches, timeouts, delays and parts as they ask for, and end as dead letters?"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import httpx
import psycopg
import pytest
from typer.testing import CliRunner

import headwater
from headwater import App, Dead, NewEvent, Retry, aio
from headwater.cli import app as cli
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import STOPPED_FILTERS
from http_server import http_server
from patience import PATIENCE_SECONDS


def run_until(app: App, dsn: str, finished: Callable[[], bool]) -> None:
    async def main() -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(app.run(dsn, stop=stop, grace_seconds=5))
        async with asyncio.timeout(PATIENCE_SECONDS):
            # In a thread: it may wait for a row that the app, which runs on this loop, has locked.
            while not running.done() and not await asyncio.to_thread(finished):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            stop.set()
            await running

    asyncio.run(main())


def of(topic: str) -> tuple[str, str, dict[str, str]]:
    """Queue, filter and params for the events of a topic."""
    return topic, "e.topic = s.params ->> 'topic'", {"topic": topic}


def test_a_batch_handler_gets_its_events_in_order_and_fails_some_of_them(
    log: headwater.Headwater, dsn: str, topic: str
) -> None:
    app = App()
    got: list[list[int]] = []

    @app.subscriber(*of(topic), batch=True, batch_size=40)
    async def take(events: list[headwater.Event]) -> Any:
        got.append([event.data for event in events])
        return {event.position: Retry(timedelta(0)) for event in events if event.data == 7 and len(got[-1]) > 1}

    log.subscribe(*of(topic))
    log.publish_batch(topic, [NewEvent(n) for n in range(100)])
    run_until(app, dsn, lambda: sum(map(len, got)) == 101)
    assert [n for part in got[:3] for n in part] == list(range(100))
    assert max(map(len, got)) == 40
    assert got[3] == [7]


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_a_handler_that_hangs_is_a_failed_attempt_and_the_queue_goes_on(
    log: headwater.Headwater, dsn: str, topic: str, kind: str
) -> None:
    app = App()
    got: list[int] = []
    let_go = threading.Event()

    async def hangs(event: headwater.Event) -> None:
        got.append(event.data)
        if event.data == 1:
            await asyncio.sleep(3600)

    def blocks(event: headwater.Event) -> None:
        got.append(event.data)
        if event.data == 1:
            let_go.wait(PATIENCE_SECONDS)

    handler: Any = hangs if kind == "async" else blocks
    app.subscriber(*of(topic), timeout_seconds=0.2, retry_delays=[0.01], name="hangs")(handler)
    log.subscribe(*of(topic))
    log.publish_batch(topic, [NewEvent(n) for n in range(3)])
    try:
        run_until(app, dsn, lambda: bool(log.dead_letters(topic)) and 2 in got)
    finally:
        let_go.set()
    (letter,) = log.dead_letters(topic)
    assert (letter.attempts, letter.last_error) == (2, "timed out after 0.2 s")
    assert sorted(got) == [0, 1, 1, 2]


def test_retry_delays_are_the_handlers_own_and_then_it_gives_up(
    log: headwater.Headwater, dsn: str, topic: str, connection: psycopg.Connection
) -> None:
    app = App()
    tries: list[int] = []

    @app.subscriber(*of(topic), retry_delays=[0, 3600])
    async def fails(event: headwater.Event) -> None:
        tries.append(event.data)
        raise RuntimeError("no")

    log.subscribe(*of(topic))
    log.alter_queue(topic, max_attempts=1)
    log.publish(topic, 1)

    def waits() -> list[Any]:
        return connection.execute(
            "select attempt, extract(epoch from due_at - now())::float8 from headwater_internal.subscription_retry "
            "where attempt = 2 and due_at > now() + interval '50 min'"
        ).fetchall()

    run_until(app, dsn, lambda: bool(waits()))
    assert len(tries) == 2
    connection.execute("update headwater_internal.subscription_retry set due_at = now()")
    run_until(app, dsn, lambda: bool(log.dead_letters(topic)))
    assert len(tries) == 3


def test_parts_of_a_batch_fail_independently(log: headwater.Headwater, dsn: str, topic: str) -> None:
    app = App()
    calls: list[list[tuple[str, int]]] = []

    @app.subscriber(*of(topic), batch=True, split_by=lambda event: event.key, concurrency=4, retry_delays=[0])
    async def take(events: list[headwater.Event]) -> None:
        calls.append([(event.key_text or "", event.data) for event in events])
        if events[0].key == b"bad":
            raise RuntimeError("this part only")

    log.subscribe(*of(topic))
    log.publish_batch(topic, [NewEvent(n, key=("good", "bad", "fine")[n % 3]) for n in range(9)])
    run_until(app, dsn, lambda: len(log.dead_letters(topic)) == 3)
    assert sorted(calls) == sorted(
        [
            [(key, n) for n in range(9) if ("good", "bad", "fine")[n % 3] == key]
            for key in ("good", "bad", "fine", "bad")
        ]
    )
    assert {letter.key for letter in log.dead_letters(topic)} == {b"bad"}


def test_a_split_that_raises_is_a_failed_attempt(log: headwater.Headwater, dsn: str, topic: str) -> None:
    app = App()

    @app.subscriber(*of(topic), split_by=lambda event: event.data["missing"], retry_delays=[])
    async def take(event: headwater.Event) -> None:
        raise AssertionError("never called")

    log.subscribe(*of(topic))
    log.publish(topic, {})
    run_until(app, dsn, lambda: bool(log.dead_letters(topic)))
    assert "split_by: KeyError" in (log.dead_letters(topic)[0].last_error or "")


def test_what_is_fired_and_forgotten_holds_nobody_up_and_is_not_tried_again(
    log: headwater.Headwater, dsn: str, topic: str
) -> None:
    app = App()
    fired: list[int] = []
    most = running = 0
    done = False

    @app.subscriber(*of(topic), fire_and_forget=True, concurrency=3, name="loose")
    async def loose(event: headwater.Event) -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        fired.append(event.data)
        while not done and len(fired) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        running -= 1
        raise RuntimeError("nobody waits")

    log.subscribe(*of(topic))
    log.publish_batch(topic, [NewEvent(n) for n in range(10)])
    run_until(app, dsn, lambda: len(fired) == 10 and running == 0)
    done = True
    assert most == 3
    assert sorted(fired) == list(range(10))
    assert log.dead_letters(topic) == []
    assert log.read_next(topic, reader="after").events == ()


def test_a_subscriber_that_is_declared_while_the_app_runs_is_taken_up(
    log: headwater.Headwater, dsn: str, topic: str
) -> None:
    app = App()
    first: list[int] = []
    later: list[int] = []
    declared = published = False

    @app.subscriber(*of(topic), name="first")
    async def take(event: headwater.Event) -> None:
        first.append(event.data)

    async def add(event: headwater.Event) -> None:
        later.append(event.data)

    log.subscribe(*of(topic))
    log.publish(topic, 0)

    def finished() -> bool:
        nonlocal declared, published
        if first and not declared:
            declared = True
            app.subscriber(topic, "e.topic = s.params ->> 'topic' and e.data > '0'", {"topic": topic}, name="l")(add)
        if len(log.subscriptions(topic)) == 2 and not published:
            published = True
            log.publish(topic, 1)
        return later == [1] and 1 in first

    run_until(app, dsn, finished)


def test_an_iterator_acknowledges_by_asking_for_the_next(log: headwater.Headwater, dsn: str, topic: str) -> None:
    log.subscribe(*of(topic))
    log.publish_batch(topic, [NewEvent(n) for n in range(6)])

    async def some(count: int) -> list[int]:
        found: list[int] = []
        async with await aio.connect(dsn) as own:
            events = own.subscribed(*of(topic))
            async for event in events:
                found.append(event.data)
                if len(found) == count:
                    break
            await events.aclose()  # type: ignore[attr-defined]
        return found

    assert asyncio.run(asyncio.wait_for(some(3), PATIENCE_SECONDS)) == [0, 1, 2]
    # The third was in hand when the loop was left.
    assert asyncio.run(asyncio.wait_for(some(4), PATIENCE_SECONDS)) == [2, 3, 4, 5]
    found = []
    for event in log.subscribed(*of(topic)):
        found.append(event.data)
        if event.data == 5:
            log.publish(topic, 6)
        if event.data == 6:
            break
    assert found == [5, 6]


def test_an_iterator_ends_with_its_subscription_and_survives_lost_connections(
    log: headwater.Headwater, dsn: str, topic: str, connection: psycopg.Connection
) -> None:
    found: list[int] = []

    def take() -> None:
        with headwater.connect(dsn, application_name="an iterator") as own:
            for event in own.subscribed(*of(topic), expires_after=timedelta(seconds=1)):
                found.append(event.data)
                if event.data < 5:
                    connection.execute(
                        "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'an iterator'"
                    )
                    if found.count(event.data) == 1:
                        log.publish(topic, event.data + 1)
                else:
                    log.unsubscribe(log.subscriptions(topic)[0].id)

    log.subscribe(*of(topic))
    log.publish(topic, 0)
    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive(), found
    assert list(dict.fromkeys(found)) == list(range(6))


def test_an_event_to_one_subscription_goes_to_no_other(log: headwater.Headwater, topic: str) -> None:
    first = log.subscribe(*of(topic))
    second = log.subscribe(topic, "false")
    position = log.send_to_subscription(second, topic, {"for": "you"}, type="Note")
    everyone = log.publish(topic, {})
    nobody = log.publish(topic, {}, headers={"headwater-subscription": "x"})
    found = {one.event.position: one.subscription_ids for one in log.read_next(topic, reader="me").events}
    assert found == {position: (second,), everyone: (first,)}
    assert [event.position for event in log.read(topic)] == [position, everyone, nobody]


def failed(log: headwater.Headwater, dsn: str, topic: str, events: int) -> list[int]:
    """Two handlers that give up on everything."""
    app = App()

    @app.subscriber(*of(topic), retry_delays=[0], name="first")
    async def first(event: headwater.Event) -> None:
        raise RuntimeError("first failed")

    @app.subscriber(*of(topic), name="second")
    async def second(event: headwater.Event) -> Any:
        return Dead("second gave up")

    log.subscribe(*of(topic))
    positions = log.publish_batch(topic, [NewEvent(n, key=f"k{n}") for n in range(events)])
    run_until(app, dsn, lambda: len(log.dead_letters(topic, batch_size=1000)) == 2 * events)
    return [position for position in positions if position is not None]


def test_what_a_subscriber_gave_up_on_is_a_dead_letter_like_any_other(
    log: headwater.Headwater, dsn: str, topic: str
) -> None:
    positions = failed(log, dsn, topic, 3)
    (id,) = [one.id for one in log.subscriptions(topic)]
    letters = log.dead_letters(topic, handler="first")
    assert [letter.position for letter in letters] == positions
    one = letters[0]
    assert (one.topic, one.key, one.attempts, one.subscription_id) == (topic, b"k0", 2, id)
    assert [(part["attempt"], part["error"]) for part in one.history] == [
        (1, "RuntimeError: first failed"),
        (2, "RuntimeError: first failed"),
    ]
    # Letters of one event are never cut apart by a page.
    assert [letter.handler for letter in log.dead_letters(topic, batch_size=1)] == ["first", "second"]
    assert log.dead_letters(topic, error_like="second%", after=positions[1])[0].position == positions[2]
    assert log.discard(topic, positions=positions[:1], handler="second") == 1
    assert log.redrive(topic, handler="second") == 2
    app, again = App(), []

    @app.subscriber(*of(topic), name="first")
    async def first(event: headwater.Event) -> None:
        again.append(("first", event.data))

    @app.subscriber(*of(topic), name="second")
    async def second(event: headwater.Event) -> None:
        again.append(("second", event.data))

    run_until(app, dsn, lambda: len(again) == 2 and len(log.dead_letters(topic)) == 3)
    assert sorted(again) == [("second", 1), ("second", 2)]
    assert log.redrive(topic, subscription_id=id) == 3
    run_until(app, dsn, lambda: len(again) == 5)
    assert log.dead_letters(topic) == []


def test_dead_letters_of_subscribers_by_command_line_and_http(log: headwater.Headwater, dsn: str, topic: str) -> None:
    positions = failed(log, dsn, topic, 2)
    run = CliRunner()
    listed = run.invoke(cli, ["dead", "list", topic, "--handler", "first", "--json", "--dsn", dsn])
    assert [one["handler"] for one in json.loads(listed.stdout)] == ["first", "first"]
    shown = run.invoke(cli, ["dead", "list", topic, "--dsn", dsn]).stdout
    assert "handler" in shown
    assert "second gave up" in shown
    with http_server(dsn) as address, httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as http:
        page = http.get(f"/v1/queues/{topic}/dead", params={"handler": "second"}).json()
        assert [(one["position"], one["handler"], one["error"]) for one in page["dead"]] == [
            (position, "second", "second gave up") for position in positions
        ]
        assert page["dead"][0]["event"]["data"] == 0
        url, chosen = f"/v1/queues/{topic}/dead/discard", {"positions": positions[:1], "handler": "second"}
        assert http.post(url, json={**chosen, "dry_run": True}).json()["count"] == 1
        assert http.post(url, json=chosen).json()["count"] == 1
        assert (
            http.post(f"/v1/queues/{topic}/dead/redrive", json={"all": True, "handler": "second"}).json()["count"] == 1
        )
    redriven = run.invoke(cli, ["dead", "redrive", topic, str(positions[0]), "--handler", "first", "--dsn", dsn])
    assert "redrove 1 dead letter" in redriven.stdout
    dropped = run.invoke(cli, ["dead", "discard", topic, "--yes", "--json", "--dsn", dsn])
    assert json.loads(dropped.stdout) == {"discarded": 1}
    assert log.dead_letters(topic) == []


def test_a_filter_that_is_stopped_is_logged_and_counted(
    log: headwater.Headwater,
    dsn: str,
    topic: str,
    connection: psycopg.Connection,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headwater.sql_subscriptions.reader.KEEP_SECONDS", 0.1)
    app = App()

    @app.subscriber(*of(topic))
    async def take(event: headwater.Event) -> None:
        pass

    id = log.subscribe(*of(topic))

    def counted() -> bool:
        # As a filter that took too long is marked.
        connection.execute(
            "insert into headwater_internal.filter_stop (queue_id, filter_id, position, stopped_at, error) "
            "select queue_id, filter_id, 0, now(), 'ran out of time' from headwater_internal.subscription where id "
            "= %s "
            "on conflict do nothing",
            (id,),
        )
        return any(labels == (topic,) for metric, labels, _ in COUNTERS.samples() if metric is STOPPED_FILTERS)

    with caplog.at_level(logging.ERROR, logger="headwater"):
        run_until(app, dsn, counted)
    connection.execute("delete from headwater_internal.filter_stop")
    (line,) = [record for record in caplog.records if record.getMessage() == "filter stopped"]
    assert f"subscription {id}: ran out of time" in line.error  # type: ignore[attr-defined]
