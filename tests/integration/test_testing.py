"""What the package offers for tests of applications: databases, a clock, captured events and draining."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

import headwater
from headwater import App, Retry
from headwater.queue.drain import DrainTimeout
from headwater.testing import DatabasePool, PublishedEvents, advance_clock, drain
from patience import PATIENCE_SECONDS


def test_a_drained_app_has_handled_all_events_also_those_that_handlers_publish(
    dsn: str, log: headwater.Headwater
) -> None:
    log.create_topic("first")
    log.create_topic("second")
    app = App()
    seen: list[tuple[str, int]] = []

    @app.worker("first", queue="one")
    async def forward(event: headwater.ClaimedEvent) -> None:
        seen.append(("one", event.data))
        await asyncio.to_thread(log.publish, "second", event.data)

    @app.worker("second", queue="two")
    def receive(event: headwater.ClaimedEvent) -> None:
        seen.append(("two", event.data))

    for number in range(5):
        log.publish("first", number)
    drained = drain(app, dsn)
    assert (drained.done, drained.dead, drained.retrying) == (10, 0, 0)
    assert sorted(seen) == [(queue, number) for queue in ("one", "two") for number in range(5)]
    assert asyncio.run(app.drain(dsn)).done == 0


def test_a_drain_leaves_retries_unless_time_passes_for_them(dsn: str, log: headwater.Headwater) -> None:
    log.create_topic("retried")
    app = App()
    attempts: list[int] = []

    @app.worker("retried", queue="retrying", max_attempts=3)
    def handle(event: headwater.ClaimedEvent) -> Retry:
        attempts.append(event.attempt)
        return Retry(timedelta(hours=2), "not yet")

    log.publish("retried", 1)
    assert drain(app, dsn).retrying == 1
    assert attempts == [1]
    drained = drain(app, dsn, with_retries=True)
    assert (drained.dead, drained.retrying) == (1, 0)
    assert attempts == [1, 2, 3]


def test_a_drain_names_the_queue_that_does_not_end(dsn: str, log: headwater.Headwater) -> None:
    log.create_topic("slow")
    app = App()

    @app.worker("slow", queue="stuck")
    async def handle(event: headwater.ClaimedEvent) -> None:
        await asyncio.sleep(3600)

    log.publish("slow", 1)
    with pytest.raises(DrainTimeout, match="stuck: 0 ready, 1 in work"):
        drain(app, dsn, timeout_seconds=1.5)


def test_time_passes_for_scheduled_events_and_leases(log: headwater.Headwater) -> None:
    log.create_topic("later")
    log.publish("later", "scheduled", delay=timedelta(days=2))
    log.maintain()
    assert log.read("later") == []
    advance_clock(log, timedelta(days=3))
    assert [event.data for event in log.read("later")] == ["scheduled"]
    log.create_queue("leased", "later", lease_seconds=3600)
    assert log.claim("leased", worker="a") is not None
    assert log.claim("leased", worker="b") is None
    advance_clock(log, timedelta(hours=2))
    log.reap("leased")
    again = log.claim("leased", worker="b")
    assert again is not None
    assert again.events[0].data == "scheduled"


def test_published_events_are_those_since_the_beginning_also_uncommitted_ones(
    dsn: str, log: headwater.Headwater
) -> None:
    log.create_topic("noted")
    log.publish("noted", "before")
    events = PublishedEvents(log)
    events.none()
    log.publish("noted", "after", type="Noted")
    assert events.one("noted", type="Noted").data == "after"
    with pytest.raises(AssertionError, match=r"of topic 'noted' of type 'Other', found 0; published so far"):
        events.one("noted", type="Other")
    with pytest.raises(AssertionError, match="expected no event, found 1"):
        events.none("noted")
    with psycopg.connect(dsn, row_factory=psycopg.rows.dict_row) as connection:
        within = PublishedEvents(log, connection=connection)
        log.publish("noted", "uncommitted", connection=connection)
        assert within.one("noted").data == "uncommitted"
        connection.rollback()
        within.none()


def test_each_database_is_new_and_dropped_later(admin_dsn: str) -> None:
    with DatabasePool(admin_dsn, name="headwater_pool") as databases:
        for number in range(5):
            with databases.database() as dsn, headwater.connect(dsn) as log:
                assert [topic.name for topic in log.topics()] == []
                log.create_topic(f"topic-{number}")
    with psycopg.connect(admin_dsn) as admin:
        found = admin.execute("select datname from pg_database where datname like 'headwater_pool%'").fetchall()
    assert found == []


TESTS = """
def test_an_order_is_published(headwater_log, headwater_published):
    headwater_log.create_topic("orders")
    headwater_log.publish("orders", {"id": 42}, type="OrderPlaced")
    assert headwater_published.one("orders").data == {"id": 42}


def test_the_next_test_has_an_empty_log(headwater_log, headwater_published):
    assert [topic.name for topic in headwater_log.topics()] == []
    headwater_published.none()
"""


@pytest.mark.parametrize("own_server", [True, False])
def test_pytest_finds_the_fixtures(tmp_path: Path, admin_dsn: str, own_server: bool) -> None:
    (tmp_path / "test_shop.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "."]
    given = [] if own_server else ["--headwater-dsn", admin_dsn]
    done = subprocess.run(
        [*command, *given], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr
