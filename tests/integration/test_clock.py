"""Does the log go on when the database clock is set back?

Each promise is checked twice: with a Postgres whose clock really steps (libfaketime, skipped where it is missing), and
with stored times moved ahead by the same step, which is the same to the log.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from typer.testing import CliRunner

import headwater
from headwater import NewEvent, Retry
from headwater.cli import app
from headwater.database import schema
from headwater.embedded import Postgres
from headwater.errors import ReaderBusy

HOUR = timedelta(hours=1)
Until = Callable[[Callable[[], Any]], Any]
_numbers = itertools.count()


class MovedTimes:
    """A step back of the clock, made by moving all times that the log has stored ahead."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    def set_back(self, step: timedelta) -> None:
        with psycopg.connect(self.dsn) as connection:
            columns = connection.execute(
                "select c.relname, array_agg(a.attname) from pg_class c join pg_attribute a on a.attrelid = c.oid "
                "where c.relnamespace in ('headwater'::regnamespace, 'headwater_internal'::regnamespace) and "
                "c.relkind = 'r' and not c.relispartition "
                "and a.attnum > 0 and not a.attisdropped and a.atttypid = 'timestamptz'::regtype group by c.relname"
            ).fetchall()
            for table, names in columns:
                moved = sql.SQL(", ").join(
                    sql.SQL("{0} = {0} + {1}").format(sql.Identifier(name), sql.Literal(step)) for name in names
                )
                connection.execute(sql.SQL("update headwater_internal.{} set {}").format(sql.Identifier(table), moved))


class RealStep:
    """A step back of the clock of a Postgres under libfaketime, which began ahead of the real time."""

    def __init__(self, dsn: str, clock: Any, ahead: timedelta) -> None:
        self.dsn, self._clock, self._ahead = dsn, clock, ahead
        clock.set_offset(ahead.total_seconds())

    def set_back(self, step: timedelta) -> None:
        self._ahead -= step
        self._clock.set_offset(self._ahead.total_seconds())


@pytest.fixture(scope="module")
def stepping() -> Iterator[tuple[Postgres, Any]]:
    stepped_clock = pytest.importorskip("headwater.embedded.stepped_clock")
    if stepped_clock.find_libfaketime() is None:
        pytest.skip("libfaketime is not installed")
    with tempfile.TemporaryDirectory(prefix="headwater-clock-", ignore_cleanup_errors=True) as directory:
        clock = stepped_clock.SteppedClock(Path(directory, "offset"))
        Path(directory).chmod(0o755)
        server = Postgres(
            Path(directory, "pg"),
            settings={"fsync": "off", "synchronous_commit": "off", "autovacuum": "off"},
            environment=clock.environment,
        )
        server.start()
        try:
            yield server, clock
        finally:
            server.stop(mode="immediate")


@pytest.fixture(params=["stored times", "real clock"])
def clock(request: pytest.FixtureRequest, admin_dsn: str, template: str) -> Iterator[MovedTimes | RealStep]:
    """A log of the test's own, on a server whose clock can be set back."""
    name = f"headwater_clock_{next(_numbers)}"
    if request.param == "stored times":
        with psycopg.connect(admin_dsn, autocommit=True) as connection:
            make = sql.SQL("create database {} template {}")
            connection.execute(make.format(sql.Identifier(name), sql.Identifier(template)))
            yield MovedTimes(psycopg.conninfo.make_conninfo(admin_dsn, dbname=name))
            connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))
        return
    server, stepped = request.getfixturevalue("stepping")
    dsn = server.dsn("postgres")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    dsn = psycopg.conninfo.make_conninfo(dsn, dbname=name)
    real = RealStep(dsn, stepped, 2 * HOUR)
    with psycopg.connect(dsn, autocommit=True) as connection:
        schema.upgrade(connection)
    yield real


@pytest.fixture
def dsn(clock: MovedTimes | RealStep) -> str:
    return clock.dsn


@pytest.fixture
def queue(log: headwater.Headwater, topic: str) -> str:
    log.create_queue("queue", topic, lease_seconds=1, backoff_seconds=0.5, backoff_jitter=0)
    return "queue"


def claimed(log: headwater.Headwater, queue: str) -> list[tuple[Any, int]]:
    """What a worker gets that looks after the leases of its queue, as workers do each second."""
    log.reap(queue)
    lease = log.claim(queue, worker="second", batch_size=10)
    return [] if lease is None else [(event.data, event.attempt) for event in lease.events]


def test_a_failed_event_comes_again_within_seconds_after_the_clock_went_back(
    log: headwater.Headwater, topic: str, queue: str, clock: MovedTimes | RealStep, until: Until
) -> None:
    log.publish_batch(topic, [NewEvent(n) for n in range(3)])
    for _ in range(2):
        log.ack(log.claim(queue, worker="first") or pytest.fail("nothing to claim"))
    last = log.claim(queue, worker="first")
    assert last is not None
    clock.set_back(HOUR)
    log.settle(last, {last.events[0].position: Retry()})
    assert until(lambda: claimed(log, queue)) == [(2, 2)]


def test_an_event_that_waited_when_the_clock_went_back_comes_within_seconds(
    log: headwater.Headwater, topic: str, queue: str, clock: MovedTimes | RealStep, until: Until
) -> None:
    log.publish(topic, 1)
    lease = log.claim(queue, worker="first")
    assert lease is not None
    log.settle(lease, {lease.events[0].position: Retry()})
    clock.set_back(HOUR)
    assert until(lambda: claimed(log, queue)) == [(1, 2)]


@pytest.mark.parametrize("attempt", [1, 2])
def test_the_events_of_a_dead_worker_come_within_seconds_after_the_clock_went_back(
    log: headwater.Headwater, topic: str, queue: str, clock: MovedTimes | RealStep, until: Until, attempt: int
) -> None:
    log.publish(topic, 1)
    lease = log.claim(queue, worker="first")
    assert lease is not None
    if attempt == 2:
        log.settle(lease, {lease.events[0].position: Retry(timedelta(0))})
        assert until(lambda: log.claim(queue, worker="first")) is not None
    clock.set_back(HOUR)
    assert until(lambda: claimed(log, queue)) == [(1, attempt + 1)]


def test_a_lease_that_is_held_when_the_clock_goes_back_stays_held(
    log: headwater.Headwater, topic: str, clock: MovedTimes | RealStep
) -> None:
    log.create_queue("patient", topic, lease_seconds=600)
    log.publish(topic, 1)
    lease = log.claim("patient", worker="first")
    assert lease is not None
    clock.set_back(HOUR)
    assert claimed(log, "patient") == []
    log.extend(lease)
    log.ack(lease)
    assert claimed(log, "patient") == []


def test_a_long_wait_is_not_cut_short_when_the_clock_goes_back(
    log: headwater.Headwater, topic: str, queue: str, clock: MovedTimes | RealStep
) -> None:
    log.publish_batch(topic, [NewEvent(n) for n in range(2)])
    lease = log.claim(queue, worker="first")
    assert lease is not None
    log.settle(lease, {lease.events[0].position: Retry(timedelta(minutes=20))})
    log.ack(log.claim(queue, worker="first") or pytest.fail("nothing to claim"))
    clock.set_back(HOUR)
    assert claimed(log, queue) == []
    assert claimed(log, queue) == []


def test_the_reader_of_subscriptions_that_died_is_replaced_within_seconds_after_the_clock_went_back(
    log: headwater.Headwater, topic: str, clock: MovedTimes | RealStep, until: Until
) -> None:
    log.subscribe("readers", "true")
    log.publish(topic, 1)
    log.read_next("readers", reader="first", lease_seconds=1)
    clock.set_back(HOUR)

    def read() -> bool:
        log.maintain()
        try:
            return bool(log.read_next("readers", reader="second", lease_seconds=1).events)
        except ReaderBusy:
            return False

    assert until(read)


def test_a_pipeline_whose_runner_died_is_run_within_seconds_after_the_clock_went_back(
    log: headwater.Headwater, connection: psycopg.Connection, clock: MovedTimes | RealStep, until: Until
) -> None:
    claim = "select held_by from headwater_internal.claim_pipeline('p', %s, interval '1 second', 'log', '{}')"
    assert connection.execute(claim, ("first",)).fetchone() == (None,)
    clock.set_back(HOUR)
    assert connection.execute(claim, ("second",)).fetchone() == ("first",)
    until(lambda: log.maintain() and connection.execute(claim, ("second",)).fetchone() == (None,))


def test_a_dead_kafka_broker_and_its_transactions_end_after_the_clock_went_back(
    log: headwater.Headwater, connection: psycopg.Connection, clock: MovedTimes | RealStep, until: Until
) -> None:
    connection.execute("select headwater_internal.kafka_register('127.0.0.1', 9092, 1)")
    connection.execute(
        "insert into headwater_internal.kafka_transactional_producer "
        "(transactional_id, producer_id, epoch, timeout_ms, began_at) "
        "values ('t', nextval('headwater_internal.kafka_producer_id'), 0, 500, clock_timestamp())"
    )
    clock.set_back(HOUR)
    log.maintain()
    until(lambda: not connection.execute("select from headwater.kafka_live_broker").fetchall())
    until(lambda: connection.execute("select headwater_internal.kafka_reap_transactions()").fetchone() == (1,))


def test_a_webhook_with_a_rate_goes_on_after_the_clock_went_back(
    log: headwater.Headwater, connection: psycopg.Connection, topic: str, clock: MovedTimes | RealStep
) -> None:
    log.create_queue("hook", topic)
    (number,) = connection.execute(
        "insert into headwater_internal.webhook (name, queue_id, url, secrets) "
        "select 'hook', g.id, 'http://127.0.0.1/', '{x}' from headwater_internal.queue g returning id"
    ).fetchone() or pytest.fail("no webhook")
    turn = "select headwater_internal.next_webhook_turn(%s, 1)"
    connection.execute(turn, (number,))
    clock.set_back(HOUR)
    (wait,) = connection.execute(turn, (number,)).fetchone() or pytest.fail("no turn")
    assert wait < 5


def test_segments_are_rotated_and_expire_after_the_clock_went_back(
    log: headwater.Headwater, connection: psycopg.Connection, clock: MovedTimes | RealStep, until: Until
) -> None:
    topic = log.create_topic("short", retention=timedelta(seconds=1)).name
    log.change_settings(segment_interval=timedelta(seconds=1))
    log.maintain()
    log.publish(topic, 1)
    clock.set_back(HOUR)
    until(lambda: log.maintain() and not log.read(topic, skip_expired=True))


def test_an_older_segment_is_never_kept_behind_a_newer_one_that_expired(
    log: headwater.Headwater, connection: psycopg.Connection, topic: str
) -> None:
    log.alter_topic(topic, retention=timedelta(days=2))
    for number in range(2):
        log.publish(topic, number)
        connection.execute("update headwater_internal.segment set opened_at = opened_at - interval '1 day'")
        log.maintain()
    # The clock went back by days after the first was closed.
    connection.execute(
        "update headwater_internal.segment "
        "set opened_at = closed_at - interval '5 days', closed_at = closed_at - interval '3 days' "
        "where lo = (select max(lo) from headwater_internal.segment where closed_at is not null)"
    )
    log.maintain()
    assert [event.data for event in log.read(topic)] == [0, 1]


def test_the_doctor_and_the_metrics_tell_of_a_clock_that_went_back(
    log: headwater.Headwater, dsn: str, clock: MovedTimes | RealStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWATER_DSN", dsn)

    def told() -> list[str]:
        found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["findings"]
        return [f"{one['outcome']}: {one['message']}" for one in found if one["check"] == "clock"]

    log.maintain()
    assert not any("was set back by" in line for line in told())
    clock.set_back(HOUR)
    log.maintain()
    assert any(line.startswith("warn: the database clock was set back by") for line in told())
    with log.connection() as connection:
        steps = "select value from headwater.metrics() where name = 'headwater_clock_steps_total'"
        assert connection.execute(steps).fetchone() == (1.0,)
