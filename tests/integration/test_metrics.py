"""Do the figures tell the truth, of everything that has one, and does readiness mean it?"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

import headwater
from headwater import NewEvent, NewStoreEvent, NoMatchAfter, Query, aio
from headwater.calls.metrics import LogHealth, Sample
from headwater.observability.counters import COUNTERS, MAX_SERIES, OTHERS, Counters
from headwater.observability.metrics import APPENDS, METRICS, PUBLISHED
from headwater.servers import prometheus
from headwater.servers.multiprocess_counters import MultiprocessCounters
from http_server import http_server
from patience import PATIENCE_SECONDS

parser = pytest.importorskip("prometheus_client.parser")


def figures(log: headwater.Headwater) -> dict[tuple[str, ...], float]:
    return {(name, *labels): value for name, labels, value in log.metrics()}


def with_log(dsn: str, act: Callable[[aio.AsyncHeadwater], Any]) -> Any:
    async def run() -> Any:
        async with await aio.connect(dsn, pool_size=2, connect_timeout_seconds=10) as log:
            return await act(log)

    return asyncio.run(run())


def run_cli(dsn: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    return subprocess.run(
        [sys.executable, "-c", "from headwater.cli import main; main()", *arguments],
        env={**environment, "HEADWATER_DSN": dsn},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


@pytest.fixture
def one_of_everything(log: headwater.Headwater, connection: psycopg.Connection, topic: str) -> str:
    """A log in which there is something to tell of each kind."""
    partitions = log.create_topic(f"{topic}-partitions", kind="sequenced").name
    log.publish_batch(partitions, [NewEvent(n) for n in range(5)])
    log.create_queue(topic, topic, max_attempts=1)
    log.open_cursor(topic, topics=topic)
    connection.execute(
        "insert into headwater_internal.pipeline (name, definition, source, checkpoint, batches, rows, last_batch_at) "
        "values (%s, '{}', 'log', 0, 2, 30, clock_timestamp())",
        (topic,),
    )
    connection.execute("insert into headwater_internal.kafka_group (name, coordinator) values (%s, 1)", (topic,))
    connection.execute(
        "insert into headwater_internal.kafka_offset (group_name, topic_id, partition, committed_offset) "
        "select %s, id, 0, 2 from headwater_internal.topic where name = %s",
        (topic, partitions),
    )
    return topic


def test_every_figure_of_the_database_is_on_the_page_with_its_labels(
    log: headwater.Headwater, connection: psycopg.Connection, one_of_everything: str
) -> None:
    log.publish(one_of_everything, 1)
    connection.execute("select pg_create_physical_replication_slot('metrics_test', true)")
    try:
        samples = log.metrics()
    finally:
        connection.execute("select pg_drop_replication_slot('metrics_test')")
    page = {metric.name: metric for metric in METRICS}
    assert {sample.name for sample in samples} - set(page) == set()
    for sample in samples:
        assert len(sample.labels) == len(page[sample.name].labels), sample
        assert page[sample.name].source == "database"
    asked = {metric.name for metric in METRICS if metric.source == "database"} - {"headwater_up"}
    assert asked - {sample.name for sample in samples} == set()
    assert len({(s.name, s.labels) for s in samples}) == len(samples)


def test_a_queue_and_a_cursor_tell_how_far_behind_they_are(log: headwater.Headwater, one_of_everything: str) -> None:
    name = one_of_everything
    log.publish_batch(name, [NewEvent(n) for n in range(10)])
    found = figures(log)
    assert found["headwater_queue_lag_events", name] == 10
    assert found["headwater_cursor_lag_events", name] == 10
    assert found["headwater_queue_lag_seconds", name] > 0
    assert found["headwater_cursor_lag_seconds", name] > 0

    lease = log.claim(name, worker="w", batch_size=4)
    assert lease is not None
    found = figures(log)
    # What is leased is not finished.
    assert found["headwater_queue_lag_events", name] == 10
    assert found["headwater_queue_leased_events", name] == 4
    assert found["headwater_queue_open_leases", name] == 1

    log.settle(lease, {lease.events[0].position: headwater.Dead("no"), lease.events[1].position: headwater.Snooze()})
    last = log.publish(name, "last")
    log.advance_cursor(name, from_position=0, to_position=last)
    found = figures(log)
    assert found["headwater_queue_dead_letters", name] == 1
    assert found["headwater_queue_redeliveries", name] == 1
    assert found["headwater_queue_leased_events", name] == 0
    assert found["headwater_queue_claimed_events_total", name] == 4
    assert found["headwater_cursor_lag_events", name] == 0
    assert found["headwater_cursor_lag_seconds", name] == 0
    # What is tried again is not done with, though everything newer may be.
    log.settle(log.claim(name, worker="w", batch_size=1), {})
    while lease := log.claim(name, worker="w", batch_size=100):
        log.settle(lease, {})
    assert figures(log)["headwater_queue_unfinished_seconds", name] == 0


def test_far_behind_is_counted_without_reading_it_all(log: headwater.Headwater, topic: str) -> None:
    log.open_cursor(topic, topics=topic)
    log.publish_many(topic, (NewEvent(n) for n in range(1500)))
    found = figures(log)
    assert found["headwater_cursor_lag_events", topic] == 1000
    assert found["headwater_cursor_lag_is_more", topic] == 1


def test_other_servers_tell_how_far_they_are(
    log: headwater.Headwater, connection: psycopg.Connection, one_of_everything: str
) -> None:
    found = figures(log)
    assert found["headwater_kafka_group_lag_events", one_of_everything, f"{one_of_everything}-partitions"] == 3
    assert found["headwater_pipeline_rows_total", one_of_everything] == 30
    (counted,) = connection.execute(
        "select count(*) from headwater_internal.event e join headwater_internal.topic t on t.id = e.topic_id and "
        "t.deleted_at is null"
    ).fetchone() or (None,)
    assert found["headwater_pipeline_behind", one_of_everything, "log"] == min(counted, 1000)
    assert found["headwater_pipeline_behind_is_more", one_of_everything, "log"] == (counted > 1000)
    assert found["headwater_pipeline_failed", one_of_everything] == 0
    assert found["headwater_pipeline_running", one_of_everything] == 0


def test_an_open_publisher_is_named_and_holds_the_stable_position(
    log: headwater.Headwater, dsn: str, topic: str
) -> None:
    with psycopg.connect(dsn) as publisher:
        log.publish(topic, 1, connection=publisher)
        log.publish(topic, 2)
        found = figures(log)
        assert found["headwater_publishers_in_flight",] == 1
        assert found["headwater_oldest_publisher_pid",] == publisher.info.backend_pid
        assert found["headwater_oldest_publisher_age_seconds",] > 0
        assert found["headwater_log_stable_position",] < found["headwater_log_head_position",]
        publisher.rollback()
    found = figures(log)
    assert found["headwater_publishers_in_flight",] == 0
    assert found["headwater_log_stable_position",] == found["headwater_log_head_position",]


def test_positions_are_counted_on_when_the_log_rotates_and_forgets(
    log: headwater.Headwater, connection: psycopg.Connection, topic: str
) -> None:
    log.publish_batch(topic, [NewEvent(n) for n in range(7)])
    before = figures(log)["headwater_log_positions_total",]
    for other in log.topics():
        log.alter_topic(other.name, retention=timedelta(microseconds=1))
    for queue in log.queues():
        log.delete_queue(queue.name)
    connection.execute(
        "update headwater_internal.segment set opened_at = opened_at - interval '2 days' where opened_at is not null"
    )
    assert log.maintain().segments_dropped == 1
    assert figures(log)["headwater_log_positions_total",] == before
    log.publish_batch(topic, [NewEvent(n) for n in range(3)])
    assert figures(log)["headwater_log_positions_total",] == before + 3


def test_a_conflict_of_an_event_store_is_counted_in_the_process(log: headwater.Headwater, topic: str) -> None:
    store = log.create_store(f"{topic}-store")

    def counted() -> dict[str, int]:
        return {
            labels[1]: n for metric, labels, n in COUNTERS.samples() if metric is APPENDS and labels[0] == store.topic
        }

    event = NewStoreEvent("Opened", {})
    filter = NoMatchAfter(Query(), 0)
    store.append(event, filter)
    with pytest.raises(headwater.AppendConflict):
        store.append(event, filter)
    assert counted() == {"appended": 1, "conflict": 1}


def test_what_is_rendered_is_what_prometheus_reads(log: headwater.Headwater, dsn: str, topic: str) -> None:
    odd = f'{topic} "quoted" \\ and\nbroken ü'
    log.create_queue(odd, topic)
    log.publish(topic, 1)
    text = with_log(dsn, prometheus.render).decode()
    read = {
        (sample.name, *sample.labels.values()): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert read["headwater_up",] == 1
    assert read["headwater_queue_lag_events", odd] == 1
    assert read["headwater_published_events_total", topic] >= 1
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert families["headwater_published_events"].type == "counter"
    assert families["headwater_up"].documentation.startswith("1 if the database answered")


def test_many_who_ask_at_once_cost_one_question(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = 0

    async def ask(log: aio.AsyncHeadwater) -> set[bytes]:
        original = log.metrics

        async def counting(*, most: int = 200) -> list[Sample]:
            nonlocal questions
            questions += 1
            return await original(most=most)

        monkeypatch.setattr(log, "metrics", counting)
        monkeypatch.setattr(prometheus, "CACHE_SECONDS", 3600.0)
        return set(await asyncio.gather(*(prometheus.render(log) for _ in range(50))))

    assert len(with_log(dsn, ask)) == 1
    assert questions == 1


def test_without_a_database_the_page_says_so_and_keeps_what_was_counted(
    dsn: str, connection: psycopg.Connection
) -> None:
    async def ask(log: aio.AsyncHeadwater) -> tuple[bytes, list[prometheus.Check]]:
        await log.create_topic("gone")
        await log.publish("gone", 1)
        connection.execute("alter schema headwater rename to hidden")
        try:
            return await prometheus.render(log), await prometheus.readiness(log)
        finally:
            connection.execute("alter schema hidden rename to headwater")

    page, checks = with_log(dsn, ask)
    assert b"\nheadwater_up 0\n" in page
    assert b'headwater_published_events_total{topic="gone"} 1' in page
    assert b"headwater_log_head_position" not in page
    assert not prometheus.is_ready(checks)
    assert [(check.name, check.ok) for check in checks] == [("database", True), ("schema", False)]


def test_labels_without_end_are_counted_together() -> None:
    counters = Counters()
    for n in range(MAX_SERIES + 10):
        counters.add(PUBLISHED, f"t{n}")
    samples = {labels: n for _, labels, n in counters.samples()}
    assert len(samples) == MAX_SERIES + 1
    assert samples[(OTHERS,)] == 10


def test_a_log_that_can_be_worked_with_is_ready(dsn: str) -> None:
    checks = with_log(dsn, prometheus.readiness)
    names = [
        "database",
        "schema",
        "primary",
        "room",
        "publishers",
        "maintenance",
        "segments",
        "register",
        "positions",
        "storage",
    ]
    assert [(check.name, check.ok) for check in checks] == [(name, True) for name in names]
    assert prometheus.is_ready(checks)


@pytest.mark.parametrize(
    ("broken", "mended", "failing", "ready"),
    [
        pytest.param(
            "update headwater_internal.installed set functions_checksum = 'x' || functions_checksum",
            "update headwater_internal.installed set functions_checksum = substr(functions_checksum, 2)",
            "schema",
            False,
            id="another schema",
        ),
        pytest.param(
            "create table kept as table headwater_internal.segment; delete from headwater_internal.segment where lo "
            "> headwater.head(); "
            "update headwater_internal.segment set hi = headwater.head() + 10 where hi > headwater.head() + 10",
            "delete from headwater_internal.segment; insert into headwater_internal.segment table kept; drop table "
            "kept",
            "room",
            False,
            id="no room",
        ),
        pytest.param(
            "update headwater_internal.maintenance_state set maintained_at = clock_timestamp() - interval '1 hour'",
            "update headwater_internal.maintenance_state set maintained_at = clock_timestamp()",
            "maintenance",
            True,
            id="no maintenance",
        ),
    ],
)
def test_readiness_tells_what_is_wrong(
    dsn: str, connection: psycopg.Connection, broken: str, mended: str, failing: str, ready: bool
) -> None:
    async def ask(log: aio.AsyncHeadwater) -> list[prometheus.Check]:
        connection.execute(broken.encode())
        try:
            return await prometheus.readiness(log)
        finally:
            connection.execute(mended.encode())

    checks = with_log(dsn, ask)
    assert [check.name for check in checks if not check.ok] == [failing]
    assert all(check.action for check in checks if not check.ok)
    assert prometheus.is_ready(checks) == ready


def test_a_publisher_that_stays_open_for_long_is_a_warning() -> None:
    health = LogHealth(True, True, 1.0, 10**8, 4711, 301.0, 12)
    (check,) = [check for check in prometheus._check_health(health) if not check.ok]
    assert (check.name, check.required) == ("publishers", False)
    assert "pg_terminate_backend(4711)" in (check.action or "")


def test_the_command_line_prints_them_and_ends_by_readiness(dsn: str, connection: psycopg.Connection) -> None:
    printed = run_cli(dsn, "metrics")
    assert printed.returncode == 0, printed.stderr
    assert "\nheadwater_up 1\n" in printed.stdout
    assert {row["name"] for row in json.loads(run_cli(dsn, "metrics", "--json").stdout)} >= {"headwater_topics"}

    connection.execute("update headwater_internal.maintenance_state set maintained_at = null")
    try:
        lenient, strict = run_cli(dsn, "check"), run_cli(dsn, "check", "--strict", "--json")
    finally:
        connection.execute("update headwater_internal.maintenance_state set maintained_at = clock_timestamp()")
    assert lenient.returncode == 0
    assert "warn  maintenance: maintenance has never run" in lenient.stdout
    assert strict.returncode == 1
    assert json.loads(strict.stdout)["ready"] is True

    nowhere = run_cli("host=/nonexistent dbname=none", "check")
    assert nowhere.returncode == 1
    assert nowhere.stdout.startswith("fail  database")


def test_a_consumer_may_ask_and_a_publisher_may_not(connection: psycopg.Connection) -> None:
    with connection.transaction():
        connection.execute("set local role headwater_consumer")
        assert connection.execute("select count(*) > 10 from headwater.metrics()").fetchone() == (True,)
        assert connection.execute("select primary_server from headwater_internal.log_health()").fetchone() == (True,)
    with pytest.raises(psycopg.errors.InsufficientPrivilege), connection.transaction():
        connection.execute("set local role headwater_publisher")
        connection.execute("select headwater.metrics()")


def test_processes_of_one_server_tell_the_same_sum_which_never_falls(tmp_path: Path) -> None:
    async def ask() -> None:
        one, other = Counters(), Counters()
        processes = [
            MultiprocessCounters(str(tmp_path), counters=counters, name=str(n))
            for n, counters in enumerate((one, other))
        ]

        async def told(number: int) -> float:
            return sum(sample.value for sample in await processes[number].samples() if sample.labels == ("t",))

        one.add(PUBLISHED, "t", by=5)
        assert await told(0) == 5
        other.add(PUBLISHED, "t", by=2)
        # What the first has told is not taken back by the second, which was asked next.
        assert await told(1) == 7
        one.add(PUBLISHED, "t")
        assert await told(0) == 8
        # One that takes the place of one that died begins at 0, and what was told stays.
        processes[1] = MultiprocessCounters(str(tmp_path), counters=Counters(), name="2")
        assert await told(1) == 8

    asyncio.run(ask())


def test_the_page_of_one_process_has_what_the_others_counted(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "another.json").write_text(json.dumps([[PUBLISHED.name, ["of another"], 41]]))
    with http_server(dsn, counts_directory=str(tmp_path)) as address:
        page = httpx.get(f"{address}/metrics", timeout=PATIENCE_SECONDS).text
    assert 'headwater_published_events_total{topic="of another"} 41' in page
